"""A parameter manager on AdaPM's own engine, through its Python bindings (``import adapm``).

The library is set up once in a process, for a number of keys and value lengths that cannot change. So tables are only
written down at first; the first use, which waits for all sites, starts it with all of them. Its keys are numbers from
0: a table's key k is ``k + first`` there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist

from ...exchange import DEFAULT_TIMEOUT, Traffic, open_transport
from ...exchange.addresses import free_port
from ..connections import reachable_address
from ..engine import TECHNIQUES
from ..initialisers import Constant, Initialiser
from ..manager import ParameterManager
from ..sampling import Sampler
from ..table import Table
from .bindings_engine import BindingsEngine, Library, Rows
from .watchdog import Watchdog

_MOST_KEYS = 2**31 - 1  # setup() takes an int
_CHUNK = 65536  # keys whose first values are set at a time
_HOW = (
    'backend="adapm" needs AdaPM\'s Python bindings, a module adapm, which is not installed. Build it from '
    "https://github.com/alexrenz/AdaPM as its bindings/README.md says, or leave backend out: the built-in engine needs "
    "nothing"
)


class BindingsManager(ParameterManager):
    """A `ParameterManager` on AdaPM's own engine.

    It differs in what the library cannot do: tables have a known number of rows and are all added before the first use,
    ``technique`` is not ``"static"``, there is one manager in the life of a process, `counts` and `traffic` tell less,
    and a site that is gone ends the others' processes, since calls into the library cannot be ended: a process beside
    each site does that within seconds, or after `timeout` for a site that is there and does not answer.

    Args:
        backend: ``"adapm"``.
        technique: as for `ParameterManager`.
        process_group: as for `ParameterManager`.
        timeout: as for `ParameterManager`.
        interval: not used; the library has its own.

    Raises:
        ImportError: if there is no module ``adapm``.
        ValueError: if an option is out of range.
        MismatchError: if the sites' options differ.
        RuntimeError: if the process has had one before.
    """

    def __init__(
        self,
        *,
        backend: str = "adapm",
        technique: str = "all",
        process_group: dist.ProcessGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        interval: float = 0.002,
    ) -> None:
        valid = [name for name in TECHNIQUES if name != "static"]
        if technique not in valid:
            raise ValueError(f"technique {technique!r} is not one of AdaPM's: {', '.join(map(repr, valid))}")
        if timeout <= 0:
            raise ValueError(f"timeout must exceed 0, got {timeout}")
        self.traffic = Traffic()
        self.timeout, self.technique = timeout, technique
        self._transport = open_transport(process_group, self.traffic, torch.device("cpu"), timeout)
        self.rank, self.world_size = self._transport.rank, self._transport.world_size
        self._adapm = _import(self._transport)
        self._agree("options", (backend, technique, timeout))
        self._tables: list[Table] = []
        self._initialisers: list[Initialiser] = []
        self._library: Library | None = None
        self._scheduler: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None
        self._closed = False
        self._engine: Any = BindingsEngine(self._start)  # stands where the built-in engine does

    def table(
        self,
        name: str,
        width: int,
        *,
        rows: int | None = None,
        initialiser: Initialiser | None = None,
        capacity: int | None = None,
        max_rows: int | None = None,
    ) -> Table:
        """Adds a table; all sites must add the same ones in the same order, and all before the first use.

        Args:
            name: its name, for messages.
            width: number of values a key.
            rows: keys are 0 to rows - 1.
            initialiser: makes the first values from the keys; zeros where None.
            capacity: not used.
            max_rows: must be None: AdaPM keeps all rows.

        Raises:
            ValueError: if an argument is out of range.
            RuntimeError: if a table has been used already.
            MismatchError: if the sites' tables differ.
        """
        if rows is None:
            raise ValueError(f'table {name!r} needs rows=, a number of keys: backend="adapm" has no open ranges')
        if max_rows is not None:
            raise ValueError(f'table {name!r}: backend="adapm" keeps all rows, and takes no max_rows')
        if width < 1 or rows < 1:
            raise ValueError(f"width and rows must be at least 1, got {width} and {rows}")
        if self._library is not None:
            raise RuntimeError(f'table {name!r} comes too late: with backend="adapm", add all before any is used')
        if any(table.name == name for table in self._tables):
            raise ValueError(f"there is a table {name!r} already")
        if sum(table.rows or 0 for table in self._tables) + rows > _MOST_KEYS:
            raise ValueError(f'backend="adapm" has at most {_MOST_KEYS:,} keys in all tables together')
        table = BindingsTable(self, self._engine, len(self._tables), name, width, rows)
        self._tables.append(table)
        self._initialisers.append(initialiser or Constant())
        self._agree(f"table {len(self._tables) - 1}", (name, width, rows))
        return table

    def _start(self) -> Library:
        """Starts the library with the tables that there are; waits for all sites."""
        if not self._tables:
            raise RuntimeError('with backend="adapm", add the tables before anything else')
        lengths = torch.cat([torch.full((table.rows or 0,), table.width) for table in self._tables])
        keys = int(lengths.numel())
        own = reachable_address(self._transport.gather_objects)
        address, port = self._transport.gather_objects([own, free_port()])[0]
        os.environ.update(DMLC_NUM_SERVER=str(self.world_size), DMLC_PS_ROOT_URI=address, DMLC_PS_ROOT_PORT=str(port))
        if self.rank == 0:
            self._scheduler = start_scheduler(keys)
        os.environ.update(DMLC_ROLE="server", DMLC_NODE_HOST=own)
        if self.world_size > 1:
            self._watchdog = Watchdog(own)
            names = [self._transport.sites[rank] for rank in range(self.world_size)]
            self._watchdog.start(self.timeout, names, self._transport.gather_objects(self._watchdog.place), self.rank)
        self._library = Library(self._adapm, lengths, self.technique, self._watchdog, self._meet)
        with self._library.setup():  # no replicas yet, on which set would do something else
            first = 0
            for table, initialiser in zip(self._tables, self._initialisers, strict=True):
                for part in torch.arange(self.rank, table.rows or 0, self.world_size).split(_CHUNK):
                    values = torch.empty(part.numel(), table.width)
                    initialiser(part.numpy(), values.numpy())
                    self._library.set_first(part + first, values)
                first += table.rows or 0
        return self._library

    def _meet(self) -> None:
        """Wait for all sites, by the process group: it can say which one is gone."""
        self._transport.gather_objects(None)

    @property
    def counts(self) -> dict[str, int]:
        """What has happened at this site so far, in keys: ``pulled`` and ``pushed``.

        ``pulled_remotely`` and ``pushed_remotely`` are the keys of calls that another site had to answer a part of: the
        library does not tell which keys.
        """
        return dict(self._engine.counts)

    def advance_clock(self) -> int:
        self.check()
        clock: int = self._engine.advance_clock()
        return clock

    def _flush(self) -> None:
        self.check()
        self._engine.flush()

    def barrier(self) -> None:
        """Waits until all sites have called it.

        Raises:
            SiteError: if a site ends or does not answer.
        """
        self.check()
        self._meet()

    def wait_for(self, done: Any) -> None:
        """Waits for an answer from other sites."""
        self.check()
        done.wait()

    def check(self) -> None:
        """Raises if the manager has been closed.

        Raises:
            RuntimeError: if so.
        """
        if self._closed:
            raise RuntimeError("the parameter manager cannot go on: it has been closed")

    def close(self) -> None:
        """Ends the library at this site; waits for all sites to come here. May be called twice.

        Raises:
            SiteError: if a site ends or does not come.
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
            self._transport.close()

    def abandon(self, reason: str) -> None:
        if self._closed:
            return
        self._transport.sites.announce(reason)
        self._closed = True
        if self._library is not None:
            self._library.abandon()
        self._end_processes(0.0)

    def _end_processes(self, patience: float) -> None:
        self._end_scheduler(patience)
        if self._watchdog is not None:
            self._watchdog.stop()

    def _end_scheduler(self, patience: float) -> None:
        """Gives the scheduler some seconds to end by itself."""
        if self._scheduler is None or self._scheduler.stdin is None:
            return
        try:
            self._scheduler.wait(patience)
        except subprocess.TimeoutExpired:
            self._scheduler.stdin.close()
            self._scheduler.wait(5.0)


