"""What a site has asked others for, and waits for."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from .rows import Block, Keys


class Done:
    """An event as `threading.Event` is, which happens once and takes a fifth of the time to make.

    `set` must not be called by two threads at once.
    """

    __slots__ = ("_happened", "_lock")

    def __init__(self) -> None:
        self._happened = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        """Return whether it has happened."""
        return self._happened

    def set(self) -> None:
        """Let it happen, and end all waits."""
        if not self._happened:
            self._happened = True
            self._lock.release()

    def wait(self, timeout: float = -1) -> bool:
        """Wait until it happens, at most for a time in seconds; return whether it has."""
        if not self._happened and self._lock.acquire(timeout=timeout):
            self._lock.release()  # for others that wait
        return self._happened


class Request:
    """A pull, push or set that is under way.

    Attributes:
        done: set when it has been answered, or never will be.
    """

    def __init__(self, remaining: int) -> None:
        self.done = Done()
        self.remaining = remaining
        if not remaining:
            self.done.set()


class PullRequest(Request):
    """A pull that other sites answer into `out`; `drops` counts the replicas gone before it, if that matters."""

    def __init__(self, table: int, keys: Keys, positions: NDArray[np.int32], out: Block, drops: int | None) -> None:
        super().__init__(positions.shape[0])
        self.table, self.keys, self.positions, self.out, self.drops = table, keys, positions, out, drops


class SetRequest(Request):
    """A set that other sites answer; the values wait for the replicas here."""

    def __init__(self, table: int, keys: Keys, values: Block) -> None:
        super().__init__(keys.shape[0])
        self.table, self.keys, self.values = table, keys, values


class Flush:
    """What `Engine.flushed` waits for: a round that begins from now on, then the pushes sent until then."""

    def __init__(self, since: int) -> None:
        self.since = since
        self.last: int | None = None
