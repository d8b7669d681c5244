"""Dealing of a loader's batches to processes: each batch of an epoch to one of them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from .memory import Board

_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
)


class DealtLoader:
    """Loader that yields those batches of another loader that this process is dealt.

    The processes take batches on demand, so that a slow one takes fewer. Each batch is used once an epoch. An epoch
    begins for all processes together. The order is the one that the loader of process 0 draws.

    All other attributes are those of the other loader. There is no length: it is not known before the epoch is over.

    Args:
        loader: a DataLoader over a data set with a length, the same in all processes.
        board: the control block.
        ahead: number of batches that the caller takes before it trains on the first of them.
        limit: number of batches of an epoch, at most; all if None.

    Raises:
        TypeError: if it is no DataLoader.
        ValueError: if its batches cannot be dealt.
    """

    def __init__(self, loader: Any, board: Board, ahead: int = 0, limit: int | None = None) -> None:
        check_loader(loader)
        self._loader, self._board, self._ahead, self._limit = loader, board, ahead, limit
        self._taken = 0  # batches that the caller has taken and that are not reported as finished
        self._drawn: deque[int] = deque()
        self._running = False
        self._dealt = with_batches(loader, DrawnBatches(self._draw))

    @property
    def batches(self) -> int:
        """Number of batches of an epoch, of all processes together."""
        batches = len(self._loader.batch_sampler)
        return batches if self._limit is None else min(batches, self._limit)

    def __iter__(self) -> Generator[Any, None, None]:
        if self._running:
            raise RuntimeError("this loader is being read already: finish the epoch before the next one begins")
        self._drawn.clear()
        self._taken, self._running = 0, True
        try:
            for batch in self._dealt:
                self._taken += 1
                yield batch
                self.finish(self._ahead)
        finally:
            self._running = False

    def _draw(self) -> Iterator[list[int]]:
        self._board.begin_epoch(self._draw_order)
        while (batch := self._board.draw()) is not None:
            self._drawn.append(batch)
            yield self._board.indices(batch)

    def _draw_order(self) -> list[list[int]]:
        batches = [list(map(int, batch)) for batch in itertools.islice(self._loader.batch_sampler, self._limit)]
        if not batches:
            raise ValueError("the loader has no batches")
        return batches

    def finish(self, left: int = 0) -> None:
        """Report that the batches that were taken are finished.

        Args:
            left: number of batches, the last ones, that are not.
        """
        while self._taken > left:
            self._taken -= 1
            self._board.finish_batch(self._drawn.popleft())

    def __getattr__(self, name: str) -> Any:
        if name == "_loader" or name.startswith("__"):  # not set yet while a copy is built
            raise AttributeError(name)
        return getattr(self._loader, name)


class DrawnBatches:
    """Sampler of batches from a function.

    Args:
        draw: returns the batches of an epoch as lists of indices.
    """

    def __init__(self, draw: Callable[[], Iterator[list[int]]]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[list[int]]:
        return self._draw()


def with_batches(loader: DataLoader[Any], batches: Iterable[list[int]]) -> DataLoader[Any]:
    """Return a loader like another one, which reads other batches.

    Args:
        loader: the other loader.
        batches: indices of the samples of each batch.
    """
    return DataLoader(loader.dataset, batch_sampler=batches, **settings_of(loader))


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments with which a loader was made, but for those that decide about its batches."""
    settings = {name: getattr(loader, name) for name in _SETTINGS}
    if loader.num_workers:
        settings |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    return settings


def check_loader(loader: Any, by: str = "Hogwild!") -> None:
    """Raise TypeError or ValueError if the batches of a loader cannot be dealt.

    Args:
        loader: the loader.
        by: who deals them, for messages.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"batches of a DataLoader can be dealt, not of {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "an IterableDataset has no order that could be dealt: use a data set with a length and indices"
        )
    if loader.batch_sampler is None:
        raise ValueError("the loader makes no batches (batch_size=None): give it a batch_size or a batch_sampler")
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1 for sampler in samplers):
        raise ValueError(
            f"the loader has a DistributedSampler, which splits the data already: leave it out, since {by} deals "
            "the batches of the whole data set"
        )
