"""Batches by Poisson sampling, in which each record takes part independently of the others."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from ..signature import number, whole_number


class PoissonSampler(Sampler[list[int]]):
    """Sampler of batches in which each record is with the same probability, in each batch anew.

    Its random numbers come from a generator that the operating system seeds: an attacker who could repeat it would see
    which records are in which batch.

    Args:
        records: number of records.
        sample_rate: probability with which each record is in a batch.
        steps: number of batches in an epoch.
    """

    def __init__(self, records: int, sample_rate: float, steps: int) -> None:
        self.records = records
        self.sample_rate = sample_rate
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator()
        generator.manual_seed(secrets.randbits(63))
        for _ in range(self.steps):
            taken = torch.rand(self.records, generator=generator, dtype=torch.float64) < self.sample_rate
            yield taken.nonzero()[:, 0].tolist()


class PoissonLoader(DataLoader[Any]):
    """Loader of batches by Poisson sampling, which the epsilon of subsampled steps is computed for.

    Batches have different sizes, and may be empty: an empty batch has tensors without rows, and is a step like all
    others.

    Args:
        dataset: the records of this site, with a length.
        sample_rate: probability with which each record is in a batch.
        steps: number of batches in an epoch; ``1 / sample_rate``, rounded, where None.
        options: further options of `torch.utils.data.DataLoader`, other than those of its batches and order.

    Raises:
        ValueError: if a value is out of its range, or the data set is empty.

    Example:
        >>> loader = dadplug.PoissonLoader(dataset, sample_rate=0.01)
        >>> privacy = dadplug.DifferentialPrivacy(1.1, 1.0, 0.01, expected_batch=loader.expected_batch)
    """

    def __init__(self, dataset: Dataset[Any], sample_rate: float, *, steps: int | None = None, **options: Any) -> None:
        number("a number above 0 and up to 1", lambda value: 0 < value <= 1)("sample_rate", sample_rate)
        whole_number(1, "or None", lambda value: value is None)("steps", steps)
        for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"):
            if name in options:
                raise ValueError(f"{name}= does not go with Poisson sampling: leave it out")
        records = len(dataset)  # type: ignore[arg-type]
        if not records:
            raise ValueError("the data set is empty")
        sampler = PoissonSampler(records, sample_rate, steps or max(1, round(1 / sample_rate)))
        collate = _Collate(dataset, options.pop("collate_fn", None) or default_collate)
        super().__init__(dataset, batch_sampler=sampler, collate_fn=collate, **options)
        self.sample_rate = sample_rate

    @property
    def expected_batch(self) -> int:
        """Expected number of records in a batch, rounded to a whole number of at least 1."""
        return max(1, round(self.sample_rate * len(self.dataset)))  # type: ignore[arg-type]


class _Collate:
    """Collation that also makes empty batches, with the shapes and types of a batch of the first record."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[Sequence[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __call__(self, records: Sequence[Any]) -> Any:
        if len(records):
            return self._collate(records)
        return tree_map_only(Tensor, lambda each: each[:0] if each.dim() else each, self._collate([self._dataset[0]]))
