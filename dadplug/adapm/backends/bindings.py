"""The backend on AdaPM's own engine, through its Python bindings (``import adapm``).

The library is set up once per process, for a fixed number of keys and fixed value lengths. So tables are only recorded
until the first use, which waits for all sites and starts the library with all tables. Keys of the library are numbered
from 0: key k of a table is ``k + first`` there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist

from ...exchange.handshake import free_port
from ...exchange.transport import Transport
from ..connections import reachable_address
from ..engine import TECHNIQUES
from ..interfaces import Completion
from ..rows import Block, Keys
from .base import Backend, TableSpec
from .bindings_engine import BindingsEngine, Library
from .watchdog import Watchdog

_MOST_KEYS = 2**31 - 1  # setup() takes an int
_CHUNK = 65536  # keys whose initial values are set at a time
_HOW = (
    'backend="adapm" needs AdaPM\'s Python bindings, a module adapm, which is not installed. Build it from '
    "https://github.com/alexrenz/AdaPM as its bindings/README.md says, or leave backend out: the built-in engine needs "
    "nothing"
)


class BindingsBackend(Backend):
    """The backend on AdaPM's own engine.

    The library imposes these differences: tables have a known number of rows and are all added before the first use;
    ``technique`` cannot be ``"static"``; a process can have one manager; `counts` and `traffic` have less information.
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

    techniques = tuple(name for name in TECHNIQUES if name != "static")

    def __init__(
        self, technique: str, process_group: dist.ProcessGroup | None, timeout: float, interval: float
    ) -> None:
        if technique not in self.techniques:
            raise ValueError(f"technique {technique!r} is not one of AdaPM's: {', '.join(map(repr, self.techniques))}")
        super().__init__(technique, process_group, timeout, interval)
        if not self.transport.is_direct:
            raise ValueError(
                'backend="adapm" opens connections between the sites, in the clear, which a hub does not carry: leave '
                "backend out"
            )
        self._adapm = _import(self.transport)
        self.check_equal("options", ("adapm", technique, timeout))
        self._tables: list[TableSpec] = []
        self._library: Library | None = None
        self._scheduler: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None
        self._closed = False
        self._engine = self.engine = BindingsEngine(self._start, self.rank, self.world_size)

    def add_table(self, spec: TableSpec) -> None:
        name, rows = spec.name, spec.rows
        if rows is None:
            raise ValueError(f'table {name!r} needs rows=, a number of keys: backend="adapm" has no open ranges')
        if spec.max_rows is not None:
            raise ValueError(f'table {name!r}: backend="adapm" keeps all rows, and takes no max_rows')
        if self._library is not None:
            raise RuntimeError(f'table {name!r} comes too late: with backend="adapm", add all before any is used')
        if sum(table.rows or 0 for table in self._tables) + rows > _MOST_KEYS:
            raise ValueError(f'backend="adapm" has at most {_MOST_KEYS:,} keys in all tables together')
        self._engine.add_table(rows, spec.width)
        self._tables.append(spec)

    def _start(self) -> Library:
        """Start the library with the tables added so far; wait for all sites."""
        if not self._tables:
            raise RuntimeError('with backend="adapm", add the tables before anything else')
        lengths = torch.cat([torch.full((spec.rows or 0,), spec.width) for spec in self._tables])
        keys = lengths.numel()
        own = reachable_address(self.transport.gather_objects)
        address, port = self.transport.gather_objects([own, free_port()])[0]
        os.environ.update(DMLC_NUM_SERVER=str(self.world_size), DMLC_PS_ROOT_URI=address, DMLC_PS_ROOT_PORT=str(port))
        if self.rank == 0:
            self._scheduler = start_scheduler(keys)
        os.environ.update(DMLC_ROLE="server", DMLC_NODE_HOST=own)
        if self.world_size > 1:
            self._watchdog = Watchdog(own)
            names = [self.transport.sites[rank] for rank in range(self.world_size)]
            self._watchdog.start(self.timeout, names, self.transport.gather_objects(self._watchdog.place), self.rank)
        self._library = Library(self._adapm, lengths, self.technique, self._watchdog, self._meet)
        with self._library.setup():  # there are no replicas yet, for which the library's set has other semantics
            first = 0
            for spec in self._tables:
                for part in torch.arange(self.rank, spec.rows or 0, self.world_size).split(_CHUNK):
                    values = torch.empty(part.numel(), spec.width)
                    spec.initialiser(part.numpy(), values.numpy())
                    self._library.set_first(part + first, values)
                first += spec.rows or 0
        return self._library

    def _meet(self) -> None:
        """Wait for all sites by the process group, whose errors name a lost site."""
        self.transport.gather_objects(None)

    @property
    def clock(self) -> int:
        return self._engine.clock

    def advance_clock(self) -> int:
        self.check()
        clock: int = self._engine.advance_clock()
        return clock

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of keys by event; remote ones are all keys of calls of which another site had to answer a part."""
        return dict(self._engine.counts)

    def intend(self, table: int, keys: Keys, start: int, end: int) -> None:
        self._engine.intend(table, keys, start, end)

    def owned(self, table: int) -> tuple[Keys, Block]:
        self.check()
        return super().owned(table)

    def flush(self) -> None:
        self.check()
        self._engine.flush()

    def barrier(self) -> None:
        self.check()
        self._meet()

    def wait_for(self, done: Completion) -> None:
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
            if self._library is not None:
                self._meet()
                self._library.end()
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
        if self._library is not None:
            self._library.abandon()
        self._end_processes(0.0)

    def _end_processes(self, patience: float) -> None:
        self._end_scheduler(patience)
        if self._watchdog is not None:
            self._watchdog.stop()

    def _end_scheduler(self, patience: float) -> None:
        """Wait some seconds for the scheduler to exit, then end it."""
        if self._scheduler is None or self._scheduler.stdin is None:
            return
        try:
            self._scheduler.wait(patience)
        except subprocess.TimeoutExpired:
            self._scheduler.stdin.close()
            self._scheduler.wait(5.0)


def _import(transport: Transport) -> Any:
    """Import the bindings on all sites.

    Raises:
        ImportError: on all sites, if one cannot import them.
    """
    try:
        import adapm
    except ImportError as error:
        reason = f"{error}"
        adapm = None
    else:
        reason = ""
    for site, why in enumerate(transport.gather_objects(reason)):
        if why:
            raise ImportError(f"{_HOW}. At {transport.sites[site]}: {why}")
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
