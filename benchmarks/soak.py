"""Many steps with whatever sites may do: random rows, idle sites, unused layers, accumulation, delays.

    python benchmarks/soak.py --steps 10000                                      dad and rankdad, two sites on loopback
    python benchmarks/soak.py --steps 10000 --methods auto,powersgd --sites 3
    torchrun --nproc-per-node 3 benchmarks/soak.py --methods rankdad --steps 10000

One model with linear layers, convolutions of inputs of one and of several sizes, an embedding, an LSTM, layer and batch
normalisation. In a step a site has no batch, one, or two that accumulate, each of 1 to 40 rows, each through a random
part of the layers, with random delays before, between and after.

A verdict a method: no site hung (the timeout would end it), replicas equal to the bit at each look, gradients of exact
methods equal to autograd's on all sites' rows at each look, and memory at the end within a tenth of that after the
first tenth of the steps, at least 500. Exits with an error if one fails.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import sys
import time
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from attach import Attached, parse
from command import connect_site, parser_of
from torch import Tensor, nn

import dadplug
from dadplug.step.methods import method_names
from dadplug.support.processes import launch_sites

EXACT = ("dsgd", "dad", "auto")
SETTLED = 500  # steps; before, kernels compile and payloads grow
TOLERANCE = 1e-4
"""Largest difference from autograd's gradient, relative to its norm; float32, sums of up to 80 rows a site."""


class Wandering(nn.Module):
    """A network whose path depends on an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 24)
        self.recurrent = nn.LSTM(24, 24, batch_first=True)
        self.spans = nn.Conv1d(24, 24, 3, padding=1)
        self.picture = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, 2))
        self.first = nn.Linear(24, 48)
        self.seen = nn.Linear(6 * 3 * 3, 48)
        self.ways = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.norm = nn.LayerNorm(48)
        self.last = nn.Linear(48, 7)

    def forward(self, ids: Tensor, images: Tensor, ways: frozenset[str]) -> Tensor:
        x = self.words(ids)
        if "recurrent" in ways:
            x = x + self.recurrent(x)[0]
        if "spans" in ways:
            x = x + torch.tanh(self.spans(x.transpose(1, 2)).transpose(1, 2))
        x = self.first(x.mean(1))
        if "picture" in ways:
            x = x + self.seen(self.picture(images).flatten(1))
        x = torch.tanh(x)
        for number, layer in enumerate(self.ways):
            if f"way {number}" in ways:
                x = torch.tanh(layer(x))
        return self.last(self.norm(x))


WAYS = ("recurrent", "spans", "picture", "way 0", "way 1", "way 2")
Batch = tuple[Tensor, Tensor, frozenset[str]]


def draw(chance: random.Random) -> Batch:
    """Draw a batch and the layers that it takes."""
    rows = chance.randint(1, 40)
    ids = torch.randint(0, 500, (rows, chance.randint(2, 9)))
    return ids, torch.randn(rows, 1, 8, 8), frozenset(way for way in WAYS if chance.random() < 0.7)


def backward(model: nn.Module, batch: Batch, share: float = 1.0) -> None:
    (nn.functional.cross_entropy(model(*batch), batch[0].sum(1) % 7) * share).backward()


def memory() -> float:
    """Resident memory of this process, in MB."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1e3


@dataclass
class Verdict:
    """Outcome of a method's steps at this site."""

    steps: int = 0
    first_difference: str = ""
    worst_gradient: float = 0.0
    memory: list[float] = field(default_factory=list)

    def fault(self) -> str:
        """Return what is wrong; an empty string if nothing is."""
        if self.first_difference:
            return self.first_difference
        if not self.worst_gradient <= TOLERANCE:
            return f"gradients are off autograd's by {self.worst_gradient:.1e}"
        if len(self.memory) > 1 and self.memory[-1] > 1.1 * self.memory[0]:
            return f"memory has grown from {self.memory[0]:.0f} to {self.memory[-1]:.0f} MB"
        return ""


