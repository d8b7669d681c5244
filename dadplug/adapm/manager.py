"""The parameter manager: tables of values spread over the sites, and what workers call."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..errors import MismatchError, SiteError
from ..exchange import DEFAULT_TIMEOUT, Traffic, open_transport
from .engine import TECHNIQUES, Engine
from .initialisers import Initialiser
from .messages import Kind, Message
from .network import Network
from .table import Table
from .timing import SyncTiming

_IDLE = 0.05  # seconds between looks at nothing
_HURRY = 2e-4  # seconds between rounds while somebody waits for them
_LATE = 0.01  # seconds that the background thread may be late before a worker waits for it, and waits at most
_FAREWELL = 0.3  # seconds that a site's last message may take longer than the end of its connection
_MOST_SITES = 62


class ParameterManager:
    """Tables of float32 values by key, spread over the sites, adaptively placed (AdaPM, arXiv:2206.00470).

    Each key belongs to one site at a time. Workers pull and push values of any key; those that are not here are asked
    for at the site that has them. A worker that says early what it will use (`Table.intent`) has the keys brought here
    before: the key itself where no other site wants it at the time, a replica where one does. All sites must make the
    manager and its tables together, with the same options.

    Args:
        backend: ``"builtin"``, or ``"adapm"`` for AdaPM's own engine, see `dadplug.adapm.backends.bindings`.
        technique: what intents lead to: ``"all"`` (relocation or replication, whichever suits), ``"replication_only"``,
            ``"relocation_only"``, or ``"static"`` (nothing: every key stays at its home), for comparison.
        process_group: the group whose processes are the sites; the default group where None.
        timeout: seconds after which a silent site counts as lost.
        interval: least time between two rounds of synchronisation, in seconds; replicas are about that stale.

    Attributes:
        rank: this site.
        world_size: number of sites.
        traffic: the meter of the bytes that this site has sent.

    Raises:
        ValueError: if an option is out of range.
        MismatchError: if the sites' options differ.
        SiteError: if a site ends or does not answer.

    Example:
        >>> with dadplug.adapm.ParameterManager() as manager:
        ...     words = manager.table("words", width=64, rows=200_000)
        ...     words.intent(keys_of_batch_10, 10, 11)
        ...     values = words.pull(keys)
        ...     words.push(keys, deltas)
        ...     manager.advance_clock()
        ...     manager.wait_sync()
    """

    def __new__(cls, *, backend: str = "builtin", **options: Any) -> ParameterManager:
        from .backends import manager_class

        return super().__new__(manager_class(backend) if cls is ParameterManager else cls)

    def __init__(
        self,
        *,
        backend: str = "builtin",
        technique: str = "all",
        process_group: dist.ProcessGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        interval: float = 0.002,
    ) -> None:
        if technique not in TECHNIQUES:
            raise ValueError(f"unknown technique {technique!r}; valid ones are {', '.join(map(repr, TECHNIQUES))}")
        if timeout <= 0 or interval < 0:
            raise ValueError(f"timeout must exceed 0 and interval be at least 0, got {timeout} and {interval}")
        self.traffic = Traffic()
        self.timeout = timeout
        self.technique = technique
        self._interval = interval
        self._sync_timing = SyncTiming(interval)
        self._transport = open_transport(process_group, self.traffic, torch.device("cpu"), timeout)
        self.rank, self.world_size = self._transport.rank, self._transport.world_size
        if self.world_size > _MOST_SITES:
            raise ValueError(f"at most {_MOST_SITES} sites can share parameters, there are {self.world_size}")
        self._agree("options", (technique, timeout, interval))
        self._tables: list[Table] = []
        self._failure: BaseException | int | None = None
        self._failure_lock = threading.Lock()
        self._progress = threading.Condition()
        self._in_a_hurry = 0
        self._due = math.inf  # when the background thread wants to look at its tasks again
        self._turn = threading.Event()
        self._barriers = 0
        self._arrived: dict[int, int] = {}
        self._left: set[int] = set()
        self._missing: dict[int, float] = {}
        self._closed = False
        self._network: Network | None = None
        self._thread: threading.Thread | None = None
        self._engine = Engine(self.rank, self.world_size, technique, self._send)
        if self.world_size > 1:
            self._network = Network(self.rank, self._transport.gather_objects, timeout, self.traffic)
            self._transport.gather_objects(None)  # all are connected
            self._transport.sites.watch(self)
            self._thread = threading.Thread(target=self._run, name="dadplug-adapm", daemon=True)
            self._thread.start()

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
        """Adds a table; all sites must add the same ones in the same order.

        Args:
            name: its name, for messages.
            width: number of values a key.
            rows: keys are 0 to rows - 1; None for any key of at least 0, whose values come to be when first used.
            initialiser: makes the first values from the keys, see `dadplug.adapm.initialisers`; zeros where None.
            capacity: number of keys for which memory is reserved at this site at first.
            max_rows: number of keys that this site keeps, for keys without end. Where there would be more, it drops
                those that it owns and that were not used for longest, with all that has been pushed to them: when they
                are used again, they begin with their first values. Keys with a replica elsewhere or with intent that
                has been acted on stay, even if there are more. None keeps all.

        Raises:
            ValueError: if an argument is out of range.
            MismatchError: if the sites' tables differ.
        """
        if width < 1 or (rows is not None and rows < 1):
            raise ValueError(f"width and rows must be at least 1, got {width} and {rows}")
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        if any(table.name == name for table in self._tables):
            raise ValueError(f"there is a table {name!r} already")
        table = Table(self, self._engine, len(self._tables), name, width, rows, initialiser, capacity, max_rows)
        self._tables.append(table)
        self._agree(f"table {len(self._tables) - 1}", (name, width, rows, max_rows))
        return table

    def _agree(self, what: str, item: tuple[Any, ...]) -> None:
        for rank, other in enumerate(self._transport.gather_objects(item)):
            if other != item:
                sites = self._transport.sites
                raise MismatchError(f"{what} of the manager is {item} at {sites[self.rank]}, {other} at {sites[rank]}")

    def gather_objects(self, item: Any) -> list[Any]:
        """Gathers one small picklable object a site, by site; all sites must call it."""
        return self._transport.gather_objects(item)

    def broadcast_bytes(self, content: bytes) -> bytes:
        """Send site 0's bytes to all sites; what others pass is ignored. All sites must call it."""
        return self._transport.broadcast_bytes(content)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces a tensor's values by those of site 0; all sites must call it."""
        self._transport.broadcast(tensor)

    @property
    def current_clock(self) -> int:
        """The number of times that `advance_clock` has been called."""
        return self._engine.clock

    @property
    def counts(self) -> dict[str, int]:
        """What has happened at this site so far, in keys.

        ``pulled`` and ``pushed`` by workers, ``pulled_remotely`` and ``pushed_remotely`` the part that another site had
        to answer, ``moved`` and ``replicated`` to other sites, ``evicted`` (see `table`), and what is here now:
        ``rows`` and ``replicas``.
        """
        here = {"rows": 0, "replicas": 0, "evicted": 0}
        for store in self._engine.stores:
            here["rows"] += len(store)
            here["replicas"] += store.replicas
            here["evicted"] += store.evicted
        return self._engine.counts | here

    def intend(self, table: int, keys: NDArray[np.int64], start: int, end: int) -> None:
        """Notes an intent for a table, by number; see `Table.intent`."""
        if self._engine.intend(table, keys, start, end) and self._network is not None:
            self._network.wake()

    def advance_clock(self) -> int:
        """Moves this site's clock on by one, usually once a batch; returns the new time."""
        self.check()
        self._engine.clock += 1
        if time.monotonic() > self._due + _LATE:
            # A worker that lets the GIL go for many short times takes it back before the other thread has woken up.
            self._turn.clear()
            self._turn.wait(_LATE)
        return self._engine.clock

    def wait_sync(self, *, everywhere: bool = False) -> None:
        """Waits until all that this site has pushed is with its owners, and its replicas are as fresh as now.

        Args:
            everywhere: also wait for the other sites to do so, and refresh the replicas after that: then each site
                sees what any site has pushed before. All sites must call it.

        Raises:
            SiteError: if a site ends or does not answer.
        """
        self._flush()
        if everywhere:
            self.barrier()
            self._flush()
            self.barrier()

    def _flush(self) -> None:
        self.check()
        if self._network is None:
            return
        flush = self._engine.begin_flush()
        with self._progress:
            self._in_a_hurry += 1
        self._network.wake()
        try:
            self._until(lambda: self._engine.flushed(flush))
        finally:
            with self._progress:
                self._in_a_hurry -= 1

    def barrier(self) -> None:
        """Waits until all sites have called it.

        Raises:
            SiteError: if a site ends or does not answer.
        """
        self.check()
        if self._network is None:
            return
        self._barriers += 1
        number = self._barriers
        for peer in range(self.world_size):
            if peer != self.rank:
                self._send(peer, Message(Kind.BARRIER, 0, self.rank, number))
        self._until(lambda: self._arrived.get(number, 0) == self.world_size - 1)
        del self._arrived[number]

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.timeout
        while not condition():
            self.check()
            with self._progress:
                self._progress.wait(0.01)
            if time.monotonic() > deadline:
                self._fail(TimeoutError("timed out"))

    def wait_for(self, done: threading.Event) -> None:
        """Waits for an answer from other sites.

        Raises:
            SiteError: if a site ends or does not answer.
        """
        if not done.wait(self.timeout):
            self._fail(TimeoutError("timed out"))
        self.check()

    def check(self) -> None:
        """Raises what has gone wrong in the background, if anything has.

        Raises:
            SiteError: if a site is gone.
            RuntimeError: if the manager has been closed.
        """
        if self._failure is None:
            return
        with self._failure_lock:
            if isinstance(self._failure, int):
                lost = ConnectionError("the connection was lost")
                self._failure = self._transport.sites.lost(lost, self.timeout, self._failure)
            elif isinstance(self._failure, TimeoutError):
                self._failure = self._transport.sites.lost(self._failure, self.timeout)
        if isinstance(self._failure, SiteError):
            raise SiteError(*self._failure.args)
        raise RuntimeError(f"the parameter manager cannot go on: {self._failure!r}") from self._failure

    def _fail(self, failure: BaseException | int) -> None:
        """Ends all waits; what is called from now on raises."""
        self._due = math.inf
        if self._failure is None:
            self._failure = failure
        self._engine.release()
        with self._progress:
            self._progress.notify_all()

    def _send(self, peer: int, message: Message) -> None:
        assert self._network is not None
        if peer not in self._left and self._failure is None:
            self._network.send(peer, message)

    def _run(self) -> None:
        """The background thread: answers other sites, and runs the rounds."""
        assert self._network is not None
        try:
            engine, timing = self._engine, self._sync_timing
            next_look, syncing = 0.0, False
            while not self._closed:
                now, pause = time.monotonic(), _IDLE
                if engine.intends:
                    pause = min(pause, next_look - now)
                if engine.replicas and not syncing:
                    pause = min(pause, timing.next - now)
                if self._in_a_hurry:
                    pause = min(pause, _HURRY)
                self._due = now + max(pause, 0.0)
                self._receive(pause)
                now = time.monotonic()
                if now >= next_look or self._in_a_hurry:
                    engine.act()
                    next_look = time.monotonic() + self._interval
                if syncing and engine.sync_over:
                    timing.end_round()
                    syncing = False
                if not syncing and (self._in_a_hurry or (engine.replicas and now >= timing.next)):
                    with timing.counted():
                        engine.synchronise()
                    syncing = True
                if self._in_a_hurry:
                    with self._progress:
                        self._progress.notify_all()
                if not self._turn.is_set():
                    self._turn.set()
        except BaseException as error:
            self._fail(error)
        finally:
            self._network.close()

    def _receive(self, pause: float) -> None:
        assert self._network is not None
        messages, lost = self._network.receive(pause)
        self._due = math.inf  # it has woken up
        for sender, frames in messages:
            message = Message.decode(frames, [table.width for table in self._tables])
            if message.kind is Kind.BARRIER:
                with self._progress:
                    self._arrived[message.request] = self._arrived.get(message.request, 0) + 1
                    self._progress.notify_all()
            elif message.kind is Kind.BYE:
                self._left.add(sender)
            elif message.kind in (Kind.SYNC, Kind.SYNCED):
                with self._sync_timing.counted():
                    self._engine.handle(sender, message)
            else:
                self._engine.handle(sender, message)
        for peer in (peer for peer in lost if peer not in self._left):
            self._missing.setdefault(peer, time.monotonic() + _FAREWELL)
        waits = self._engine.waits or self._in_a_hurry
        for peer in self._left:  # peacefully, which matters only to who waits for an answer
            if waits:
                self._missing.setdefault(peer, time.monotonic() + _FAREWELL)
            else:
                self._missing.pop(peer, None)
        for peer, deadline in self._missing.items():
            if time.monotonic() > deadline:
                self._fail(peer)

    def close(self) -> None:
        """Leaves the other sites; nothing can be pulled or pushed afterwards. May be called twice.

        The values that this site owns go with it: `barrier` first, or use the manager in a ``with`` block.
        """
        if self._closed:
            return
        if self._thread is not None and self._failure is None:
            for peer in range(self.world_size):
                if peer != self.rank and peer not in self._left:
                    self._send(peer, Message(Kind.BYE, 0, self.rank))
        self._closed = True
        self._fail(RuntimeError("it has been closed"))
        if self._network is not None and self._thread is not None:
            self._network.wake()
            self._thread.join(self.timeout)
        if self._network is not None:
            self._transport.close()

    def __enter__(self) -> ParameterManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.barrier()
        else:
            self._transport.sites.announce(f"{type(error).__name__}: {error}")
        self.close()
