"""Training data of a site, and held-out accuracy, for the benchmarks that train to a target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from dadplug.data import DataPair, site_indices

BATCH = 32
"""Samples of a site in a step."""
DEALT = 60
"""Batches that are dealt to the sites between two evaluations."""


def batches(data: DataPair, split: str, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this site's batches, epoch after epoch, from memory."""
    share = site_indices(data.train.labels, dist.get_rank(), dist.get_world_size(), split, seed)
    inputs, labels = next(iter(DataLoader(data.train.subset(share), len(share))))
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(labels), generator=generator).split(BATCH):
            if len(rows) == BATCH:
                yield inputs[rows], labels[rows]


def dealt_batches(
    server: Any, data: DataPair, seed: int, own: str | None = None
) -> Iterator[Iterable[tuple[Tensor, Tensor]]]:
    """Yield, again and again, this site's part of some batches that a parameter server deals, from memory.

    Args:
        server: the parameter server.
        data: the data.
        seed: seed of the order of the rows.
        own: split by which each site has rows of its own; None where both have all.
    """
    train, count = data.train, DEALT
    if own is not None:
        train = train.subset(site_indices(train.labels, dist.get_rank(), 2, own, seed))
        count = DEALT // 2
    everything = TensorDataset(*next(iter(DataLoader(train, len(train)))))
    generator, rows = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
    while True:
        while len(rows) < count * BATCH:
            rows = torch.cat([rows, torch.randperm(len(everything), generator=generator)])
        part, rows = rows[: count * BATCH], rows[count * BATCH :]
        yield server.loader(DataLoader(Subset(everything, part.tolist()), BATCH))


@torch.no_grad()
def accuracy(model: nn.Module, data: DataPair) -> float:
    """Return the held-out accuracy of site 0's model, at both sites."""
    right = torch.zeros(1)
    if dist.get_rank() == 0:
        model.eval()
        for inputs, labels in DataLoader(data.test, 250):
            right += (model(inputs).argmax(1) == labels).sum()
        model.train()
    dist.broadcast(right, 0)
    return float(right) / len(data.test)
