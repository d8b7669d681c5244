"""Time of a training epoch of the two-site ViT: DDP in a plain loop, and one method in each trainer, in one run.

    sudo python benchmarks/link.py 100mbit python benchmarks/epoch_time.py
    torchrun --nproc-per-node 2 benchmarks/epoch_time.py                    unshaped, on loopback

One thread a site, MKL in all rows. The trainers alternate epoch by epoch, since a machine's pace varies; medians over
rounds. The first epoch of each is not counted: kernels compile, payloads find their sizes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from libraries import use_library
from torch import nn
from torch.utils.data import DataLoader

import dadplug
from dadplug.data import load_dataset, site_indices

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import two_site_vit
import two_sites
from command import parser_of


def by_ddp(run: two_sites.Run) -> None:
    model = nn.parallel.DistributedDataParallel(run.model)
    for _ in range(run.history.epochs):
        run.history.begin_epoch()
        for inputs, targets in run.train:
            run.optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            run.optimizer.step()
        run.history.end_training_epoch()


class Quiet(two_sites.History):
    """A history that prints nothing."""

    def end_epoch(self, *args) -> None:
        pass


def measure(name: str, arguments: argparse.Namespace, data, epochs: int) -> float:
    """Return the seconds of the last epoch."""
    torch.manual_seed(0)
    model, data = two_site_vit.build(data, arguments)
    mine = site_indices(data.train.labels, dist.get_rank(), dist.get_world_size())
    mine = mine[: arguments.steps * arguments.batch_size]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    run = two_sites.Run(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
        train=DataLoader(data.train.subset(mine), batch_size=arguments.batch_size, shuffle=True),
        valid=DataLoader(data.test.subset(torch.arange(8)), batch_size=8),
        options={"mode": arguments.mode, "rank": arguments.rank},
        classes=data.classes,
        seed=0,
        steps=arguments.steps,
        history=Quiet(epochs),
    )
    dist.barrier()
    (by_ddp if name == "ddp" else two_sites.TRAINERS[name])(run)
    return run.history.epoch_seconds[-1]


def main() -> None:
    parser = parser_of(
        __doc__,
        mode="rankdad",
        rank=4,
        dataset="digits",
        data_dir=None,
        size={"choices": ("small", "full"), "default": "small"},
        batch_size=32,
        steps=(15, "batches in an epoch"),
        rounds=3,
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    use_library(arguments.mode, "mkl")
    dadplug.connect()
    data = load_dataset(arguments.dataset, arguments.data_dir)
    names = ("ddp", "plain", "catalyst", "lightning")
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            times[name].append(measure(name, arguments, data, 2))
    if os.environ["RANK"] == "0":
        ddp, plain = (statistics.median(times[name]) for name in ("ddp", "plain"))
        for name in names:
            seconds = statistics.median(times[name])
            print(
                f"{name:10} {seconds:7.2f} s an epoch of {arguments.steps} steps   {seconds / ddp:5.2f} of ddp   "
                f"{seconds / plain:5.3f} of the plain loop"
            )


if __name__ == "__main__":
    main()
