"""Engine of tables on AdaPM's bindings.

`Table` has checked all keys and values: int64 and float32, contiguous, in range and finite. The library would
misinterpret other types, and read past its tables for negative keys.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..interfaces import TableEngine
from ..rows import Block, Keys
from .watchdog import Watchdog

_TRIES = 8  # rounds in which a set value converges, in case of rounding errors
_set_up = False


@dataclass(frozen=True)
class KeyRange:
    """Range of a table's keys in the library.

    Attributes:
        limit: upper bound of keys, exclusive.
        width: number of values per key.
        first: the library's number of key 0.
    """

    limit: int
    width: int
    first: int


class Waiting:
    """Call in progress in the library.

    Args:
        library: the library.
        timestamp: number of the call.
        held: objects that the library writes to, kept until the call is complete.
    """

    def __init__(self, library: Library, timestamp: int, held: Any) -> None:
        self._library, self._timestamp, self._held = library, timestamp, held
        self._over = False

    def is_set(self) -> bool:
        """Return whether `wait` has returned; the bindings have no other information."""
        return self._over

    def wait(self, timeout: float = -1) -> bool:
        """Wait until the call is complete; the library has no limit of time."""
        if not self._over:
            self._library.wait(self._timestamp)
            self._over, self._held = True, None
        return True

    @property
    def done(self) -> Waiting:
        """The call itself, as its completion."""
        return self


class Library:
    """The library in this process, with one server and one worker, for one thread at a time.

    Most of its calls hold the GIL, so no Python thread can end a call that waits for a lost site. The watchdog, which
    is notified of every call, then ends the process.

    Args:
        adapm: the module.
        lengths: number of values of each key.
        technique: name of a technique.
        watchdog: the watchdog, notified of each call; None for a single site.
        meet: function that waits for all sites by other means.

    Raises:
        RuntimeError: if the process has set up the library before.
    """

    def __init__(
        self, adapm: Any, lengths: Tensor, technique: str, watchdog: Watchdog | None, meet: Callable[[], object]
    ) -> None:
        global _set_up
        if _set_up:
            raise RuntimeError(
                "AdaPM's library can be set up once in a process, and has been: use the built-in engine (backend=\""
                'builtin"), or a process for each training'
            )
        _set_up = True
        self._watchdog = watchdog
        self._lock = threading.RLock()
        with self._inside():
            adapm.setup(lengths.numel(), 1, technique)
            self._server = adapm.Server(lengths)
        meet()  # a server that is not ready exits at the first message
        with self._inside():
            self._worker = adapm.Worker(0, self._server)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Return a context for one call, which excludes other threads and notifies the watchdog."""
        with self._lock:
            if self._watchdog is not None:
                self._watchdog.enter()
            try:
                yield
            finally:
                if self._watchdog is not None:
                    self._watchdog.leave()

    @contextmanager
    def setup(self) -> Iterator[None]:
        """Return a context in which initial values are set."""
        with self._inside():
            self._worker.begin_setup()
        yield
        with self._inside():
            self._worker.end_setup()

    def set_first(self, keys: Tensor, values: Tensor) -> None:
        """Set initial values, within `setup`."""
        with self._inside():
            self._worker.set(keys, values.reshape(-1))

    def pull(self, keys: Tensor, values: Tensor) -> int:
        """Begin a pull; return -1 if it is complete, otherwise its number for `wait`."""
        with self._inside():
            return int(self._worker.pull(keys, values, True))

    def push(self, keys: Tensor, values: Tensor) -> int:
        """Begin a push, which copies the values; return -1 if it is complete, otherwise its number for `wait`."""
        with self._inside():
            return int(self._worker.push(keys, values, True))

    def wait(self, timestamp: int) -> None:
        """Wait for a pull or push by its number."""
        with self._inside():
            self._worker.wait(timestamp)

    def intent(self, keys: Tensor, start: int, end: int) -> None:
        """Signal that keys will be used."""
        with self._inside():
            self._worker.intent(keys, start, end)

    def advance_clock(self) -> int:
        """Advance the clock by one; return the new value."""
        with self._inside():
            self._worker.advance_clock()
            return int(self._worker.current_clock())

    def synchronise(self) -> None:
        """Wait until pushes have been sent to the owners, and replicas have been refreshed after that."""
        with self._inside():
            self._worker.wait_sync()
            self._worker.wait_sync()

    def abandon(self) -> None:
        """Leave the library without shutting it down; its destructors, which would abort the process, never run."""
        for kept in (self._worker, self._server):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        libc = ctypes.CDLL(None)
        if hasattr(libc, "on_exit"):  # of glibc; runs after the interpreter has exited
            libc.on_exit(libc._exit, None)

    def end(self) -> None:
        """Shut worker and server down, together with those of all sites."""
        with self._inside():
            self._worker.finalize()
            self._server.shutdown()


