"""Cost of automatic intent: the pass that finds a batch's lookups, beside a training step with the same batch.

    python benchmarks/adapm_intent.py
    torchrun --nproc-per-node 2 benchmarks/adapm_intent.py

Wide & Deep and DLRM as they are used on Criteo's data: 13 numbers and 26 categories a row, Adagrad. One thread. "Step"
and "pass" are processor time: of the training thread for a batch, and of the reading thread to find a batch's ids,
meanwhile. Epochs with automatic intent and with intent by a function alternate; the ratio of their wall times is the
median of those of neighbours.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from command import connect_site, parser_of
from torch import Tensor, nn

from dadplug.adapm import AdaDataLoader, AdaModel

FIELDS, NUMBERS, ROWS = 26, 13, 50_000
Batch = tuple[Tensor, Tensor]


class WideAndDeep(nn.Module):
    """A linear and a deep part on the same ids, each in one table of all fields."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.arange(FIELDS) * ROWS)
        self.wide, self.deep = nn.Embedding(FIELDS * ROWS, 1), nn.Embedding(FIELDS * ROWS, width)
        self.layers = mlp(FIELDS * width + NUMBERS, 256, 128, 1)

    def forward(self, batch: Batch) -> Tensor:
        numbers, ids = batch
        ids = ids + self.offsets
        return self.wide(ids).sum(1) + self.layers(torch.cat([self.deep(ids).flatten(1), numbers], 1))

    def ids(self, batch: Batch) -> dict[str, Tensor]:
        ids = (batch[1] + self.offsets).unique()
        return {"wide.weight": ids, "deep.weight": ids}


class DLRM(nn.Module):
    """A table a field, and the products of all pairs of rows."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, width) for _ in range(FIELDS))
        self.bottom = mlp(NUMBERS, 128, width)
        self.top = mlp(width + (FIELDS + 1) * FIELDS // 2, 256, 64, 1)
        first, second = torch.triu_indices(FIELDS + 1, FIELDS + 1, 1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, batch: Batch) -> Tensor:
        numbers, ids = batch
        dense = self.bottom(numbers)
        rows = torch.stack([dense, *(table(ids[:, field]) for field, table in enumerate(self.tables))], 1)
        products = torch.bmm(rows, rows.transpose(1, 2))[:, self.first, self.second]
        return self.top(torch.cat([dense, products], 1))

    def ids(self, batch: Batch) -> dict[str, Tensor]:
        return {f"tables.{field}.weight": batch[1][:, field].unique() for field in range(FIELDS)}


def mlp(*widths: int) -> nn.Sequential:
    """Make layers with ReLU between them."""
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def epoch(model: AdaModel, optimizer: Any, batches: list[Batch], intent: Any) -> tuple[float, float, list[float]]:
    """Train on batches; return seconds a batch, processor seconds a batch, and the processor seconds of each pass."""
    loader = AdaDataLoader(batches, model, intent=intent, forward=lambda net, batch: net(batch))
    passes: list[float] = []
    find: Callable[[Any], Any] = loader.ids

    def timed(batch: Any) -> Any:
        start = time.thread_time()
        found = find(batch)
        passes.append(time.thread_time() - start)
        return found

    loader.ids = timed  # type: ignore[method-assign]
    model.manager.wait_sync(everywhere=True)
    start, spent = time.perf_counter(), time.thread_time()
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        model.synchronize()
        optimizer.step()
    return (time.perf_counter() - start) / len(batches), (time.thread_time() - spent) / len(batches), passes


def measure(kind: type, size: int, args: argparse.Namespace, rank: int) -> str:
    """Measure one model with batches of one size; return a line of the table."""
    torch.manual_seed(rank)
    net = kind()
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.01)
    model = AdaModel(net, optimizer)
    batches = [(torch.randn(size, NUMBERS), (torch.rand(size, FIELDS) ** 3 * ROWS).long()) for _ in range(args.batches)]
    for intent in ("auto", net.ids):
        epoch(model, optimizer, batches[:3], intent)
    automatic, by_hand, steps, passes = [], [], [], []
    for _ in range(args.epochs):
        seconds, spent, times = epoch(model, optimizer, batches, "auto")
        automatic.append(seconds)
        steps.append(spent)
        passes += times
        by_hand.append(epoch(model, optimizer, batches, net.ids)[0])
    ratio = median(a / b for a, b in zip(automatic, by_hand, strict=True))
    step, found = 1e3 * median(steps), 1e3 * median(passes)
    model.close()
    model.manager.barrier()
    model.manager.close()
    return f"| {kind.__name__} | {size:,} | {step:.1f} | {found:.2f} | {100 * found / step:.1f} % | {ratio:.3f} |"


def main() -> None:
    """Run the benchmark at this site."""
    parser = parser_of(
        __doc__,
        batches=(20, "of an epoch"),
        epochs=5,
        sizes={"type": int, "nargs": "*", "default": [1024, 2048, 4096], "help": "of batches"},
    )
    args = parser.parse_args()
    connect_site()
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        print("| model | batch | step, cpu ms | pass, cpu ms | of a step | loop / loop with intent by hand |")
        print("|" + "---|" * 6, flush=True)
    for kind in (WideAndDeep, DLRM):
        for size in args.sizes:
            line = measure(kind, size, args, rank)
            if rank == 0:
                print(line, flush=True)


if __name__ == "__main__":
    main()
