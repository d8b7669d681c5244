"""AdaPM's bindings behind the calls of the built-in engine, with its hazards kept out.

Keys and values have been checked by `Table` when they come here: int64 and float32, contiguous, in range and finite.
The library takes other types for these, and reads past its tables for negative keys.
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
from torch import Tensor

from .. import kernels
from ..rows import Block, Keys
from .watchdog import Watchdog

_TRIES = 8  # rounds in which a set value comes nearer, if rounding keeps it away
_set_up = False


@dataclass(frozen=True)
class Rows:
    """What is known of a table here.

    Attributes:
        limit: keys are smaller.
        width: number of values a key.
        first: the library's number of key 0.
        nbytes: bytes of memory at this site; the library does not tell.
    """

    limit: int
    width: int
    first: int
    nbytes: int = 0


class Waiting:
    """A call under way in the library; keeps what the library writes to until it has."""

    def __init__(self, library: Library, timestamp: int, held: Any) -> None:
        self._library, self._timestamp, self._held = library, timestamp, held
        self._over = False

    def is_set(self) -> bool:
        """Says whether it has been waited for; the bindings do not tell more."""
        return self._over

    def wait(self) -> None:
        """Waits."""
        if not self._over:
            self._library.wait(self._timestamp)
            self._over, self._held = True, None

    @property
    def done(self) -> Waiting:
        return self


class Library:
    """The library in this process: one server and one worker, and one thread at a time in them.

    Most of its calls hold the GIL, so that no Python thread could end one that waits for a site that is gone: a
    watchdog, which is told of every call, ends the process then.

    Args:
        adapm: the module.
        lengths: number of values of each key.
        technique: one of the library's.
        watchdog: is told when a call begins and ends; None for one site, which waits for nobody.
        meet: waits for all sites, by other means.

    Raises:
        RuntimeError: if the process has had one before.
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
        meet()  # a message to a server that is not ready ends its process
        with self._inside():
            self._worker = adapm.Worker(0, self._server)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Enter the library: one thread at a time, watched."""
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
        """First values are set inside."""
        with self._inside():
            self._worker.begin_setup()
        yield
        with self._inside():
            self._worker.end_setup()

    def set_first(self, keys: Tensor, values: Tensor) -> None:
        """Sets first values, inside of `setup`."""
        with self._inside():
            self._worker.set(keys, values.reshape(-1))

    def pull(self, keys: Tensor, values: Tensor) -> int:
        """Begins a pull; returns -1 if it is over, else what `wait` takes."""
        with self._inside():
            return int(self._worker.pull(keys, values, True))

    def push(self, keys: Tensor, values: Tensor) -> int:
        """Begins a push; returns -1 if it is over, else what `wait` takes. The values have been copied."""
        with self._inside():
            return int(self._worker.push(keys, values, True))

    def wait(self, timestamp: int) -> None:
        """Waits for a pull or push."""
        with self._inside():
            self._worker.wait(timestamp)

    def intent(self, keys: Tensor, start: int, end: int) -> None:
        """Says that keys will be used."""
        with self._inside():
            self._worker.intent(keys, start, end)

    def advance_clock(self) -> int:
        """Moves the clock on; returns the new time."""
        with self._inside():
            self._worker.advance_clock()
            return int(self._worker.current_clock())

    def synchronise(self) -> None:
        """Waits until what was pushed has been sent to the owners, and replicas have been refreshed after that."""
        with self._inside():
            self._worker.wait_sync()
            self._worker.wait_sync()

    def abandon(self) -> None:
        """Leave the library as it is. Its destructors would abort the process, since its threads still run."""
        for kept in (self._worker, self._server):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        libc = ctypes.CDLL(None)
        if hasattr(libc, "on_exit"):  # glibc's; the interpreter has ended by then
            libc.on_exit(libc._exit, None)

    def end(self) -> None:
        """Ends worker and server, together with those of all sites."""
        with self._inside():
            self._worker.finalize()
            self._server.shutdown()


class BindingsEngine:
    """The calls of the built-in `Engine`, on the library.

    Args:
        start: starts the library when it is first needed.
    """

    def __init__(self, start: Callable[[], Library]) -> None:
        self._start = start
        self._library: Library | None = None
        self._lock = threading.RLock()
        self._tables: list[Rows] = []
        self._pushes: list[Waiting] = []
        self._clock = 0
        self.stores: list[Any] = []  # none of the built-in kind
        self.counts = dict.fromkeys(("pulled", "pulled_remotely", "pushed", "pushed_remotely"), 0)

    @property
    def library(self) -> Library:
        """The library, started."""
        with self._lock:
            if self._library is None:
                self._library = self._start()
                for _ in range(self._clock):
                    self._library.advance_clock()
            return self._library

    @property
    def clock(self) -> int:
        """The clock, in steps."""
        return self._clock

    def advance_clock(self) -> int:
        """Moves the clock on; returns the new time."""
        self._clock += 1
        if self._library is not None:
            self._library.advance_clock()
        return self._clock

    def add_table(self, rows: int, width: int) -> Rows:
        """Notes a table."""
        last = self._tables[-1] if self._tables else Rows(0, 1, 0)
        self._tables.append(Rows(rows, width, last.first + last.limit))
        return self._tables[-1]

    def _numbers(self, table: int, keys: Keys) -> Tensor:
        return torch.from_numpy(keys + self._tables[table].first)

    def pull(self, table: int, keys: Keys, out: Block) -> int | Waiting | None:
        """Copies values into `out`; returns None if that is done, the position of a bad key, or what to wait for."""
        if (position := kernels.first_bad_key(keys, self._tables[table].limit)) >= 0:
            return position
        if not keys.shape[0]:
            return None
        self._settle()  # a site sees what it has pushed
        numbers, values = self._numbers(table, keys), torch.from_numpy(out.reshape(-1))
        timestamp = self.library.pull(numbers, values)
        return self._note("pulled", timestamp, keys, (numbers, values, out))

    def push(self, table: int, keys: Keys, deltas: Block) -> Waiting | None:
        """Adds deltas; returns None if that is done, else what to wait for."""
        if not keys.shape[0]:
            return None
        timestamp = self.library.push(self._numbers(table, keys), torch.from_numpy(deltas.reshape(-1)))
        waiting = self._note("pushed", timestamp, keys, None)
        if waiting is not None:
            self._pushes.append(waiting)
        return waiting

    def _note(self, what: str, timestamp: int, keys: Keys, held: Any) -> Waiting | None:
        self.counts[what] += keys.shape[0]
        if timestamp == -1:
            return None
        self.counts[f"{what}_remotely"] += keys.shape[0]
        return Waiting(self.library, timestamp, held)

    def set(self, table: int, keys: Keys, values: Block) -> tuple[bool, None]:
        """Sets keys, by adding what they lack: the library's own set is not made for keys with a replica here.

        Raises:
            RuntimeError: if others push to the keys at the same time, so that they do not come to rest.
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
        """Notes that this site will use keys while ``start <= clock < end``."""
        if keys.shape[0]:
            self.library.intent(self._numbers(table, keys), start, end)

    def _settle(self) -> None:
        while self._pushes:
            self._pushes.pop().wait()

    def flush(self) -> None:
        """Waits until what this site has pushed is with the owners."""
        self._settle()
        if self._tables:
            self.library.synchronise()
