"""Passes over a loader that begin in its middle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


class _Rest:
    """Rest of a sampler's batches.

    Args:
        sampler: the sampler.
        first: number of batches to leave out.
    """

    def __init__(self, sampler: Any, first: int) -> None:
        self._sampler, self._first = sampler, first

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._sampler), self._first, None)

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._first)


def batches_from(loader: Any, first: int) -> Iterator[Any]:
    """Return an iterator over a loader's batches from one on, in the order of a whole pass.

    Those before are not loaded, if it is torch's loader, without workers that outlive a pass.

    Args:
        loader: the loader.
        first: number of batches to leave out.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if not first or sampler is None or type(loader) is not DataLoader or loader.persistent_workers:
        batches: Iterator[Any] = iter(loader)
        for _ in range(first):
            next(batches)
        return batches
    object.__setattr__(loader, "batch_sampler", _Rest(sampler, first))  # torch refuses it once a loader is made
    try:
        rest: Iterator[Any] = iter(loader)
        return rest
    finally:
        object.__setattr__(loader, "batch_sampler", sampler)
