"""Loader of the batches that a process of Hogwild! is dealt, inside of a trainer."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from ..hogwild import DealtLoader, Hogwild
from .delegating_loader import DelegatingLoader


class HogwildLoader(DelegatingLoader):
    """Loader of the batches that this process is dealt, of unknown length, for trainers.

    A pass that was given up does not disturb the next one.

    Args:
        loader: the DataLoader.
        hogwild: the training.
        ahead: number of batches that the trainer takes before it trains on the first of them.
        limit: number of batches of an epoch, of all processes together; all if None.
    """

    _OWN = (*DelegatingLoader._OWN, "_hogwild", "_ahead", "_limit", "_dealt", "_batches")

    def __init__(self, loader: Any, hogwild: Hogwild, ahead: int, limit: int | None = None) -> None:
        super().__init__(loader)
        self._hogwild, self._ahead, self._limit = hogwild, ahead, limit
        self._dealt: DealtLoader | None = None
        self._batches: Generator[Any, None, None] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._dealt is None:  # not earlier: trainers set attributes of the loader
            self._dealt = self._hogwild.deal(self._loader, ahead=self._ahead, limit=self._limit)
        if self._batches is not None:
            self._batches.close()
        self._batches = iter(self._dealt)
        return self._batches

    def finish(self) -> None:
        """Report that all batches that this process has taken are finished."""
        if self._dealt is not None:
            self._dealt.finish()
