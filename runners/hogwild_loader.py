"""Loader of the batches that a process of Hogwild! is dealt, inside of a trainer."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from ..hogwild import DealtLoader, Hogwild


class HogwildLoader:
    """Loader of the batches that this process is dealt, of unknown length, for trainers.

    A pass that was given up does not disturb the next one. All other attributes are those of the wrapped
    loader, for reading and for writing.

    Args:
        loader: the DataLoader.
        hogwild: the training.
        ahead: number of batches that the trainer takes before it trains on the first of them.
        limit: number of batches of an epoch, of all processes together; all if None.
    """

    _OWN = ("_loader", "_hogwild", "_ahead", "_limit", "_dealt", "_batches")

    def __init__(self, loader: Any, hogwild: Hogwild, ahead: int, limit: int | None = None) -> None:
        self._loader, self._hogwild, self._ahead, self._limit = loader, hogwild, ahead, limit
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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self._OWN:  # not set yet while a copy is built
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)