def off_autograd(model: nn.Module, own: nn.Module, batches: list[Batch], attached: Attached) -> float:
    """Compare the agreed gradients with those of autograd, on a copy of the model, of all sites' batches.

    Args:
        model: the model, with agreed gradients.
        own: a copy of it from before the step.
        batches: this site's batches, in order.
        attached: the method.

    Returns:
        The difference's norm, relative to that of autograd's gradient.
    """
    every = attached.reduction.gather_objects(batches)
    total = sum(len(batch[0]) for site in every for batch in site)
    own.zero_grad()
    for site in every:
        rows = sum(len(batch[0]) for batch in site)
        for batch in site:
            backward(own, batch, rows / total)
    difference = norm = 0.0
    for got, wanted in zip(model.parameters(), own.parameters(), strict=True):
        wanted = torch.zeros_like(got) if wanted.grad is None else wanted.grad
        had = torch.zeros_like(got) if got.grad is None else got.grad
        difference, norm = difference + float((had - wanted).square().sum()), norm + float(wanted.square().sum())
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)


def soak(name: str, arguments: argparse.Namespace) -> Verdict:
    """Train by one method; return what became of it."""
    chance = random.Random(arguments.seed)
    torch.manual_seed(arguments.seed)
    model = Wandering()
    attached = Attached(model, name, timeout=arguments.timeout)
    reduction = attached.reduction
    chance = random.Random(f"{arguments.seed} {reduction.site_rank}")
    torch.manual_seed(1000 * arguments.seed + reduction.site_rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    look = max(1, min(arguments.look, arguments.steps // 10))
    verdict, start = Verdict(), time.perf_counter()

    def pause() -> None:
        if chance.random() < 0.3:
            time.sleep(chance.random() * arguments.delay)

    for step in range(1, arguments.steps + 1):
        looking = step % look == 0
        exact = looking and parse(name)[0] in EXACT and reduction.options.wire == "fp32"
        copy = deepcopy(model) if exact else None
        optimizer.zero_grad()
        pause()
        batches = [draw(chance) for _ in range(chance.choice((0, 1, 1, 1, 1, 2)))]
        for number, batch in enumerate(batches):
            with reduction.no_sync() if number + 1 < len(batches) else nullcontext():
                backward(model, batch)
            pause()
        attached.synchronize()
        pause()
        if copy is not None:
            verdict.worst_gradient = max(verdict.worst_gradient, off_autograd(model, copy, batches, attached))
        optimizer.step()
        verdict.steps = step
        if looking and (difference := reduction.first_difference()) is not None:
            verdict.first_difference = f"{difference} differs between sites after step {step}"
            break
        if step % max(1, arguments.steps // 10) == 0:
            now = memory()
            if step >= SETTLED:
                verdict.memory.append(now)
            if reduction.site_rank == 0:
                pace = step / (time.perf_counter() - start)
                print(f"{name} step {step}: {now:.0f} MB, {pace:.0f} steps/s", flush=True)
    attached.detach()
    return verdict


def run_site(arguments: argparse.Namespace) -> int:
    connect_site()
    failed = 0
    for name in arguments.methods.split(","):
        verdict = soak(name, arguments)
        probe = dadplug.GradientReduction(nn.Linear(1, 1), mode="dsgd")
        every = probe.gather_objects(verdict)
        probe.detach()
        faults = [f"site {rank}: {each.fault()}" for rank, each in enumerate(every) if each.fault()]
        failed += bool(faults)
        if os.environ["RANK"] == "0":
            grown = ", ".join(f"{each.memory[0]:.1f} to {each.memory[-1]:.1f}" for each in every if each.memory)
            off = f", gradients within {max(each.worst_gradient for each in every):.0e} of autograd's"
            reported = f"{verdict.steps} steps, first difference: {verdict.first_difference or 'none'}, MB {grown}"
            exact = parse(name)[0] in EXACT
            print(f"{name}: {'FAILED' if faults else 'passed'}: {reported}{off if exact else ''}", *faults, sep="\n  ")
            sys.stdout.flush()
    return int(failed > 0)


def main() -> int:
    parser = parser_of(
        __doc__,
        methods="dad,rankdad:wire=bf16+error_feedback=true",
        steps=10_000,
        sites=(2, "number of sites, unless torchrun says it"),
        delay=(0.002, "longest random delay, in seconds"),
        look=(100, "steps between comparisons of replicas and gradients"),
        timeout=(120.0, "seconds after which a silent site counts as hung"),
        seed=0,
    )
    arguments = parser.parse_args()
    for name in arguments.methods.split(","):
        if parse(name)[0] not in method_names():
            parser.error(f"no mode {name!r}; modes are {', '.join(method_names())}")
    if "RANK" not in os.environ:
        return launch_sites([__file__, *sys.argv[1:]], arguments.sites)
    return run_site(arguments)


if __name__ == "__main__":
    sys.exit(main())
