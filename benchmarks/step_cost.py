"""Processor time of a training step at two sites on loopback, and calls of this package's functions in it.

    python benchmarks/step_cost.py                                               all models but BERT-base
    python benchmarks/step_cost.py --models mnistnet,bert --methods dad,rankdad
    python benchmarks/step_cost.py --models densenet121,unet --methods dsgd,rankdad:rank=auto    (see volumes.py)

For each model and method: milliseconds of processor time of a step, those of the same step in one process alone and by
DDP, the ratio of the first two, the calls of Python functions of the package by layer with a weight and step, and the
ratio of the bytes that a site sends in a step to the size of its gradient in fp32. All are measured several times by
turns, and the least time counts: other work on the machine makes a turn longer, not shorter. One thread a site. Times
are of the process, with its threads; waiting takes none.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from attach import Attached
from command import connect_site, parser_of, run_at_sites
from fine_tuning import tied_model
from torch import Tensor, nn
from volumes import VOLUMES
from workloads import LARGE, WORKLOADS, Workload, loss

import dadplug

WARM_UP = 25  # steps; kernels compile, payloads find their sizes, ranks settle
COUNTED = 4  # steps whose calls are counted
PACKAGE = tuple(str(Path(each).parent) for each in (dadplug.__file__, dadplug.hooks.__file__))


class UNet3D(nn.Module):
    """U-Net of two resolutions for volumes, with a class for each voxel."""

    def __init__(self, width: int = 8, classes: int = 2) -> None:
        super().__init__()
        self.first, self.last = _double(1, width), _double(3 * width, width)
        self.low = nn.Sequential(nn.MaxPool3d(2), _double(width, 2 * width), nn.Upsample(scale_factor=2))
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, volumes: Tensor) -> Tensor:
        high = self.first(volumes)
        return self.head(self.last(torch.cat([high, self.low(high)], 1))).movedim(1, -1)


def _double(before: int, after: int) -> nn.Sequential:
    sizes = ((before, after), (after, after))
    return nn.Sequential(
        *(nn.Sequential(nn.Conv3d(*each, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU()) for each in sizes)
    )


def _volumes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    volumes = torch.randn(count, 1, 16, 16, 16, generator=generator)
    return volumes, (volumes[:, 0] > 0).long()


def _bytes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    windows = torch.randint(0, 256, (count, 65), generator=generator)
    return windows[:, :-1], windows[:, 1:]


MODELS = {
    "bytes": Workload(tied_model, 8, _bytes),
    "vit": WORKLOADS["vit"],
    "mnistnet": WORKLOADS["mnistnet"],
    "unet3d": Workload(UNet3D, 2, _volumes),
    "bert": LARGE["bert"],
    **VOLUMES,
}


def step_of(workload: Workload, method: str) -> tuple[Callable[[], None], Attached]:
    """Return a function that takes a training step, and what trains the model."""
    torch.manual_seed(0)
    attached = Attached(workload.build(), method)
    inputs, targets = workload.draw(workload.batch_size, torch.Generator().manual_seed(dist.get_rank()))
    optimizer = torch.optim.SGD(attached.model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss(attached.model(inputs), targets).backward()
        attached.step(optimizer)

    return step, attached


def milliseconds(step: Callable[[], None], steps: int) -> float:
    """Return the processor time of a step, the mean over both sites."""
    dist.barrier()
    start = time.process_time()
    for _ in range(steps):
        step()
    seconds = torch.tensor(time.process_time() - start)
    dist.all_reduce(seconds)
    return 1e3 * float(seconds) / steps / dist.get_world_size()


def calls(step: Callable[[], None]) -> float:
    """Return how often Python functions of the package are called in a step, but for threads of its own."""
    count = 0

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(watch)
    for _ in range(COUNTED):
        step()
    sys.setprofile(None)
    return count / COUNTED


def measure(arguments: argparse.Namespace) -> None:
    """Measure all models and methods, and print a table at site 0."""
    connect_site()
    show = partial(print, flush=True) if dist.get_rank() == 0 else (lambda *_: None)
    show("| model | method | ms | alone | ratio | DDP | calls a layer | share |\n" + "| --- " * 8 + "|")
    for name in arguments.models.split(","):
        methods = ["alone", "ddp", *arguments.methods.split(",")]
        made = {method: step_of(MODELS[name], method) for method in methods}
        for step, _ in made.values():
            for _ in range(WARM_UP):
                step()
        least = dict.fromkeys(methods, float("inf"))
        for _ in range(arguments.turns):
            for method, (step, _) in made.items():
                least[method] = min(least[method], milliseconds(step, arguments.steps))
        for method in methods[2:]:
            step, attached = made[method]
            layers = sum(parameter.dim() > 1 for parameter in attached.model.parameters())
            trained = 4 * sum(each.numel() for each in attached.model.parameters() if each.requires_grad)
            times = f"{least[method]:.2f} | {least['alone']:.2f} | {least[method] / least['alone']:.2f}"
            count, share = calls(step) / layers, attached.reduction.traffic.bytes_sent / trained
            show(f"| {name} | {method} | {times} | {least['ddp']:.2f} | {count:.0f} | {share:.4f} |")
        for _, attached in made.values():
            attached.detach()


def main() -> None:
    parser = parser_of(
        __doc__,
        models=("bytes,vit,mnistnet,unet3d", f"some of {', '.join(MODELS)}"),
        methods=("rankdad:rank=auto,rankdad,dad", "as benchmarks/attach.py"),
        turns=5,
        steps=(10, "of a turn"),
    )
    sys.exit(run_at_sites(measure, parser.parse_args()))


if __name__ == "__main__":
    main()
