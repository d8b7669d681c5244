"""What a hospital runs: a plain loop over its own digits, over a hub, in which hospitals may leave and return.

    python examples/hospital.py --kit kits/lyon

The kit is one of `python -m dadplug provision`. `examples/two_hospitals.py` starts two hospitals on this machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import dadplug
from dadplug.data import load_dataset, site_indices
from dadplug.tools.cli import plain_errors


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kit", type=Path, required=True, help="folder of this hospital's kit")
    add("--mode", default="rankdad", help="method: rankdad, dad, dsgd, auto or topk (default: rankdad)")
    add("--split", default="by-class", help="how samples are assigned to hospitals: by-class, iid (default: by-class)")
    add("--steps", type=int, default=300, help="steps in which all hospitals take part (default: 300)")
    add("--pause", type=float, default=0.0, help="seconds between steps (default: 0)")
    add("--log", type=Path, default=Path(os.devnull), help="file for a line of JSON per step")
    return parser.parse_args()


class CompleteSteps:
    """Number of steps in which all hospitals have taken part; one that returns gets it from the other one."""

    def __init__(self) -> None:
        self.complete = 0

    def state_dict(self) -> dict[str, int]:
        return {"complete": self.complete}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.complete = state["complete"]


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # both hospitals may run on one machine
    data = load_dataset("digits")
    dadplug.connect(kit=arguments.kit)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer, progress = torch.optim.Adam(model.parameters(), lr=1e-3), CompleteSteps()
    # min_sites=1: training goes on while one site is there. state: what a site that returns needs beside the model.
    reduction = dadplug.GradientReduction(
        model, arguments.mode, min_sites=1, state={"optimizer": optimizer, "progress": progress}
    )
    labels = data.train.labels
    mine = data.train.subset(site_indices(labels, reduction.site_rank, reduction.world_size, arguments.split))
    with arguments.log.open("a", buffering=1) as log:
        while progress.complete < arguments.steps:
            step = reduction.step  # of the whole run: a site that returns begins where the other one is
            inputs, targets = batch(mine, step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            reduction.synchronize()
            optimizer.step()
            present = reduction.present_sites  # the same list on all sites
            progress.complete += len(present) == reduction.world_size
            line = {"step": step, "time": time.time(), "present": present, "loss": loss.item()}
            line |= {"accuracy": accuracy(model, data.test), "digest": digest(model)}
            log.write(json.dumps(line) + "\n")
            time.sleep(arguments.pause)


def batch(samples, step, size=32):
    """Return the batch of a step. It depends on the step alone, so that a site that returns needs no place in data."""
    epoch, place = divmod(step, len(samples) // size)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(epoch))
    chosen = order[place * size : (place + 1) * size]
    return samples.images[chosen], samples.labels[chosen]


def accuracy(model, samples) -> float:
    with torch.no_grad():
        return float((model(samples.images).argmax(1) == samples.labels).float().mean())


def digest(model) -> str:
    values = torch.cat([value.detach().reshape(-1) for value in model.parameters()])
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    with plain_errors(ValueError):
        train(parse())