class BindingsEngine(TableEngine):
    """Engine of tables on the library.

    Args:
        start: function that starts the library, called at the first use.
        rank: this site.
        sites: number of sites.
    """

    locates_keys = False

    def __init__(self, start: Callable[[], Library], rank: int = 0, sites: int = 1) -> None:
        self._start = start
        self._rank, self._sites = rank, sites
        self._library: Library | None = None
        self._lock = threading.RLock()
        self._tables: list[KeyRange] = []
        self._pushes: list[Waiting] = []
        self._clock = 0
        self.counts = dict.fromkeys(("pulled", "pulled_remotely", "pushed", "pushed_remotely"), 0)

    @property
    def library(self) -> Library:
        """The library; the first access starts it."""
        with self._lock:
            if self._library is None:
                self._library = self._start()
                for _ in range(self._clock):
                    self._library.advance_clock()
            return self._library

    @property
    def clock(self) -> int:
        """Clock of this site."""
        return self._clock

    def advance_clock(self) -> int:
        """Advance the clock by one; return the new value."""
        self._clock += 1
        if self._library is not None:
            self._library.advance_clock()
        return self._clock

    def add_table(self, rows: int, width: int) -> None:
        """Add a table with keys from 0 to rows - 1."""
        last = self._tables[-1] if self._tables else KeyRange(0, 1, 0)
        self._tables.append(KeyRange(rows, width, last.first + last.limit))

    def _numbers(self, table: int, keys: Keys) -> Tensor:
        return torch.from_numpy(keys + self._tables[table].first)

    def pull(self, table: int, keys: Keys, out: Block) -> int | Waiting | None:
        position: int = kernels.first_bad_key(keys, self._tables[table].limit)
        if position >= 0:
            return position
        if not keys.shape[0]:
            return None
        self._wait_for_pushes()  # so that this site reads its own pushes
        numbers, values = self._numbers(table, keys), torch.from_numpy(out.reshape(-1))
        timestamp = self.library.pull(numbers, values)
        return self._count("pulled", timestamp, keys, (numbers, values, out))

    def push(self, table: int, keys: Keys, deltas: Block) -> Waiting | None:
        if not keys.shape[0]:
            return None
        timestamp = self.library.push(self._numbers(table, keys), torch.from_numpy(deltas.reshape(-1)))
        waiting = self._count("pushed", timestamp, keys, None)
        if waiting is not None:
            self._pushes.append(waiting)
        return waiting

    def _count(self, what: str, timestamp: int, keys: Keys, held: Any) -> Waiting | None:
        """Count the keys of a call; return None if it is complete, otherwise the call in progress."""
        self.counts[what] += keys.shape[0]
        if timestamp == -1:
            return None
        self.counts[f"{what}_remotely"] += keys.shape[0]
        return Waiting(self.library, timestamp, held)

    def set(self, table: int, keys: Keys, values: Block) -> tuple[bool, None]:
        """Set keys by pushing the differences, since the library's set does not support keys with a replica here.

        Raises:
            RuntimeError: if other sites push to the keys at the same time, so that their values keep changing.
        """
        if not keys.shape[0]:
            return True, None
        now = np.empty_like(values)
        for _ in range(_TRIES):
            waiting = self.pull(table, keys, now)
            if isinstance(waiting, Waiting):
                waiting.wait()
            lacking = np.flatnonzero((now != values).any(1))
            if not lacking.size:
                return True, None
            self.push(table, keys[lacking], values[lacking] - now[lacking])
            self.flush()
        raise RuntimeError(
            f"{lacking.size} of {keys.shape[0]} keys do not keep what they are set to: who pushes to them?"
        )

    def intend(self, table: int, keys: Keys, start: int, end: int) -> None:
        """Record that this site will use keys while ``start <= clock < end``."""
        if keys.shape[0]:
            self.library.intent(self._numbers(table, keys), start, end)

    def here(self, table: int, keys: Keys) -> NDArray[np.bool_]:
        """Not supported: the library has no call for it.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError('backend="adapm" does not tell which keys are at a site')

    def states(self, table: int, keys: Keys) -> NDArray[np.int8]:
        """Not supported: the library has no call for it.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError('backend="adapm" does not tell which keys are at a site')

    def owned(self, table: int) -> tuple[Keys, Block]:
        """Return the keys whose home is this site and their values; the library does not provide the owned keys."""
        keys = np.arange(self._rank, self._tables[table].limit, self._sites)
        values = np.empty((keys.shape[0], self._tables[table].width), np.float32)
        waiting = self.pull(table, keys, values)
        if isinstance(waiting, Waiting):
            waiting.wait()
        return keys, values

    def nbytes(self, table: int) -> int:
        """Return 0: the library does not provide the size of its memory."""
        return 0

    def _wait_for_pushes(self) -> None:
        while self._pushes:
            self._pushes.pop().wait()

    def flush(self) -> None:
        """Wait until the pushes of this site have reached the owners."""
        self._wait_for_pushes()
        if self._tables:
            self.library.synchronise()
