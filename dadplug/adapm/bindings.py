"""The backend on AdaPM's own engine, through its Python bindings (``import adapm``).

The library is set up once per process, for a fixed number of keys and fixed value lengths. So tables are only recorded
until the first use, which waits for all sites and starts the library with all tables. Keys of the library are numbered
from 0: key k of a table is ``k + first`` there.

`Table` has checked all keys and values: int64 and float32, contiguous, in range and finite. The library would
misinterpret other types, and read past its tables for negative keys.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import escaped
from ..exchange.fields import checked
from ..exchange.handshake import reachable_address
from ..exchange.transport import Streams, Transport
from ..lowrank.rows import first_outside
from ..support.processes import free_port
from ..support.refusals import refuse
from .backends import Backend, Done, TableEngine, TableSpec
from .engine import COUNTS, TECHNIQUES
from .store import Block, Keys
from .watchdog import Watchdog

_MOST_KEYS = 2**31 - 1  # setup() takes an int
_CHUNK = 65536  # keys whose initial values are set at a time
_TRIES = 8  # rounds in which a set value converges, in case of rounding errors
_set_up = False
_HOW = (
    'backend="adapm" needs AdaPM\'s Python bindings, a module adapm, which is not installed. Build it from '
    "https://github.com/alexrenz/AdaPM as its bindings/README.md says, or leave backend out: the built-in engine needs "
    "nothing"
)


class Waiting(Done):
    """Call in progress in the library.

    Args:
        library: the library.
        timestamp: number of the call.
        held: objects that the library writes to, kept until the call is complete.
    """

    def __init__(self, library: Library, timestamp: int, held: Any) -> None:
        self._library, self._timestamp, self._held = library, timestamp, held
        self._happened = False

    def wait(self, timeout: float = -1) -> bool:
        """Wait until the call is complete; the library has no limit of time."""
        if not self._happened:
            self._library.call("wait", self._timestamp)
            self._happened, self._held = True, None
        return True


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

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the library's worker."""
        with self._inside():
            return getattr(self._worker, name)(*arguments)

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


