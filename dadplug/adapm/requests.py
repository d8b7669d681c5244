"""Requests of a site that other sites have not answered yet."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from .rows import Block, Keys


class Done:
    """Event that is set once; creating it takes a fifth of the time of `threading.Event`.

    `set` must not be called by two threads at once.
    """

    __slots__ = ("_happened", "_lock")

    def __init__(self) -> None:
        self._happened = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._happened

    def set(self) -> None:
        """Set the event, and end all waits."""
        if not self._happened:
            self._happened = True
            self._lock.release()

    def wait(self, timeout: float = -1) -> bool:
        """Wait for the event.

        Args:
            timeout: seconds to wait at most; negative for no limit.

        Returns:
            Whether the event is set.
        """
        if not self._happened and self._lock.acquire(timeout=timeout):
            self._lock.release()  # for other waiting threads
        return self._happened


class Request:
    """Pull, push or set in progress.

    Args:
        remaining: number of keys without a reply.

    Attributes:
        done: set when all replies have arrived, or none will arrive any more.
    """

    def __init__(self, remaining: int) -> None:
        self.done = Done()
        self.remaining = remaining
        if not remaining:
            self.done.set()


class PullRequest(Request):
    """Pull from other sites.

    Args:
        table: number of the table.
        keys: n keys.
        positions: their rows in `out`.
        out: the values, overwritten by replies.
        drops: number of dropped replicas before the pull, if a key was REQUESTED then; otherwise None.
    """

    def __init__(self, table: int, keys: Keys, positions: NDArray[np.int32], out: Block, drops: int | None) -> None:
        super().__init__(positions.shape[0])
        self.table, self.keys, self.positions, self.out, self.drops = table, keys, positions, out, drops


class SetRequest(Request):
    """Set at other sites; the values are kept for the replicas at this site.

    Args:
        table: number of the table.
        keys: n keys.
        values: of shape (n, width).
    """

    def __init__(self, table: int, keys: Keys, values: Block) -> None:
        super().__init__(keys.shape[0])
        self.table, self.keys, self.values = table, keys, values


class Flush:
    """State of a flush: it waits until intents are acted on, for a later round, and for the pushes sent until then.

    Args:
        intents: number of intents that have been recorded; those that have begun are waited for.
        since: number of the first round that counts.
    """

    def __init__(self, intents: int, since: int) -> None:
        self.intents: int | None = intents
        self.since = since
        self.last: int | None = None
