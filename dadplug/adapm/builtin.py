"""The built-in backend: an engine of numba kernels, connections to the other sites, and a background thread.

The background thread replies to other sites, runs rounds, and detects lost sites. The thread that has a message writes
it to the socket. Only data that the kernel has no room for is left to the background thread, since a switch between
threads takes longer than sending a small message. For the same reason a worker that waits for a reply receives messages
itself, see `dadplug.exchange.network`.
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch.distributed as dist

from ..errors import ProtocolError, SiteError
from ..exchange.network import LENDABLE, MessageStream, Network, Ready, connect_pairs
from .backends import Backend, Done, TableSpec
from .engine import TECHNIQUES, Engine
from .messages import HEAD_SIZE, Head, Message, MessageKind
from .store import Keys, Store

_ALIVE = Message(MessageKind.ALIVE).encode()


def open_network(
    sockets: Mapping[int, socket.socket], timeout: float, widths: Sequence[int]
) -> Network[MessageStream[Head]]:
    """Return the connections from this site to all others.

    Args:
        sockets: connected sockets by rank, of `network.connect_pairs`.
        timeout: seconds without a heartbeat after which a connection counts as lost.
        widths: width of each table; the caller appends to it when tables are added.
    """
    sites = len(sockets) + 1

    def head(buffer: Any, offset: int) -> Head:
        return Head(buffer, offset, widths, sites)

    def room(nbytes: int) -> Any:
        return np.empty(nbytes, np.uint8)

    streams = [MessageStream(peer, connected, HEAD_SIZE, head, room) for peer, connected in sorted(sockets.items())]
    return Network(streams, timeout, lambda: _ALIVE)


# The backend

_MOST_SITES = 62  # sites with replicas are the bits of an int64
_IDLE = 0.05  # seconds between checks when there is nothing to do
_URGENT = 2e-4  # seconds between rounds while a worker waits for them
_LATE = 0.01  # seconds of delay of the background thread from which a worker waits for it, and maximum of this wait
_RECEIVE = 5e-3  # seconds for which a waiting worker receives messages itself
_SPIN = 2e-4  # seconds of these without sleeping: waking up takes longer than the reply of a site on this machine
_GRACE = 0.3  # seconds that the last message of a site may arrive after the end of its connection
_AT_EXIT = 1.0  # seconds for which the end of the program waits for the thread
_SHARE = 5  # a synchronisation is followed by a pause of this many times the processor time that it took
_LONGEST = 0.1  # seconds that the pause takes at most
_yield = getattr(os, "sched_yield", lambda: None)  # the core may be wanted by the site that is to reply
_SYNCS = (MessageKind.SYNC, MessageKind.SYNCED)

_running: weakref.WeakSet[BuiltinBackend] = weakref.WeakSet()


class SyncTiming:
    """Schedule of synchronisation rounds that take at most a sixth of a core.

    Args:
        interval: minimum time between two rounds, in seconds.

    Attributes:
        next: time of the next round, on the clock of `time.monotonic`.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._spent = 0.0
        self.next = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Return a context that counts its processor time as spent on synchronisation."""
        start = time.thread_time()
        yield
        self._spent += time.thread_time() - start

    def end_round(self) -> None:
        """Schedule the next round; called when a round is complete."""
        self.next = time.monotonic() + max(self._interval, min(_SHARE * self._spent, _LONGEST))
        self._spent = 0.0


def _serve(
    reference: Callable[[], BuiltinBackend | None],
    network: Network[MessageStream[Head]],
    receiving: threading.Lock,
    rank: int,
) -> None:
    """Run the background thread of a backend, until it is closed or nothing refers to it any more."""
    pause: float | None = 0.0
    while pause is not None:
        network.wait(pause)
        backend = reference()
        pause = None if backend is None else backend._turn()
        dropped = backend is None
        del backend
    with receiving:
        for peer in network.streams if dropped else ():
            with suppress(OSError):
                network.send(peer, Message(MessageKind.BYE, 0, rank).encode())
        network.close()


class BuiltinBackend(Backend):
    """The built-in backend. Arguments and errors are those of `Backend`.

    A single site has neither connections nor a thread.
    """

    techniques = tuple(TECHNIQUES)
    engine: Engine
    _network: Network[MessageStream[Head]]

    def __init__(
        self, technique: str, process_group: dist.ProcessGroup | None, timeout: float, interval: float
    ) -> None:
        super().__init__(technique, process_group, timeout, interval)
        if self.world_size > _MOST_SITES:
            raise ValueError(f"at most {_MOST_SITES} sites can share parameters, there are {self.world_size}")
        self.check_equal("options", (technique, timeout, interval))
        self.engine = Engine(self.rank, self.world_size, technique, self._send)
        self._others = set(range(self.world_size)) - {self.rank}
        self._widths: list[int] = []
        self._sync_timing = SyncTiming(interval)
        self._failure: BaseException | None = None
        self._culprit: int | None = None  # the site at fault, if known
        self._failure_lock = threading.Lock()
        self._progress = threading.Condition()
        self._urgent = 0
        self._due = math.inf  # time of the next check of the thread
        self._awake = threading.Event()
        self._barriers = 0
        self._arrived: dict[int, set[int]] = {}
        self._awaited: dict[int, set[int]] = {}  # sites that this one waits for, by number of the barrier
        self._left: set[int] = set()
        self._aborted: set[int] = set()  # those of the sites that have left which have told why to `Sites`
        self._missing: dict[int, float] = {}
        self._closed = False
        self._receiving = threading.Lock()
        self._next_check, self._syncing = 0.0, False
        if self._others:
            self._network = open_network(connect_pairs(self.transport, timeout), timeout, self._widths)
            self.transport.gather_objects(None)  # all sites are connected
            self.transport.sites.watch(self)
            arguments = weakref.ref(self), self._network, self._receiving, self.rank
            self._thread = threading.Thread(target=_serve, args=arguments, name="dadplug-adapm", daemon=True)
            self._thread.start()
            _running.add(self)

    def add_table(self, spec: TableSpec) -> None:
        capacity = spec.capacity
        if capacity is None:
            capacity = 1024 if spec.rows is None else -(-spec.rows // self.world_size)
        self.engine.add_store(Store(spec.width, spec.rows, spec.initialiser, capacity, spec.max_rows))
        self._widths.append(spec.width)

    def advance_clock(self) -> int:
        self.check()
        self.engine.clock += 1
        # A worker that releases the GIL often and briefly takes it back before a late thread has woken up.
        if time.monotonic() > self._due + _LATE:
            self._awake.clear()
            self._awake.wait(_LATE)
        return self.engine.clock

    @property
    def counts(self) -> dict[str, int]:
        stores = self.engine.stores
        here = {"rows": sum(map(len, stores)), "replicas": self.engine.replicas}
        return self.engine.counts | here | {"evicted": sum(store.evicted for store in stores)}

    def intend(self, table: int, keys: Keys, start: int, end: int) -> None:
        if self.engine.intend(table, keys, start, end):
            self._network.wake()

    # Waits of workers

    def flush(self) -> None:
        self.check()
        if not self._others:
            return
        flush = self.engine.begin_flush()
        with self._progress:
            self._urgent += 1  # rounds follow one another without pauses
        try:
            self._network.wake()
            self._until(lambda: self.engine.flushed(flush), lambda: None)
        finally:
            with self._progress:
                self._urgent -= 1

    def barrier(self) -> None:
        self.check()
        self._barriers += 1
        number = self._barriers
        for peer in self._others:
            self._send(peer, Message(MessageKind.BARRIER, 0, self.rank, number))
        self._awaited[number] = self._others
        try:
            self._until(lambda: not self._absent(number), lambda: min(self._absent(number)))
        finally:
            del self._awaited[number]
        self._arrived.pop(number, None)

    def _absent(self, number: int) -> set[int]:
        """Return the sites that have not arrived at a barrier."""
        return self._others - self._arrived.get(number, set())

    def _until(self, condition: Callable[[], bool], culprit: Callable[[], int | None]) -> None:
        """Wait for a condition.

        Args:
            condition: the condition.
            culprit: function called after a timeout; returns the site that has not responded, None if unknown.

        Raises:
            SiteError: if a site exits or does not answer.
        """
        deadline = time.monotonic() + self.timeout
        while not condition():
            self.check()
            with self.traffic.waiting(), self._progress:
                self._progress.wait(0.01)
            if time.monotonic() > deadline:
                self._time_out(culprit())

    def wait_for(self, done: Done) -> None:
        self._receive_until(done)
        with self.traffic.waiting():
            in_time = done.wait(self.timeout)
        if not in_time:
            self._time_out(None)
        self.check()

    def _receive_until(self, done: Done) -> None:
        """Receive messages in this thread for a short time, until a call is complete.

        So a reply that arrives soon reaches its worker without a switch to the background thread.
        """
        if done.is_set() or not LENDABLE or not self._receiving.acquire(blocking=False):
            return
        try:
            if self._failure is None:  # otherwise the network may be closed
                self._network.lend(True)
                try:
                    self._receive_here(done)
                finally:
                    self._network.lend(False)
        finally:
            self._receiving.release()

    def _receive_here(self, done: Done) -> None:
        start = time.monotonic()
        while not done.is_set() and (waited := time.monotonic() - start) < _RECEIVE:
            spins = waited < _SPIN
            # signal handlers may raise here without loss of messages
            ready = self._network.poll(0.0 if spins else _RECEIVE - waited)
            if spins and not ready:
                _yield()
                continue
            try:
                self._handle_all(ready)
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    raise

    # Errors

    def _time_out(self, culprit: int | None) -> None:
        silent = self._network.silent
        self._fail(TimeoutError("timed out"), culprit if silent is None else silent)

    def check(self) -> None:
        if self._failure is None:
            return
        with self._failure_lock:
            sites, failure, culprit = self.transport.sites, self._failure, self._culprit
            if isinstance(failure, ProtocolError) and culprit is not None:
                self._failure = SiteError(f"{sites[culprit]} sent an invalid message: {failure}")
            elif isinstance(failure, (OSError, TimeoutError)):
                self._failure = sites.lost(failure, self.timeout, culprit)
        if isinstance(self._failure, SiteError):
            raise SiteError(*self._failure.args)
        raise RuntimeError(f"the parameter manager cannot go on: {self._failure!r}") from self._failure

    def _fail(self, failure: BaseException, culprit: int | None = None) -> None:
        """End all waits; later calls raise.

        Args:
            failure: the error.
            culprit: the site at fault; None if unknown.
        """
        self._due = math.inf
        with self._progress:
            if self._failure is None:
                self._failure, self._culprit = failure, culprit
        self.engine.release()
        with self._progress:
            self._progress.notify_all()

    # The background thread, and workers that receive messages

    def _turn(self) -> float | None:
        """Do what the thread has to do; return the seconds until it has to again, None at the end."""
        self._due = math.inf  # the thread is awake
        try:
            if self._receiving.acquire(blocking=False):  # otherwise a worker receives
                try:
                    self._handle_all(self._network.poll(0))
                finally:
                    self._receiving.release()
            self._advance()
        except BaseException as error:
            self._fail(error)
            return None
        if not self._awake.is_set():
            self._awake.set()
        now, pause = time.monotonic(), _IDLE
        if self.engine.intents:
            pause = min(pause, self._next_check - now)
        if self.engine.replicas and not self._syncing:
            pause = min(pause, self._sync_timing.next - now)
        if self._urgent:
            pause = min(pause, _URGENT)
        self._due = now + max(pause, 0.0)
        return None if self._closed else pause

    def _advance(self) -> None:
        """Act on intents and synchronise, where that is due."""
        engine, timing, now = self.engine, self._sync_timing, time.monotonic()
        if now >= self._next_check or self._urgent:
            engine.act()
            self._next_check = time.monotonic() + self.interval
        if self._syncing and engine.sync_over:
            timing.end_round()
            self._syncing = False
        if not self._syncing and (self._urgent or (engine.replicas and now >= timing.next)):
            with timing.counted():
                engine.synchronise()
            self._syncing = True
        if self._urgent:
            with self._progress:
                self._progress.notify_all()

    def _send(self, peer: int, message: Message) -> None:
        """Send a message, unless the site has left or the manager has failed."""
        if peer not in self._left and self._failure is None:
            self.traffic.add(self._network.send(peer, message.encode()))

    def _handle_all(self, ready: Ready) -> None:
        messages, lost = self._network.read(ready)
        for sender, message in messages:
            try:
                self._handle(sender, message)
            except (ProtocolError, LookupError, ValueError) as error:  # what the checks have not found
                self._fail(ProtocolError(str(error)), sender)
        lost |= self._network.send_heartbeats()
        if lost or self._left or self._missing:
            self._check_lost(lost)

    def _handle(self, sender: int, message: Message) -> None:
        kind = message.kind
        if kind is MessageKind.BARRIER:
            with self._progress:
                self._arrived.setdefault(message.request, set()).add(sender)
                self._progress.notify_all()
        elif kind is MessageKind.BYE:
            self._left.add(sender)
            if message.extra:
                self._aborted.add(sender)
        elif kind in _SYNCS:
            with self._sync_timing.counted():
                self.engine.receive(sender, message)
        elif kind is not MessageKind.ALIVE:
            self.engine.receive(sender, message)

    def _check_lost(self, lost: dict[int, Exception]) -> None:
        """Fail for sites that are lost.

        Sites that have left (BYE) count as lost only if a worker waits, at a barrier only if it waits for them.
        """
        for peer, reason in lost.items():
            if isinstance(reason, (TimeoutError, ProtocolError)):
                self._fail(reason, peer)
            elif peer not in self._left:
                self._missing.setdefault(peer, time.monotonic() + _GRACE)
        waits = self.engine.requests or self._urgent
        # A worker may end its barrier meanwhile, so a copy is read.
        absent = {peer for number in tuple(self._awaited) for peer in self._absent(number)}
        for peer in self._left:
            if waits or peer in absent:
                self._missing.setdefault(peer, time.monotonic() + _GRACE)
            else:
                self._missing.pop(peer, None)
        for peer, deadline in self._missing.items():
            if time.monotonic() > deadline:
                self._fail(self._loss(peer), peer)

    def _loss(self, peer: int) -> Exception:
        if peer not in self._left or peer in self._aborted:
            return ConnectionError("the connection was lost")  # `Sites` knows why
        return SiteError(
            f"{self.transport.sites[peer]} is gone: it has closed its parameter manager, while this site waits for "
            "it. All sites must make the same calls of barrier() and wait_sync(everywhere=True)."
        )

    # The end

    def leave(self) -> None:
        self._close(aborts=False)

    def close(self) -> None:
        self._close(aborts=True)  # at the end of the program, which `Sites` has announced

    def abandon(self, reason: str) -> None:
        self.transport.sites.announce(reason)
        self._close(aborts=True)

    def _close(self, *, aborts: bool) -> None:
        """Leave the other sites, and end the thread.

        Args:
            aborts: whether this site leaves after an error, which it has announced.
        """
        if self._closed:
            return
        for peer in self._others - self._left:
            with suppress(OSError):
                self._send(peer, Message(MessageKind.BYE, 0, self.rank, extra=int(aborts)))
        self._closed = True
        self._fail(RuntimeError("it has been closed"))
        if self._others:
            self._end_thread(self.timeout)
            self.transport.close()

    def _end_thread(self, timeout: float) -> None:
        self._closed = True
        self._network.wake()
        self._thread.join(timeout)


@atexit.register
def _end_at_exit() -> None:
    """End the threads without a word to other sites, for programs that have not called `close`.

    A thread that works on the tables' memory while the interpreter frees it ends in a crash.
    """
    for backend in list(_running):
        backend._end_thread(_AT_EXIT)
