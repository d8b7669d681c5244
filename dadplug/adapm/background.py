"""Background thread of a parameter manager: replies to other sites, runs rounds, and detects lost sites."""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..errors import ProtocolError, SiteError
from ..exchange.transport import Transport
from .engine import Engine
from .interfaces import Completion
from .messages import Kind, Message
from .network import Network, Ready
from .timing import SyncTiming

_IDLE = 0.05  # seconds between checks when there is nothing to do
_URGENT = 2e-4  # seconds between rounds while a worker waits for them
_LATE = 0.01  # seconds of delay of the background thread from which a worker waits for it, and maximum of this wait
_RECEIVE = 5e-3  # seconds for which a waiting worker receives messages itself
_SPIN = 2e-4  # seconds of these without sleeping: waking up takes longer than the reply of a site on this machine
_GRACE = 0.3  # seconds that the last message of a site may arrive after the end of its connection
_AT_EXIT = 1.0  # seconds for which the end of the program waits for the thread
_yield = getattr(os, "sched_yield", lambda: None)  # the core may be wanted by the site that is to reply
_SYNCS = (Kind.SYNC, Kind.SYNCED)

_running: weakref.WeakSet[Background] = weakref.WeakSet()


class Background:
    """Background thread, and the waits of workers for other sites.

    Args:
        transport: transport of the process group, which names lost sites.
        engine: engine of this site.
        network: connections to the other sites.
        timeout: maximum duration of a wait, in seconds.
        interval: minimum time between two synchronisation rounds, in seconds.
    """

    def __init__(self, transport: Transport, engine: Engine, network: Network, timeout: float, interval: float) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size
        self._transport, self._engine, self._network = transport, engine, network
        self._timeout, self._interval = timeout, interval
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
        self._thread = threading.Thread(target=self._run, name="dadplug-adapm", daemon=True)
        self._thread.start()
        _running.add(self)

    def send(self, peer: int, message: Message) -> None:
        """Send a message, unless the site has left or the manager has failed."""
        if peer not in self._left and self._failure is None:
            self._network.send(peer, message)

    def wake(self) -> None:
        """Wake the thread up."""
        self._network.wake()

    def give_way(self) -> None:
        """Wait for the thread if it is late.

        A worker that releases the GIL often and briefly takes it back before the other thread has woken up.
        """
        if time.monotonic() > self._due + _LATE:
            self._awake.clear()
            self._awake.wait(_LATE)

    def flush(self) -> None:
        """Wait until all pushes of this site have reached the owners, and its replicas have been refreshed.

        Raises:
            SiteError: if a site exits or does not answer.
        """
        flush = self._engine.begin_flush()
        with self._urgently():
            self._network.wake()
            self._until(lambda: self._engine.flushed(flush), lambda: None)

    @contextmanager
    def _urgently(self) -> Iterator[None]:
        """Return a context in which rounds follow one another without pauses."""
        with self._progress:
            self._urgent += 1
        try:
            yield
        finally:
            with self._progress:
                self._urgent -= 1

    def barrier(self) -> None:
        """Wait until all sites have called it.

        Raises:
            SiteError: if a site exits or does not answer.
        """
        self._barriers += 1
        number = self._barriers
        others = set(range(self.world_size)) - {self.rank}
        for peer in others:
            self.send(peer, Message(Kind.BARRIER, 0, self.rank, number))
        self._awaited[number] = others
        try:
            self._until(lambda: self._at(number) == others, lambda: min(others - self._at(number)))
        finally:
            del self._awaited[number]
        del self._arrived[number]

    def _at(self, number: int) -> set[int]:
        """Return the sites that have arrived at a barrier."""
        return self._arrived.get(number, set())

    def _until(self, condition: Callable[[], bool], culprit: Callable[[], int | None]) -> None:
        """Wait for a condition.

        Args:
            condition: the condition.
            culprit: function called after a timeout; returns the site that has not responded, None if unknown.

        Raises:
            SiteError: if a site exits or does not answer.
        """
        deadline = time.monotonic() + self._timeout
        while not condition():
            self.check()
            with self._progress:
                self._progress.wait(0.01)
            if time.monotonic() > deadline:
                self._time_out(culprit())

    def wait_for(self, done: Completion) -> None:
        """Wait until a call is complete.

        Raises:
            SiteError: if a site exits or does not answer.
        """
        if not self._receive_until(done) and not done.wait(self._timeout):
            self._time_out(None)
        self.check()

    def _receive_until(self, done: Completion) -> bool:
        """Receive messages in this thread for a short time; return whether the call is complete.

        So a reply that arrives soon reaches its worker without a switch to the background thread.
        """
        if done.is_set() or not self._network.lendable or not self._receiving.acquire(blocking=False):
            return done.is_set()
        try:
            if self._failure is None:  # otherwise the network may be closed
                self._network.lend(True)
                try:
                    self._receive_here(done)
                finally:
                    self._network.lend(False)
        finally:
            self._receiving.release()
        return done.is_set()

    def _receive_here(self, done: Completion) -> None:
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
                self.fail(error)
                if not isinstance(error, Exception):
                    raise

    def _time_out(self, culprit: int | None) -> None:
        silent = self._network.silent
        self.fail(TimeoutError("timed out"), culprit if silent is None else silent)

    def check(self) -> None:
        """Raise the error that has ended the manager, if there is one.

        Raises:
            SiteError: if a site is lost.
            RuntimeError: if the manager has been closed.
        """
        if self._failure is None:
            return
        with self._failure_lock:
            sites, failure, culprit = self._transport.sites, self._failure, self._culprit
            if isinstance(failure, ProtocolError) and culprit is not None:
                self._failure = SiteError(f"{sites[culprit]} has sent what no site sends: {failure}")
            elif isinstance(failure, (OSError, TimeoutError)):
                self._failure = sites.lost(failure, self._timeout, culprit)
        if isinstance(self._failure, SiteError):
            raise SiteError(*self._failure.args)
        raise RuntimeError(f"the parameter manager cannot go on: {self._failure!r}") from self._failure

    def fail(self, failure: BaseException, culprit: int | None = None) -> None:
        """End all waits; later calls raise.

        Args:
            failure: the error.
            culprit: the site at fault; None if unknown.
        """
        self._due = math.inf
        with self._progress:
            if self._failure is None:
                self._failure, self._culprit = failure, culprit
        self._engine.release()
        with self._progress:
            self._progress.notify_all()

    def _run(self) -> None:
        try:
            engine, timing = self._engine, self._sync_timing
            next_check, syncing = 0.0, False
            while not self._closed:
                now, pause = time.monotonic(), _IDLE
                if engine.intends:
                    pause = min(pause, next_check - now)
                if engine.replicas and not syncing:
                    pause = min(pause, timing.next - now)
                if self._urgent:
                    pause = min(pause, _URGENT)
                self._due = now + max(pause, 0.0)
                self._receive(pause)
                now = time.monotonic()
                if now >= next_check or self._urgent:
                    engine.act()
                    next_check = time.monotonic() + self._interval
                if syncing and engine.sync_over:
                    timing.end_round()
                    syncing = False
                if not syncing and (self._urgent or (engine.replicas and now >= timing.next)):
                    with timing.counted():
                        engine.synchronise()
                    syncing = True
                if self._urgent:
                    with self._progress:
                        self._progress.notify_all()
                if not self._awake.is_set():
                    self._awake.set()
        except BaseException as error:
            self.fail(error)
        finally:
            with self._receiving:
                self._network.close()

    def _receive(self, pause: float) -> None:
        self._network.wait(pause)
        self._due = math.inf  # the thread is awake
        if self._receiving.acquire(blocking=False):  # otherwise a worker receives
            try:
                self._handle_all(self._network.poll(0))
            finally:
                self._receiving.release()

    def _handle_all(self, ready: Ready) -> None:
        messages, lost = self._network.read(ready)
        for sender, message in messages:
            try:
                self._handle(sender, message)
            except ProtocolError as error:
                self.fail(error, sender)
        lost |= self._network.send_heartbeats()
        if lost or self._left or self._missing:
            self._check_lost(lost)

    def _handle(self, sender: int, message: Message) -> None:
        kind = message.kind
        if kind is Kind.BARRIER:
            with self._progress:
                self._arrived.setdefault(message.request, set()).add(sender)
                self._progress.notify_all()
        elif kind is Kind.BYE:
            self._left.add(sender)
            if message.extra:
                self._aborted.add(sender)
        elif kind in _SYNCS:
            with self._sync_timing.counted():
                self._engine.receive(sender, message)
        elif kind is not Kind.ALIVE:
            self._engine.receive(sender, message)

    def _check_lost(self, lost: dict[int, Exception]) -> None:
        """Fail for sites that are lost.

        Sites that have left (BYE) count as lost only if a worker waits, at a barrier only if it waits for them.
        """
        for peer, reason in lost.items():
            if isinstance(reason, (TimeoutError, ProtocolError)):
                self.fail(reason, peer)
            elif peer not in self._left:
                self._missing.setdefault(peer, time.monotonic() + _GRACE)
        waits = self._engine.waits or self._urgent
        # A worker may end its barrier meanwhile, so copies are read.
        absent = {peer for number, others in tuple(self._awaited.items()) for peer in others - self._at(number)}
        for peer in self._left:
            if waits or peer in absent:
                self._missing.setdefault(peer, time.monotonic() + _GRACE)
            else:
                self._missing.pop(peer, None)
        for peer, deadline in self._missing.items():
            if time.monotonic() > deadline:
                self.fail(self._loss(peer), peer)

    def _loss(self, peer: int) -> Exception:
        if peer not in self._left or peer in self._aborted:
            return ConnectionError("the connection was lost")  # `Sites` knows why
        return SiteError(
            f"{self._transport.sites[peer]} is gone: it has closed its parameter manager, while this site waits for "
            "it. All sites must make the same calls of barrier() and wait_sync(everywhere=True)."
        )

    def close(self, *, aborts: bool = False) -> None:
        """Leave the other sites, and end the thread.

        Args:
            aborts: whether this site leaves after an error, which it has announced.
        """
        if self._failure is None:
            for peer in range(self.world_size):
                if peer != self.rank and peer not in self._left:
                    with suppress(OSError):
                        self.send(peer, Message(Kind.BYE, 0, self.rank, extra=int(aborts)))
        self._closed = True
        self.fail(RuntimeError("it has been closed"))
        self._network.wake()
        self._thread.join(self._timeout)

    def end_thread(self) -> None:
        """End the thread at the end of the program, which has not called `close`; other sites are told nothing."""
        self._closed = True
        self._network.wake()
        self._thread.join(_AT_EXIT)


@atexit.register
def _end_at_exit() -> None:
    """End the threads: one that works on the tables' memory while the interpreter frees it ends in a crash."""
    for background in list(_running):
        background.end_thread()
