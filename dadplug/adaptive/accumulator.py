"""Sums over sites and over restarts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .progress import progress


class Accumulator(MutableMapping[Any, Any]):
    """Dictionary of sums over sites, and over the restarts of a program.

    Each site adds to it as to a dictionary, without communication: ``stats["loss"] += 1.0``. Within
    ``with stats.synchronized():`` it holds the sums of all sites, the same on each, and all operations of dictionaries
    are allowed. Outside of the block values cannot be read.

    What has been added before a checkpoint counts after a restart, also with another number of sites. Code of the
    running epoch that a restarted program repeats up to the place of the checkpoint does not add a second time, and
    its ``synchronized`` blocks see the values of the first time. All sites, and a restarted program, must create their
    accumulators in the same order, and not within a loop over an `ElasticDataLoader`. See `remaining_epochs_until`.

    Args:
        args: initial values, as for ``dict``, the same on all sites; they are counted once.
        kwargs: likewise.

    Raises:
        RuntimeError: if it is created within a loop over an `ElasticDataLoader`.

    Example:
        >>> stats = dadplug.Accumulator()
        >>> for inputs, targets in loader:
        ...     stats["loss"] += criterion(model(inputs), targets).item() * len(inputs)
        ...     stats["samples"] += len(inputs)
        >>> with stats.synchronized():
        ...     print(stats["loss"] / stats["samples"])
        ...     stats.clear()
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._progress = progress()
        self._statistics = self._progress.register(dict(*args, **kwargs))
        self._values: dict[Any, Any] | None = None

    @contextmanager
    def synchronized(self) -> Iterator[Accumulator]:
        """Sum over all sites, and allow to read and change the sums; all sites must call it at the same place.

        Changes within the block, such as ``stats.clear()``, must be the same on all sites.

        Raises:
            SiteError: if a site is gone or does not answer.
            TypeError: on all sites, if a value at one cannot be sent.

        Example:
            >>> with stats.synchronized():
            ...     accuracy = stats["correct"] / stats["samples"]
        """
        if self._values is not None:
            yield self
            return
        self._values = self._progress.synchronize(self._statistics)
        try:
            yield self
        finally:
            self._values = None

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add to several sums.

        Args:
            args: a mapping, or pairs of keys and values, as for ``dict``.
            kwargs: likewise.
        """
        for key, value in dict(*args, **kwargs).items():
            self._add(key, value)

    def subtract(self, *args: Any, **kwargs: Any) -> None:
        """Subtract from several sums.

        Args:
            args: a mapping, or pairs of keys and values, as for ``dict``.
            kwargs: likewise.
        """
        for key, value in dict(*args, **kwargs).items():
            self._add(key, -value)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a sum; within a `synchronized` block only.

        Args:
            key: the key.
            default: what is returned if there is no such sum.
        """
        return self._read().get(key, default)

    def _add(self, key: Any, value: Any) -> None:
        value = _plain(value)
        if self._values is not None:
            self._values[key] = self._values.get(key, 0) + value
        elif not self._progress.ignores_updates(self._statistics):
            updates = self._statistics.updates
            updates[key] = updates.get(key, 0) + value

    def __iadd__(self, other: Mapping[Any, Any]) -> Accumulator:
        self.update(other)
        return self

    def __isub__(self, other: Mapping[Any, Any]) -> Accumulator:
        self.subtract(other)
        return self

    def __getitem__(self, key: Any) -> Any:
        return UnsynchronizedSum(self, key) if self._values is None else self._values[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._values is not None:
            self._values[key] = value
        elif isinstance(value, UnsynchronizedSum) and value.owner is self and value.key == key:
            self._add(key, value.added)
        else:
            raise RuntimeError(f"outside of `with stats.synchronized():`, use += and -= on {key!r}, and nothing else")

    def __delitem__(self, key: Any) -> None:
        del self._read()[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._read()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __bool__(self) -> bool:
        return self._values is None or bool(self._values)

    def __repr__(self) -> str:
        return f"Accumulator({'not synchronized' if self._values is None else self._values})"

    def _read(self) -> dict[Any, Any]:
        if self._values is None:
            raise RuntimeError("values of an Accumulator can be read within `with stats.synchronized():` only")
        return self._values


class UnsynchronizedSum:
    """Stand-in for a sum outside of `Accumulator.synchronized`, which only takes what is added.

    Args:
        owner: the accumulator.
        key: key of the sum.
        added: what has been added.
    """

    def __init__(self, owner: Accumulator, key: Any, added: Any = 0) -> None:
        self.owner, self.key, self.added = owner, key, added

    def __add__(self, value: Any) -> UnsynchronizedSum:
        return UnsynchronizedSum(self.owner, self.key, self.added + _plain(value))

    def __sub__(self, value: Any) -> UnsynchronizedSum:
        return UnsynchronizedSum(self.owner, self.key, self.added - _plain(value))

    def __bool__(self) -> bool:
        raise RuntimeError(f"the value of {self.key!r} can be read within `with stats.synchronized():` only")


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
