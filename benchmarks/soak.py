"""Many steps with whatever sites may do: random rows, idle sites, unused layers, accumulation, delays.

    torchrun --nproc-per-node 3 benchmarks/soak.py --mode rankdad --steps 10000

Prints, as it goes, that replicas are equal to the bit, and the memory of a process; ends with an error if they differ,
or if memory has grown by more than a tenth since the first tenth of the steps.
"""

from __future__ import annotations

import argparse
import random
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dadplug


class Wandering(nn.Module):
    """A network whose way depends on what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 24)
        self.first = nn.Linear(24, 48)
        self.ways = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.norm = nn.LayerNorm(48)
        self.last = nn.Linear(48, 7)

    def forward(self, ids: Tensor, ways: list[int]) -> Tensor:
        x = torch.tanh(self.first(self.words(ids)))
        for way in ways:
            x = torch.tanh(self.ways[way](x))
        return self.last(self.norm(x))


def memory() -> float:
    """Resident memory of this process, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="rankdad")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--delay", type=float, default=0.002, help="longest random delay before a step, in seconds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dadplug.connect()
    rank, chance = dist.get_rank(), random.Random(dist.get_rank())
    torch.manual_seed(0)
    model = Wandering()
    reduction = dadplug.GradientReduction(model, mode=arguments.mode, rank=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start, early = time.perf_counter(), 0.0
    for step in range(1, arguments.steps + 1):
        optimizer.zero_grad()
        if chance.random() < 0.5:
            time.sleep(chance.random() * arguments.delay)
        passes = chance.choice((0, 1, 1, 1, 1, 2))
        for number in range(passes):
            ids = torch.randint(0, 500, (chance.randint(1, 40),))
            ways = [way for way in range(3) if chance.random() < 0.8]
            with reduction.no_sync() if number + 1 < passes else nullcontext():
                nn.functional.cross_entropy(model(ids, ways), ids % 7).backward()
        reduction.synchronize()
        optimizer.step()
        if step % max(1, arguments.steps // 10) == 0:
            if (name := reduction.first_difference()) is not None:
                raise SystemExit(f"step {step}: {name} differs between sites")
            early = early or memory()
            if rank == 0:
                pace = step / (time.perf_counter() - start)
                print(f"step {step}: replicas equal, {memory():.0f} MB, {pace:.0f} steps/s", flush=True)
    if memory() > 1.1 * early:
        raise SystemExit(f"memory has grown from {early:.0f} to {memory():.0f} MB")


if __name__ == "__main__":
    main()