class BindingsBackend(Backend, TableEngine):
    """The backend on AdaPM's own engine.

    The library imposes these differences: tables have a known number of rows and are all added before the first use;
    ``technique`` cannot be ``"static"``; a process can have one manager; `counts` and `traffic` have less information:
    remote keys are all keys of calls of which another site had to answer a part.
    If a site is lost, the processes of the other sites are ended, since calls into the library cannot be interrupted: a
    watchdog process of each site does so within seconds, or after `timeout` for a site that runs and does not respond.

    Args:
        technique: as for `ParameterManager`, except ``"static"``.
        process_group: as for `ParameterManager`.
        timeout: as for `ParameterManager`.
        interval: not used; the library has its own.

    Raises:
        ImportError: if there is no module ``adapm``.
        ValueError: if an option is out of range, or the sites are connected through a hub.
        MismatchError: if the sites' options differ.
    """

    locates_keys = False
    techniques = tuple(name for name in TECHNIQUES if name != "static")

    def __init__(
        self, technique: str, process_group: dist.ProcessGroup | None, timeout: float, interval: float
    ) -> None:
        if technique not in self.techniques:
            raise ValueError(f"technique {technique!r} is not one of AdaPM's: {', '.join(map(repr, self.techniques))}")
        super().__init__(technique, process_group, timeout, interval)
        if isinstance(self.transport, Streams):
            raise ValueError(
                'backend="adapm" opens connections between the sites, in the clear, which a hub does not carry: leave '
                "backend out"
            )
        self._adapm = _import(self.transport)
        self.check_equal("options", ("adapm", technique, timeout))
        self.engine = self
        self.clock = 0
        self._counts = dict.fromkeys(COUNTS[:4], 0)
        self._library: Library | None = None  # once it is ready
        self._begun: Library | None = None
        self._lock = threading.RLock()
        self._tables: list[TableSpec] = []
        self._first: list[int] = []  # the library's numbers of their keys 0
        self._pushes: list[Waiting] = []
        self._scheduler: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None
        self._closed = False

    def add_table(self, spec: TableSpec) -> None:
        name, rows = spec.name, spec.rows
        if self._begun is not None:
            raise RuntimeError(f'table {name!r} comes too late: with backend="adapm", add all before any is used')
        refuse(
            (rows is None, f'table {name!r} needs rows=, a number of keys: backend="adapm" has no open ranges'),
            (spec.max_rows is not None, f'table {name!r}: backend="adapm" keeps all rows, and takes no max_rows'),
            (
                self._size + (rows or 0) > _MOST_KEYS,
                f'backend="adapm" has at most {_MOST_KEYS:,} keys in all tables together',
            ),
        )
        self._first.append(self._size)
        self._tables.append(spec)

    @property
    def _size(self) -> int:
        """Number of keys of all tables."""
        return sum(spec.rows or 0 for spec in self._tables)

    @property
    def library(self) -> Library:
        """The library; the first access starts it."""
        with self._lock:
            if self._library is None:
                self._library = self._start()
                for _ in range(self.clock):
                    self._library.call("advance_clock")
            return self._library

    def _start(self) -> Library:
        """Start the library with the tables added so far; wait for all sites."""
        tables = self._tables
        if not tables:
            raise RuntimeError('with backend="adapm", add the tables before anything else')
        lengths = torch.cat([torch.full((spec.rows or 0,), spec.width) for spec in tables])
        own = reachable_address(self.transport.gather_objects)
        address, port = self.transport.gather_objects([own, free_port()])[0]
        os.environ.update(DMLC_NUM_SERVER=str(self.world_size), DMLC_PS_ROOT_URI=address, DMLC_PS_ROOT_PORT=str(port))
        if self.rank == 0:
            self._scheduler = start_scheduler(lengths.numel())
        os.environ.update(DMLC_ROLE="server", DMLC_NODE_HOST=own)
        if self.world_size > 1:
            self._watchdog = Watchdog(own)
            names = [self.transport.sites[rank] for rank in range(self.world_size)]
            self._watchdog.start(self.timeout, names, self.transport.gather_objects(self._watchdog.place), self.rank)
        self._begun = library = Library(self._adapm, lengths, self.technique, self._watchdog, self._meet)
        library.call("begin_setup")  # there are no replicas yet, for which the library's set has other semantics
        first = 0
        for spec in tables:
            for part in torch.arange(self.rank, spec.rows or 0, self.world_size).split(_CHUNK):
                values = torch.empty(part.numel(), spec.width)
                spec.initialiser(part.numpy(), values.numpy())
                library.call("set", part + first, values.reshape(-1))
            first += spec.rows or 0
        library.call("end_setup")
        return library

    def _meet(self) -> None:
        """Wait for all sites by the process group, whose errors name a lost site."""
        self.transport.gather_objects(None)

    def advance_clock(self) -> int:
        self.check()
        self.clock += 1
        if self._library is not None:
            self._library.call("advance_clock")
        return self.clock

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def _numbers(self, table: int, keys: Keys) -> Tensor:
        return torch.from_numpy(keys + self._first[table])

    def pull(self, table: int, keys: Keys, out: Block) -> int | Waiting | None:
        position: int = first_outside(keys, self._tables[table].rows or 0)
        if position >= 0:
            return position
        if not keys.shape[0]:
            return None
        self._wait_for_pushes()  # so that this site reads its own pushes
        numbers, values = self._numbers(table, keys), torch.from_numpy(out.reshape(-1))
        return self._begin("pull", keys, numbers, values, out)

    def push(self, table: int, keys: Keys, deltas: Block) -> Waiting | None:
        if not keys.shape[0]:
            return None
        waiting = self._begin("push", keys, self._numbers(table, keys), torch.from_numpy(deltas.reshape(-1)))
        if waiting is not None:
            self._pushes.append(waiting)
        return waiting

    def _begin(self, name: str, keys: Keys, numbers: Tensor, values: Tensor, out: Any = None) -> Waiting | None:
        """Begin a pull, or a push, which copies the values; return None if it is complete, otherwise its end."""
        timestamp = int(self.library.call(name, numbers, values, True))
        self._counts[f"{name}ed"] += keys.shape[0]
        if timestamp == -1:
            return None
        self._counts[f"{name}ed_remotely"] += keys.shape[0]
        return Waiting(self.library, timestamp, (numbers, values, out))

    def set(self, table: int, keys: Keys, values: Block) -> tuple[bool, None]:
        """Set keys by pushing the differences, since the library's set does not support keys with a replica here.

        Raises:
            RuntimeError: if other sites push to the keys at the same time, so that their values keep changing.
        """
        if not keys.shape[0]:
            return True, None
        now = np.empty_like(values)
        for _ in range(_TRIES):
            self._pull_now(table, keys, now)
            lacking = np.flatnonzero((now != values).any(1))
            if not lacking.size:
                return True, None
            self.push(table, keys[lacking], values[lacking] - now[lacking])
            self.flush()
        raise RuntimeError(
            f"{lacking.size} of {keys.shape[0]} keys do not keep what they are set to: who pushes to them?"
        )

    def intend(self, table: int, keys: Keys, start: int, end: int) -> None:
        if keys.shape[0]:
            self.library.call("intent", self._numbers(table, keys), start, end)

    def owned(self, table: int) -> tuple[Keys, Block]:
        """Return the keys whose home is this site and their values; the library does not provide the owned keys."""
        self.check()
        spec = self._tables[table]
        keys = np.arange(self.rank, spec.rows or 0, self.world_size)
        values = np.empty((keys.shape[0], spec.width), np.float32)
        self._pull_now(table, keys, values)
        return keys, values

    def _pull_now(self, table: int, keys: Keys, out: Block) -> None:
        waiting = self.pull(table, keys, out)
        if isinstance(waiting, Waiting):
            waiting.wait()

    def _wait_for_pushes(self) -> None:
        while self._pushes:
            self._pushes.pop().wait()

    def flush(self) -> None:
        self.check()
        self._wait_for_pushes()
        if self._tables:
            self.library.call("wait_sync")
            self.library.call("wait_sync")

    def barrier(self) -> None:
        self.check()
        self._meet()

    def wait_for(self, done: Done) -> None:
        self.check()
        done.wait()

    def check(self) -> None:
        if self._closed:
            raise RuntimeError("the parameter manager cannot go on: it has been closed")

    def close(self) -> None:
        """End the library at this site; wait until all sites have called it. May be called twice.

        Raises:
            SiteError: if a site exits or does not answer.
        """
        if self._closed:
            return
        try:
            if self._begun is not None:
                self._meet()
                self._begun.end()
        except BaseException as error:
            self.abandon(f"{type(error).__name__}: {error}")
            raise
        self._closed = True
        self._end_processes(5.0)
        if self.world_size > 1:
            self.transport.close()

    def abandon(self, reason: str) -> None:
        if self._closed:
            return
        self.transport.sites.announce(reason)
        self._closed = True
        if self._begun is not None:
            self._begun.abandon()
        self._end_processes(0.0)

    def _end_processes(self, patience: float) -> None:
        """Wait some seconds for the scheduler to exit, then end it; end the watchdog."""
        if self._scheduler is not None and self._scheduler.stdin is not None:
            try:
                self._scheduler.wait(patience)
            except subprocess.TimeoutExpired:
                self._scheduler.stdin.close()
                self._scheduler.wait(5.0)
        if self._watchdog is not None:
            self._watchdog.stop()


