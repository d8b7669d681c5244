"""Loss after rounds of local steps with sparse deltas, against the dense mean.

    python benchmarks/sparse_loss.py                          four sites, 20 rounds of 16 steps; a few minutes
    python benchmarks/sparse_loss.py --rounds 125 --seeds 2
    python benchmarks/sparse_loss.py --processes              a process for each site, by LocalSGD

Without --processes all sites are simulated in one process.

The byte transformer of benchmarks/fine_tuning.py, of width 128: trained on the documentation, then fine-tuned on the
package's sources, of which each site has a part. Adam, 8 windows of 64 bytes a step. Deltas go through the code and the
memory that LocalSGD uses. The loss is that of the agreed model on files that no site has, in nats a byte.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from copy import deepcopy

import torch
import torch.distributed as dist
from command import parser_of
from fine_tuning import BATCH, ROOT, tied_model, windows
from torch import Tensor, nn
from workloads import loss

import dadplug
from dadplug.local_steps.delta_format import SparseFormat
from dadplug.support.processes import launch_sites

PRETRAINING, PRETRAINED_RATE = 400, 2e-3
CHECKED = 256  # windows of the held-out files
EVERY = 16
DENSE = "dense mean"
SPARSE = {"density": 0.02}
WAYS: dict[str, dict[str, float]] = {
    DENSE: {},
    "density 0.02": SPARSE,
    "density 0.02, outer rate 1": SPARSE | {"outer_lr": 1.0},
    "density 0.02, outer rate 2": SPARSE | {"outer_lr": 2.0},
}


def texts(pattern: str, folders: tuple[str, ...], parts: int) -> tuple[list[Tensor], Tensor]:
    """Return the bytes of the parts of some files, and of those that are held out, every tenth."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob(pattern))
    rest = [file for place, file in enumerate(files) if place % 10]

    def joined(chosen: list) -> Tensor:
        return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in chosen)), dtype=torch.uint8).long()

    return [joined(rest[part::parts]) for part in range(parts)], joined(files[::10])


def take(model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor, rng, steps: int, step=None) -> None:
    """Take steps on windows that a generator draws, by the optimizer or by a function."""
    for _ in range(steps):
        inputs, targets = windows(data, BATCH, rng)
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        (step or optimizer.step)()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def set_values(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])


def fine_tune(start: nn.Module, way: dict[str, float], seed: int, arguments: argparse.Namespace) -> float:
    """Train by rounds, all sites in this process; return the held-out loss of the agreed model."""
    data, held_out = texts("*.py", ("dadplug", "hooks", "runners"), arguments.sites)
    models = [deepcopy(start) for _ in data]
    optimizers = [torch.optim.Adam(model.parameters(), arguments.rate) for model in models]
    generators = [torch.Generator().manual_seed(1000 * seed + site) for site in range(len(data))]
    agreed, shares = values_of(start), [1 / len(data)] * len(data)
    formats = [SparseFormat(lambda number: way["density"], 0.95, True) for _ in data]
    for number in range(arguments.rounds):
        deltas = []
        for model, *rest in zip(models, optimizers, data, generators, strict=True):
            set_values(model, agreed)
            take(model, *rest, EVERY)
            deltas.append({name: value - agreed[name] for name, value in values_of(model).items()})
        rate = way.get("outer_lr")
        if not way:
            means = {name: sum(delta[name] for delta in deltas) / len(deltas) for name in agreed}
        else:
            rooms = []
            for form, delta in zip(formats, deltas, strict=True):
                form.begin_round(number)
                rooms.append({dtype: torch.zeros(size, dtype=dtype) for dtype, size in form.layout(delta).items()})
                form.encode(delta, rooms[-1])
            means = formats[0].decode({torch.uint8: [room[torch.uint8] for room in rooms]}, shares)
        for name, mean in means.items():
            chosen = formats[0].rate_of(name) if way and rate is None else rate
            agreed[name] += (1.0 if chosen is None else chosen) * mean
    final = deepcopy(start)
    set_values(final, agreed)
    return held_out_loss(final, held_out)


def fine_tune_as_site(start: nn.Module, way: dict[str, float], seed: int, arguments: argparse.Namespace) -> float:
    """Train by rounds as one of the processes; return the held-out loss of the agreed model."""
    data, held_out = texts("*.py", ("dadplug", "hooks", "runners"), arguments.sites)
    model, site = deepcopy(start), dist.get_rank()
    optimizer = torch.optim.Adam(model.parameters(), arguments.rate)
    options = {"wire": "int2", **way} if way else {}
    local = dadplug.LocalSGD(model, optimizer, every=EVERY, overlap=False, **options)
    rng = torch.Generator().manual_seed(1000 * seed + site)
    take(model, optimizer, data[site], rng, EVERY * arguments.rounds, local.step)
    assert local.agreements == arguments.rounds
    assert local.first_difference() is None
    local.detach()
    return held_out_loss(model, held_out)


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: Tensor) -> float:
    inputs, targets = windows(held_out, CHECKED, torch.Generator().manual_seed(0))
    return float(loss(model(inputs), targets))


def measure(arguments: argparse.Namespace) -> None:
    """Train by each way for each seed, and print the losses, and their means; as a site only rank 0 prints."""
    as_site = "RANK" in os.environ
    torch.set_num_threads(1)
    if as_site:
        dadplug.connect()
    torch.manual_seed(0)
    model = tied_model()
    prose, _ = texts("*.md", ("docs",), 1)
    optimizer = torch.optim.Adam(model.parameters(), PRETRAINED_RATE)
    take(model, optimizer, prose[0], torch.Generator().manual_seed(0), PRETRAINING)
    _, held_out = texts("*.py", ("dadplug", "hooks", "runners"), 1)
    prints = not as_site or dist.get_rank() == 0
    if prints:
        print(f"before: {held_out_loss(model, held_out):.4f} nats a byte", flush=True)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for seed in range(arguments.seeds):
        for name, way in WAYS.items():
            found[name].append((fine_tune_as_site if as_site else fine_tune)(model, way, seed, arguments))
            if prints:
                print(f"seed {seed}, {name}: {found[name][-1]:.4f} nats a byte", flush=True)
    for name, losses in found.items():
        if prints:
            print(f"mean, {name}: {statistics.fmean(losses):.4f}, {min(losses):.4f} to {max(losses):.4f}")


def main() -> int:
    parser = parser_of(
        __doc__,
        sites=4,
        rounds=20,
        seeds=1,
        rate=(1e-4, "Adam's, in the local steps"),
        processes=(False, "a process for each site, on this machine"),
    )
    arguments = parser.parse_args()
    if arguments.processes and "RANK" not in os.environ:
        return launch_sites([__file__, *sys.argv[1:]], arguments.sites)
    measure(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
