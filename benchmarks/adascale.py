"""Larger batches with AdaScale on MNIST: accuracy at equal progress, steps and seconds, between two sites.

    python benchmarks/adascale.py --data-dir DIR                             both sites on this machine
    sudo python benchmarks/link.py 100mbit python benchmarks/adascale.py --data-dir DIR
    python benchmarks/adascale.py --data-dir DIR --quick                     one seed, fewer steps

Every run trains a small network by SGD with a cosine schedule, to the same number of scale-invariant steps: with the
base batch, with larger batches and AdaScale, and with the largest batch and the learning rate of the base batch. Prints
a line a run and the means over seeds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from typing import NamedTuple

import torch
from command import connect_site, parser_of, run_at_sites
from torch import nn

import dadplug
from dadplug.data import load_dataset

SITES = 2


class Run(NamedTuple):
    """Result of a training.

    Attributes:
        accuracy: on the test set, in percent.
        steps: steps of the optimizer.
        seconds: time of these.
    """

    accuracy: float
    steps: int
    seconds: float


def train(data, batch: int, scaled: bool, arguments: argparse.Namespace, seed: int) -> Run:
    """Train to the number of steps of the base batch, counted by AdaScale where it scales."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    reduction = dadplug.GradientReduction(model, mode=arguments.mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.steps)
    scaler = dadplug.AdaScale(optimizer, reduction, scheduler, base_batch=arguments.batch) if scaled else None
    order = torch.Generator().manual_seed(seed)
    steps, seconds = 0, 0.0
    while (steps if scaler is None else scaler.progress) < arguments.steps:
        chosen = torch.randint(len(data.train), (batch,), generator=order)[reduction.site_rank :: SITES]
        inputs, targets = data.train.images[chosen], data.train.labels[chosen]
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        reduction.synchronize()
        optimizer.step()
        (scheduler if scaler is None else scaler).step()
        seconds += time.perf_counter() - start
        steps += 1
    with torch.no_grad():
        right = model(data.test.images).argmax(1) == data.test.labels
    assert reduction.first_difference() is None
    reduction.detach()
    return Run(100.0 * float(right.double().mean()), steps, seconds)


def run_site(arguments: argparse.Namespace) -> None:
    connect_site()
    data = load_dataset("mnist", arguments.data_dir)
    largest = arguments.batch * arguments.factors[-1]
    settings = [("fixed batch", arguments.batch, False)]
    settings += [(f"AdaScale, {factor} times larger", arguments.batch * factor, True) for factor in arguments.factors]
    settings += [("as large, learning rate of the base batch", largest, False)] * (not arguments.quick)
    found = defaultdict(list)
    for seed in range(arguments.seeds):
        for name, batch, scaled in settings:
            result = train(data, batch, scaled, arguments, seed)
            found[name].append(result)
            if os.environ["RANK"] == "0":
                print(
                    f"seed {seed}  {name:42} {result.accuracy:6.2f} %  {result.steps:5} steps  {result.seconds:7.2f} s"
                )
    if os.environ["RANK"] == "0":
        base = statistics.fmean(each.seconds for each in found["fixed batch"])
        print(
            f"\nmeans of {arguments.seeds} seeds, {arguments.steps} steps of {arguments.batch} samples or that progress"
        )
        for name, runs in found.items():
            accuracy, steps, seconds = (statistics.fmean(column) for column in zip(*runs, strict=True))
            print(f"{name:42} {accuracy:6.2f} %  {steps:7.1f} steps  {seconds:7.2f} s  {base / seconds:5.2f} x as fast")


def main() -> int:
    parser = parser_of(
        __doc__,
        data_dir=None,
        mode="dsgd",
        batch=(32, "base batch, of both sites together"),
        factors={"type": int, "nargs": "+", "default": [2, 4, 8]},
        steps=(2000, "steps with the base batch"),
        seeds=3,
        lr=0.1,
        quick=(False, "one seed, 300 steps, the largest batch alone"),
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.steps, arguments.factors = 1, 300, arguments.factors[-1:]
    return run_at_sites(run_site, arguments, SITES)


if __name__ == "__main__":
    sys.exit(main())
