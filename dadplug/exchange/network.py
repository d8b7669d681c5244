"""Connections on which any message may come next: the head of each says what it is, and how long.

The parameter manager and the parameter server use them. A thread that has a message writes it to the socket; only what
the kernel has no room for is left to the thread that waits.

There are two pollers: one has all connections; the other has the first poller and a wake-up pipe, and the thread of the
connections waits for it. Another thread that waits for a reply may remove the first poller from the second and receive
messages itself, so that messages wake up no other thread.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from ..errors import DadplugError
from ..support.logs import get_logger
from .framing import Outgoing, WakePipe
from .handshake import close_in_children, connect_sites
from .transport import Streams, Transport

LENDABLE = hasattr(select, "epoll")  # its descriptor can be polled

_CHUNK_BYTES = 1 << 16  # read at a time, from which small messages are extracted
_BATCH = 64  # messages read from a connection before the next one
_HEARTBEATS = 4  # within the time after which a silent process counts as lost
_CLOSE_SECONDS = 1.0  # to send the last messages

Ready = list[tuple[int, int]]  # descriptors of sockets and their events

_log = get_logger(__name__)


def connect_pairs(transport: Transport, timeout: float) -> Mapping[int, socket.socket]:
    """Connect each pair of sites, over a transport's network or by addresses; all sites must call it together.

    Nothing may be sent before all sites have exchanged something else afterwards.

    Args:
        transport: the transport.
        timeout: seconds that it may take.

    Returns:
        Connected sockets by rank.

    Raises:
        SiteError: if a site does not connect.
    """
    if isinstance(transport, Streams):
        return transport.open_streams(timeout)
    return connect_sites(transport.rank, transport.gather_objects, timeout, transport.sites.__getitem__)


class MessageHead(Protocol):
    """Head of a message that arrives, with its fields checked.

    Attributes:
        nbytes: bytes of the body that follows.
    """

    nbytes: int

    def message(self, body: Any) -> Any:
        """Return the message with a body of `nbytes` bytes."""


Head = TypeVar("Head", bound=MessageHead)


class MessageStream(Generic[Head]):
    """Messages in both directions over one socket, each of which consists of a head of fixed size and a body.

    Any thread may use `outgoing`; the methods are called from one at a time. Several small messages are read by one
    system call, a large body without a copy. Memory for a body is allocated once its head has been checked.

    Args:
        peer: number of the process at the other end.
        connected: the socket.
        head_size: bytes of a head.
        head: function that parses and checks the head at an offset of a buffer.
        room: allocates memory for a body.

    Attributes:
        outgoing: messages on their way to the other end.
        heard: time of the last received bytes, on the clock of `time.monotonic`.
        partial: head and body of a message of which a part has arrived; None if there is none.
        missing: part of that body that has not arrived.
    """

    def __init__(
        self,
        peer: int,
        connected: socket.socket,
        head_size: int,
        head: Callable[[Any, int], Head],
        room: Callable[[int], Any] = bytearray,
    ) -> None:
        connected.setblocking(False)
        if connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.socket = connected
        self.outgoing = Outgoing(connected)
        self.heard = time.monotonic()
        self.partial: tuple[Head, Any] | None = None
        self.missing = memoryview(b"")
        self._head_size, self._head, self._room = head_size, head, room
        self._buffer = bytearray(_CHUNK_BYTES)
        self._view = memoryview(self._buffer)
        self._filled = 0

    def read(self, messages: list[tuple[int, Any]]) -> None:
        """Read the messages that have arrived.

        Args:
            messages: list to append to, pairs of the other process and a message.

        Raises:
            ConnectionError: if the connection is closed.
            DadplugError: if a head is not valid.
        """
        last = len(messages) + _BATCH
        while len(messages) < last:
            if self.partial is not None:
                target = self.missing
            else:
                target = self._view[self._filled :] if self._filled else self._view
            try:
                count = self.socket.recv_into(target)
            except BlockingIOError:
                return
            if not count:
                raise ConnectionError("the connection was closed")
            self.heard = time.monotonic()
            if self.partial is None:
                self._filled += count
                self._extract(messages)
            else:
                self.missing = self.missing[count:]
                if not self.missing.nbytes:
                    head, body = self.partial
                    self.partial = None
                    messages.append((self.peer, head.message(body)))
            if count < target.nbytes:
                return

    def _extract(self, messages: list[tuple[int, Any]]) -> None:
        """Extract messages from the buffer; the last one may be incomplete."""
        start = 0
        while self._filled - start >= self._head_size:
            head = self._head(self._buffer, start)
            start += self._head_size
            end = start + head.nbytes
            if end > self._filled:
                body = self._room(head.nbytes)
                here = self._filled - start
                view = memoryview(body)
                view[:here] = self._view[start : self._filled]
                self.partial, self.missing = (head, body), view[here:]
                start = self._filled
                break
            messages.append((self.peer, head.message(self._buffer[start:end])))
            start = end
        if start < self._filled:
            self._buffer[: self._filled - start] = self._buffer[start : self._filled]
        self._filled -= start

    @property
    def is_away(self) -> bool:
        """Whether the socket is a stream over a hub that cannot be reached at present, and is waited for."""
        return bool(getattr(self.socket, "is_away", False))

    def close(self) -> None:
        """Close the connection; the kernel still delivers data that it has."""
        self.outgoing.clear()
        self.socket.close()


def _make_poller() -> Any:
    return select.epoll() if LENDABLE else select.poll()  # both have the same numbers of events


def _poll(poller: Any, timeout: float) -> Ready:
    ready: Ready = poller.poll(timeout if LENDABLE else math.ceil(1000 * timeout))
    return ready


Stream = TypeVar("Stream", bound=MessageStream[Any])


class Network(Generic[Stream]):
    """Connections from this process to others.

    `send` and `wake` may be called from any thread, `wait`, `add` and `drop` from one thread only. `poll`, `read` and
    `send_heartbeats` may be called from any thread, but not concurrently.

    Args:
        streams: the connections.
        silence: seconds of silence after which a connection counts as lost.
        heartbeat: returns the buffers of a heartbeat.

    Attributes:
        streams: the connections by number of the process at the other end, also those that are lost.
        held: whether no silence counts, since the other ends cannot be heard at present.
    """

    held = False

    def __init__(self, streams: Sequence[Stream], silence: float, heartbeat: Callable[[], Sequence[Any]]) -> None:
        self._silence, self._heartbeat = silence, heartbeat
        self._poller: Any = _make_poller()
        self._idle_poller: Any = _make_poller() if LENDABLE else self._poller
        self._watch_lock = threading.Lock()
        self._watched: set[int] = set()  # processes whose sockets are polled for room to send
        self.streams: dict[int, Stream] = {}
        self._live: dict[int, Stream] = {}  # those that are not lost, by descriptor
        self._pipe = WakePipe()
        self._idle_poller.register(self._pipe, select.POLLIN)
        if LENDABLE:
            self._idle_poller.register(self._poller, select.POLLIN)
        for stream in streams:
            self.add(stream)
        self._last_poll = self._last_check = time.monotonic()
        close_in_children(self)

    def add(self, stream: Stream) -> None:
        """Add a connection."""
        self.streams[stream.peer] = stream
        with self._watch_lock:
            self._watched.discard(stream.peer)
            self._live = {**self._live, stream.socket.fileno(): stream}
            self._poller.register(stream.socket, select.POLLIN)

    def drop(self, peer: int) -> None:
        """Close the connection to a process, if there is one."""
        stream = self.streams.pop(peer, None)
        if stream is not None:
            self._forget(stream)
            stream.close()

    def send(self, peer: int, buffers: Sequence[Any]) -> int:
        """Send a message without blocking; return its bytes, none where the connection has been dropped.

        Args:
            peer: the process.
            buffers: the message, in buffers of bytes that must not change afterwards.
        """
        stream = self.streams.get(peer)
        if stream is None:
            return 0
        if not stream.outgoing.send(buffers):
            self.wake()
        return sum(map(len, buffers))

    def lend(self, lent: bool) -> None:
        """Set whether another thread receives messages, so that `wait` ignores them; from any thread."""
        self._idle_poller.modify(self._poller, 0 if lent else select.POLLIN)

    def wait(self, timeout: float) -> None:
        """Wait until data has arrived or `wake` is called, at most for a number of seconds."""
        self._watch()
        timeout = min(max(timeout, 0.0), self._silence / _HEARTBEATS)
        for descriptor, _ in _poll(self._idle_poller, timeout):
            if descriptor == self._pipe.fileno():
                self._pipe.clear()

    def poll(self, timeout: float) -> Ready:
        """Wait until data has arrived, at most for a number of seconds; return the sockets for `read`."""
        return _poll(self._poller, timeout)

    def read(self, ready: Ready) -> tuple[list[tuple[int, Any]], dict[int, Exception]]:
        """Receive messages, and send data that the kernel had no room for before.

        Args:
            ready: result of `poll`.

        Returns:
            Messages with their senders, and the reason by process for lost connections.
        """
        messages: list[tuple[int, Any]] = []
        lost: dict[int, Exception] = {}
        for descriptor, events in ready:
            stream = self._live.get(descriptor)
            if stream is None:  # the wake-up pipe
                continue
            if events & select.POLLOUT:
                stream.outgoing.flush()
                self._watch()
            if events & ~select.POLLOUT:
                try:
                    stream.read(messages)
                except Exception as error:  # also a fault of this end: the others go on
                    if not isinstance(error, (OSError, DadplugError)):
                        _log.exception("the connection to process %s cannot be served", stream.peer)
                    lost[stream.peer] = error
                    self._forget(stream)
        return messages, lost

    def _watch(self) -> None:
        """Poll for room on connections that have unsent data."""
        with self._watch_lock:
            for stream in self._live.values():
                blocked = stream.outgoing.blocked
                if blocked is not (stream.peer in self._watched):
                    self._poller.modify(stream.socket, select.POLLIN | select.POLLOUT * blocked)
                    self._watched ^= {stream.peer}

    def _forget(self, stream: Stream) -> None:
        with self._watch_lock:
            if self._live.get(stream.socket.fileno()) is stream:
                self._poller.unregister(stream.socket)
                self._live = {number: each for number, each in self._live.items() if each is not stream}

    def send_heartbeats(self) -> dict[int, Exception]:
        """Send heartbeats that are due; return the reason for processes that have been silent for too long, once."""
        lost: dict[int, Exception] = {}
        now = time.monotonic()
        step = self._silence / _HEARTBEATS
        if now - self._last_poll > 2 * step:  # this process was suspended
            for stream in self._live.values():
                stream.heard = now
        self._last_poll = now
        if now - self._last_check < step / 2:
            return lost
        self._last_check = now
        for stream in list(self._live.values()):
            if now - stream.outgoing.sent > step / 2 and not stream.outgoing.blocked:
                self.send(stream.peer, self._heartbeat())
            if self.held or stream.is_away:
                stream.heard = now
            if now - stream.heard > self._silence:
                lost[stream.peer] = TimeoutError(f"timed out: nothing was heard of it for {self._silence:g} s")
                self._forget(stream)
        return lost

    @property
    def silent(self) -> int | None:
        """The process whose heartbeat is most overdue; None if all are on time."""
        step = self._silence / _HEARTBEATS
        heard, peer = min((each.heard, each.peer) for each in self.streams.values())
        return peer if time.monotonic() - heard > 2 * step else None

    def wake(self) -> None:
        """End `wait`; from any thread."""
        self._pipe.wake()

    def close_descriptors(self) -> None:
        """Close the sockets alone, in a forked child."""
        for stream in self.streams.values():
            stream.socket.close()

    def shut_down(self, deadline: float) -> None:
        """Send the last messages, and wait until the other ends have closed; no other thread may receive.

        What has not been read when a socket is closed makes the kernel drop what the other end has not read.

        Args:
            deadline: end of the wait, on the clock of `time.monotonic`.
        """
        shut: set[int] = set()
        while self._live and time.monotonic() < deadline:
            for stream in self._live.values():
                if stream.peer not in shut and not stream.outgoing.blocked:
                    shut.add(stream.peer)
                    with suppress(OSError):
                        stream.socket.shutdown(socket.SHUT_WR)
            self._watch()
            self.read(self.poll(0.05))

    def close(self) -> None:
        """Close all connections after sending the last messages; no other thread may receive."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        while any(not each.outgoing.flush() for each in self._live.values()) and time.monotonic() < deadline:
            self._watch()
            self.poll(0.05)
        for stream in self.streams.values():
            stream.close()
        self._pipe.close()
        if LENDABLE:
            self._poller.close()
            self._idle_poller.close()
