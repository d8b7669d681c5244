"""The background thread of a parameter manager: answers other sites, runs the rounds, and finds sites that are lost."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..errors import SiteError
from ..exchange.transport import Transport
from .engine import Engine
from .interfaces import Completion
from .messages import Kind, Message, ProtocolError
from .network import Network, Ready
from .timing import SyncTiming

_IDLE = 0.05  # seconds between looks at nothing
_HURRY = 2e-4  # seconds between rounds while somebody waits for them
_LATE = 0.01  # seconds that the background thread may be late before a worker waits for it, and waits at most
_LEAD = 5e-3  # seconds for which a worker that waits receives by itself
_FAREWELL = 0.3  # seconds that a site's last message may take longer than the end of its connection
_SYNCS = (Kind.SYNC, Kind.SYNCED)


class Background:
    """The background thread, and how workers wait for it.

    Args:
        transport: connects the sites at set-up.
        engine: the state of this site.
        network: the connections.
        timeout: seconds that any wait may take.
        interval: least time between two rounds of synchronisation, in seconds.
    """

    def __init__(self, transport: Transport, engine: Engine, network: Network, timeout: float, interval: float) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size
        self._transport, self._engine, self._network = transport, engine, network
        self._timeout, self._interval = timeout, interval
        self._sync_timing = SyncTiming(interval)
        self._failure: BaseException | None = None
        self._culprit: int | None = None  # the site at fault, where it is known
        self._failure_lock = threading.Lock()
        self._progress = threading.Condition()
        self._in_a_hurry = 0
        self._due = math.inf  # when the thread wants to look at its tasks again
        self._turn = threading.Event()
        self._barriers = 0
        self._arrived: dict[int, set[int]] = {}
        self._left: set[int] = set()
        self._missing: dict[int, float] = {}
        self._closed = False
        self._receiving = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="dadplug-adapm", daemon=True)
        self._thread.start()

    def send(self, peer: int, message: Message) -> None:
        """Send a message, unless nobody is there any more."""
        if peer not in self._left and self._failure is None:
            self._network.send(peer, message)

    def wake(self) -> None:
        """Have the thread look at its tasks at once."""
        self._network.wake()

    def give_way(self) -> None:
        """Wait for the thread if it is late.

        A worker that lets the GIL go for many short times takes it back before the other thread has woken up.
        """
        if time.monotonic() > self._due + _LATE:
            self._turn.clear()
            self._turn.wait(_LATE)

    def flush(self) -> None:
        """Wait until all that this site has pushed is with its owners, and its replicas are as fresh as now.

        Raises:
            SiteError: if a site ends or does not answer.
        """
        flush = self._engine.begin_flush()
        with self._hurry():
            self._network.wake()
            self._until(lambda: self._engine.flushed(flush), lambda: None)

    @contextmanager
    def _hurry(self) -> Iterator[None]:
        with self._progress:
            self._in_a_hurry += 1
        try:
            yield
        finally:
            with self._progress:
                self._in_a_hurry -= 1

    def barrier(self) -> None:
        """Wait until all sites have called it.

        Raises:
            SiteError: if a site ends or does not answer.
        """
        self._barriers += 1
        number = self._barriers
        others = set(range(self.world_size)) - {self.rank}
        for peer in others:
            self.send(peer, Message(Kind.BARRIER, 0, self.rank, number))
        self._until(
            lambda: self._arrived.get(number, set()) == others, lambda: min(others - self._arrived.get(number, set()))
        )
        del self._arrived[number]

    def _until(self, condition: Callable[[], bool], culprit: Callable[[], int | None]) -> None:
        """Wait for a condition; `culprit` says whom it waited for, where that is known, when the time is over."""
        deadline = time.monotonic() + self._timeout
        while not condition():
            self.check()
            with self._progress:
                self._progress.wait(0.01)
            if time.monotonic() > deadline:
                self._time_out(culprit())

    def wait_for(self, done: Completion) -> None:
        """Wait for an answer from other sites.

        Raises:
            SiteError: if a site ends or does not answer.
        """
        if not self._receive_until(done) and not done.wait(self._timeout):
            self._time_out(None)
        self.check()

    def _receive_until(self, done: Completion) -> bool:
        """Receive in this thread until an answer has come, for a short time; return whether it has.

        An answer that comes soon reaches its worker without waking up the background thread first.
        """
        if done.is_set() or not self._network.lendable or not self._receiving.acquire(blocking=False):
            return done.is_set()
        try:
            if self._failure is None:  # else the network may be closed
                self._network.lend(True)
                try:
                    self._receive_here(done)
                finally:
                    self._network.lend(False)
        finally:
            self._receiving.release()
        return done.is_set()

    def _receive_here(self, done: Completion) -> None:
        deadline = time.monotonic() + _LEAD
        while not done.is_set() and (left := deadline - time.monotonic()) > 0:
            ready = self._network.poll(left)  # a signal's handler may raise here, and nothing is lost
            try:
                self._take_all(ready)
            except BaseException as error:
                self.fail(error)
                if not isinstance(error, Exception):
                    raise

    def _time_out(self, culprit: int | None) -> None:
        silent = self._network.silent
        self.fail(TimeoutError("timed out"), culprit if silent is None else silent)

    def check(self) -> None:
        """Raise what has gone wrong in the background, if anything has.

        Raises:
            SiteError: if a site is gone.
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
        """End all waits; what is called from now on raises."""
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
            self.fail(error)
        finally:
            with self._receiving:
                self._network.close()

    def _receive(self, pause: float) -> None:
        self._network.wait(pause)
        self._due = math.inf  # it has woken up
        if self._receiving.acquire(blocking=False):  # else a worker receives
            try:
                self._take_all(self._network.poll(0))
            finally:
                self._receiving.release()

    def _take_all(self, ready: Ready) -> None:
        messages, lost = self._network.read(ready)
        for sender, message in messages:
            try:
                self._take(sender, message)
            except ProtocolError as error:
                self.fail(error, sender)
        lost |= self._network.show_life()
        if lost or self._left or self._missing:
            self._miss(lost)

    def _take(self, sender: int, message: Message) -> None:
        kind = message.kind
        if kind is Kind.BARRIER:
            with self._progress:
                self._arrived.setdefault(message.request, set()).add(sender)
                self._progress.notify_all()
        elif kind is Kind.BYE:
            self._left.add(sender)
        elif kind in _SYNCS:
            with self._sync_timing.counted():
                self._engine.receive(sender, message)
        elif kind is not Kind.ALIVE:
            self._engine.receive(sender, message)

    def _miss(self, lost: dict[int, Exception]) -> None:
        """Find out which sites are gone for good, and which have left in peace."""
        for peer, reason in lost.items():
            if isinstance(reason, (TimeoutError, ProtocolError)):
                self.fail(reason, peer)
            elif peer not in self._left:
                self._missing.setdefault(peer, time.monotonic() + _FAREWELL)
        waits = self._engine.waits or self._in_a_hurry
        for peer in self._left:  # in peace, which matters only to a worker that waits for an answer
            if waits:
                self._missing.setdefault(peer, time.monotonic() + _FAREWELL)
            else:
                self._missing.pop(peer, None)
        for peer, deadline in self._missing.items():
            if time.monotonic() > deadline:
                self.fail(ConnectionError("the connection was lost"), peer)

    def close(self) -> None:
        """Leave the other sites, and end the thread."""
        if self._failure is None:
            for peer in range(self.world_size):
                if peer != self.rank and peer not in self._left:
                    with suppress(OSError):
                        self.send(peer, Message(Kind.BYE, 0, self.rank))
        self._closed = True
        self.fail(RuntimeError("it has been closed"))
        self._network.wake()
        self._thread.join(self._timeout)
