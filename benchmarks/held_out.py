"""Training data of a site, and held-out accuracy, for the benchmarks that train to a target."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dadplug.data import DataPair, site_indices

BATCH = 32
"""Samples of a site in a step."""


def batches(data: DataPair, split: str, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this site's batches, epoch after epoch, from memory."""
    share = site_indices(data.train.labels, dist.get_rank(), 2, split, seed)
    inputs, labels = next(iter(DataLoader(data.train.subset(share), len(share))))
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(labels), generator=generator).split(BATCH):
            if len(rows) == BATCH:
                yield inputs[rows], labels[rows]


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
