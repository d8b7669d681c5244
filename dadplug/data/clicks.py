"""Click data: rows of counts and categories of advertisements, with a label; and generated rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import DataError
from .base import DataPair, register_dataset

DENSE, FIELDS = 13, 26  # counts and categories in a row, as Criteo's logs have them
_HELD_OUT = 5  # the last fifth of the rows


class Clicks(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Data set of rows with counts, categories and a label, in memory and in the order of their time.

    Args:
        dense: of shape (n, counts), float32.
        ids: of shape (n, fields), integers of at least 0: the category of each field, in one key space for all fields.
        labels: of shape (n,), 1 for a click, 0 otherwise.
        rows: upper bound of ids, exclusive; None for the largest id plus 1.

    Raises:
        DataError: if shapes do not fit or an id is out of range.
    """

    def __init__(self, dense: Tensor, ids: Tensor, labels: Tensor, rows: int | None = None) -> None:
        if dense.dim() != 2 or ids.dim() != 2 or not len(dense) == len(ids) == len(labels):
            raise DataError(
                f"clicks have a row of counts, a row of ids and a label each; there are {tuple(dense.shape)} counts, "
                f"{tuple(ids.shape)} ids and {tuple(labels.shape)} labels"
            )
        self.dense, self.ids, self.labels = dense, ids, labels
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        self.rows = high + 1 if rows is None else rows
        if low < 0 or high >= self.rows:
            raise DataError(f"ids must lie in 0 to {self.rows - 1}, there are some from {low} to {high}")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.dense[index], self.ids[index].long(), self.labels[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        parts = (self.dense[indices], self.ids[indices].long(), self.labels[indices])
        return list(zip(*parts, strict=True))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Not supported, since samples are not images.

        Raises:
            DataError: always.
        """
        raise DataError(
            "clicks are rows of counts and categories, not images: they are for the model wide_deep, as in "
            "examples/ctr.py"
        )

    def subset(self, indices: Tensor) -> Clicks:
        """Return a subset of the rows.

        Args:
            indices: indices or a mask of the rows.
        """
        return Clicks(self.dense[indices], self.ids[indices], self.labels[indices], self.rows)

    def plain(self) -> Clicks:
        """Return the rows unchanged, since they have no augmentation."""
        return self

    def resized(self, size: int) -> Clicks:
        """Return the rows unchanged, since they have no size."""
        return self

    def batch(self, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return counts, int64 ids and labels of the rows from `start` to `end`, exclusive."""
        return self.dense[start:end], self.ids[start:end].long(), self.labels[start:end]


def split_by_time(every: Clicks) -> DataPair:
    """Hold out the last fifth of the rows for testing, since the task is to predict later clicks."""
    held_out = max(1, len(every) // _HELD_OUT)
    place = torch.arange(len(every))
    return DataPair(every.subset(place[:-held_out]), every.subset(place[-held_out:]), classes=2)


def renumbered(data: DataPair) -> tuple[DataPair, Tensor]:
    """Renumber the ids that occur from 0 without gaps, so that a table of them fits into memory.

    Args:
        data: training and test clicks.

    Returns:
        The clicks with new ids, and the old id of each new id, in ascending order.
    """
    parts: list[Any] = [data.train, data.test]
    assert all(isinstance(part, Clicks) for part in parts)
    old, new = torch.unique(torch.cat([part.ids.reshape(-1) for part in parts]), return_inverse=True)
    pair: list[Clicks] = []
    begin = 0
    for part in parts:
        assert isinstance(part, Clicks)
        own = new[begin : begin + part.ids.numel()].view(part.ids.shape)
        begin += part.ids.numel()
        pair.append(Clicks(part.dense, own, part.labels, len(old)))
    return DataPair(pair[0], pair[1], classes=2), old.long()


def generated(samples: int = 10_000, seed: int = 0, exponent: float = 1.1) -> Clicks:
    """Generate clicks that a model can learn to predict.

    A field has between 4 and 4,000 categories; the frequency of the k-th is proportional to ``1 / k^exponent``. Each
    category has a weight and each count a slope; the probability of a click is the logistic function of their sum.

    Args:
        samples: number of rows.
        seed: seed of the generator.
        exponent: skew of the categories; 0 for uniform categories.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(0.6, 3.6, FIELDS).long()[torch.randperm(FIELDS, generator=generator)]
    starts = sizes.cumsum(0) - sizes
    dense = torch.randn(samples, DENSE, generator=generator).exp().log1p()
    ids = torch.empty(samples, FIELDS, dtype=torch.long)
    for field, (size, start) in enumerate(zip(sizes.tolist(), starts.tolist(), strict=True)):
        bounds = (torch.arange(1, size + 1, dtype=torch.float64) ** -exponent).cumsum(0)
        drawn = torch.rand(samples, generator=generator, dtype=torch.float64) * bounds[-1]
        ids[:, field] = start + torch.searchsorted(bounds, drawn).clamp_(max=size - 1)
    weights = 0.35 * torch.randn(int(sizes.sum()), generator=generator)
    slopes = 0.4 * torch.randn(DENSE, generator=generator)
    logits = weights[ids].sum(1) + dense @ slopes
    logits += -1.2 - logits.mean()
    labels = (torch.rand(samples, generator=generator) < torch.sigmoid(logits)).long()
    return Clicks(dense, ids, labels, int(sizes.sum()))


@register_dataset("clicks", has_files=False)
def clicks() -> DataPair:
    """Generate 10,000 clicks in memory."""
    return split_by_time(generated())