def _import(transport: Transport) -> Any:
    """Import the bindings on all sites.

    Raises:
        ImportError: on all sites, if one cannot import them.
    """
    reason = ""
    try:
        import adapm
    except ImportError as error:
        reason = f"{error}"
    every = transport.gather_present(reason)
    for site, why in checked(every, str, "reason", transport).items():
        if why:
            raise ImportError(f"{_HOW}. At {transport.sites[site]}: {escaped(why)}")
    return adapm


# Program that ends the scheduler when its input closes or its site has ended. It has no thread that could hold a lock
# of standard input or output when the interpreter exits.
_WATCHED = """
import os, select, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.DEVNULL)
while child.poll() is None:
    if select.select([0], [], [], 0.1)[0] or os.getppid() != int(sys.argv[2]):
        child.kill()
sys.exit(child.wait())
"""


def start_scheduler(keys: int) -> subprocess.Popen[bytes]:
    """Start the process that connects the library's nodes; its address is in the environment.

    Args:
        keys: number of keys of all tables together.
    """
    environment = os.environ | {"DMLC_ROLE": "scheduler", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = f"import torch, adapm; adapm.scheduler({keys}, 1)"  # adapm is linked against torch
    return subprocess.Popen(
        [sys.executable, "-c", _WATCHED, code, f"{os.getpid()}"], env=environment, stdin=subprocess.PIPE
    )
