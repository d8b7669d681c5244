"""Poisson sampling: each record is in a batch with the same probability, independently of all others."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ..signature import number, whole_number


class PoissonSampler(Sampler[list[int]]):
    """Batches of row numbers in which each row is with a probability; some may be empty.

    Args:
        rows: number of rows.
        sample_rate: the probability.
        steps: number of batches.
        generator: draws them; None for one that the operating system seeds in each pass.
    """

    def __init__(self, rows: int, sample_rate: float, steps: int, generator: torch.Generator | None = None) -> None:
        self._rows, self._rate, self._steps, self._generator = rows, sample_rate, steps, generator

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        generator = self._generator
        if generator is None:
            generator = torch.Generator()
            generator.manual_seed(secrets.randbits(63))
        for _ in range(self._steps):
            yield torch.nonzero(torch.rand(self._rows, generator=generator) < self._rate)[:, 0].tolist()


class _Collate:
    """Collation of a batch; an empty one has tensors of no rows, in the shapes and types of a record's."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Dataset[Any]) -> None:
        self._collate, self._dataset = collate, dataset
        self._empty: Any = None

    def __call__(self, records: list[Any]) -> Any:
        if records:
            return self._collate(records)
        if self._empty is None:
            self._empty = torch.utils._pytree.tree_map(
                lambda leaf: leaf[:0] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf,
                self._collate([self._dataset[0]]),
            )
        return self._empty


class PoissonLoader(DataLoader[Any]):
    """Loader of Poisson batches, which the accounting of privacy assumes.

    A pass has ``1 / sample_rate`` batches. A batch without records has tensors of no rows: the step takes place, with
    noise alone.

    Args:
        dataset: a dataset with a length.
        sample_rate: probability with which a record is in a batch.
        steps: batches of a pass; None for ``1 / sample_rate``, rounded.
        generator: draws the batches; None for one that the operating system seeds in each pass. A seed that others
            know makes the proof of privacy void.
        options: further keywords of `torch.utils.data.DataLoader`.

    Raises:
        ValueError: if a value is out of its range, or a keyword decides what a batch is.

    Example:
        >>> loader = PoissonLoader(dataset, sample_rate=64 / len(dataset))
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sample_rate: float,
        *,
        steps: int | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        number("a number above 0 and up to 1", lambda value: 0 < value <= 1)("sample_rate", sample_rate)
        if steps is not None:
            whole_number(1)("steps", steps)
        if wrong := {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"} & set(options):
            raise ValueError(f"{sorted(wrong)[0]}= does not go with Poisson sampling, where batches vary in size")
        rows = len(cast("Sized", dataset))
        sampler = PoissonSampler(rows, sample_rate, steps or max(1, math.floor(1 / sample_rate + 0.5)), generator)
        collate = options.pop("collate_fn", None) or torch.utils.data.default_collate
        super().__init__(dataset, batch_sampler=sampler, collate_fn=_Collate(collate, dataset), **options)
        self.sample_rate = sample_rate