class BindingsTable(Table):
    """A `Table` whose values are in AdaPM's engine."""

    def __init__(
        self, manager: BindingsManager, engine: BindingsEngine, number: int, name: str, width: int, rows: int
    ) -> None:
        self.name, self.width, self.rows = name, width, rows
        self.rank, self.world_size = manager.rank, manager.world_size
        self._manager, self._number = manager, number
        self._engine: Any = engine
        self._store: Any = engine.add_table(rows, width)

    def owned(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns this site's share of the keys, ascending, and their values: key k is site ``k % world_size``'s.

        The library does not tell which keys are at a site.
        """
        keys = torch.arange(self.rank, self.rows or 0, self.world_size)
        return keys, self.pull(keys)

    def sampler(self, weights: torch.Tensor | None = None, **options: Any) -> Sampler:
        if options.get("scheme") == "local":
            raise ValueError('backend="adapm" does not tell which keys are at a site: no scheme="local"')
        return super().sampler(weights, **options)

    def states(self, keys: torch.Tensor) -> torch.Tensor:
        """Not to be had: the library does not tell where keys are."""
        raise RuntimeError('backend="adapm" does not tell which keys are at a site')


def _import(transport: Any) -> Any:
    """Imports the bindings, at all sites or none."""
    try:
        import adapm
    except ImportError as error:
        reason = f"{error}"
        adapm = None
    else:
        reason = ""
    told = transport.gather_objects(reason)
    for site, why in enumerate(told):
        if why:
            raise ImportError(f"{_HOW}. At {transport.sites[site]}: {why}")
    return adapm


# Ends the scheduler when its input closes or its site has ended. It has no thread that could hold a lock
# of standard input or output when the interpreter ends.
_WATCHED = """
import os, select, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.DEVNULL)
while child.poll() is None:
    if select.select([0], [], [], 0.1)[0] or os.getppid() != int(sys.argv[2]):
        child.kill()
sys.exit(child.wait())
"""


def start_scheduler(keys: int) -> subprocess.Popen[bytes]:
    """Starts the process by which the library's nodes meet; its place is in the environment."""
    environment = os.environ | {"DMLC_ROLE": "scheduler", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = f"import torch, adapm; adapm.scheduler({keys}, 1)"  # adapm is linked against torch
    return subprocess.Popen(
        [sys.executable, "-c", _WATCHED, code, f"{os.getpid()}"], env=environment, stdin=subprocess.PIPE
    )


__all__ = ["BindingsManager", "BindingsTable", "Rows"]
