"""Connections between the sites of a parameter manager: messages from any site to any other.

The thread that has a message writes it to the socket. Only data that the kernel has no room for is left to the
background thread, since a switch between threads takes longer than sending a small message.

There are two pollers: one has all connections; the other has the first poller and a wake-up pipe, and the background
thread waits for it. A worker that waits for a reply removes the first poller from the second and receives messages
itself, so that messages wake up no other thread.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ProtocolError
from ..exchange import Traffic
from ..exchange.framing import Outgoing, WakePipe
from ..exchange.handshake import close_in_children
from .messages import HEAD_SIZE, Head, Kind, Message

LENDABLE = hasattr(select, "epoll")  # its descriptor can be polled

_CHUNK = 1 << 16  # bytes read at a time, from which small messages are extracted
_BATCH = 64  # messages read from a connection before the next one
_CLOSE = 1.0  # seconds to send the last messages
_HEARTBEATS = 4  # heartbeats within the timeout

Ready = list[tuple[int, int]]  # descriptors of sockets and their events


class Connection:
    """Connection to another site. Any thread may use `outgoing`; the methods are called from one at a time.

    Args:
        rank: the other site.
        connected: the connected socket.
        head: function that parses the head of a message at an offset of a buffer.

    Attributes:
        outgoing: messages on their way to the site.
        heard: time of the last received data, on the clock of `time.monotonic`.
        watched: whether `Network` polls for room to send.
    """

    def __init__(self, rank: int, connected: socket.socket, head: Callable[[Any, int], Head]) -> None:
        connected.setblocking(False)
        if connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank = rank
        self.socket = connected
        self.outgoing = Outgoing(connected)
        self.heard = time.monotonic()
        self.watched = False
        self._head = head
        self._buffer = bytearray(_CHUNK)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._partial: tuple[Head, NDArray[np.uint8]] | None = None  # a message of which a part has arrived
        self._missing = memoryview(b"")  # the part that has not arrived

    def read(self, messages: list[tuple[int, Message]]) -> None:
        """Read the messages that have arrived.

        Args:
            messages: list to append to, pairs of sender and message.

        Raises:
            ConnectionError: if the connection is closed.
            ProtocolError: if the data does not follow the protocol.
        """
        last = len(messages) + _BATCH
        while len(messages) < last:
            if self._partial is not None:
                target = self._missing
            else:
                target = self._view[self._filled :] if self._filled else self._view
            try:
                count = self.socket.recv_into(target)
            except BlockingIOError:
                return
            if not count:
                raise ConnectionError("connection closed by the other site")
            self.heard = time.monotonic()
            if self._partial is None:
                self._filled += count
                self._extract(messages)
            else:
                self._missing = self._missing[count:]
                if not self._missing.nbytes:
                    head, body = self._partial
                    self._partial = None
                    messages.append((self.rank, head.message(body)))
            if count < target.nbytes:
                return

    def _extract(self, messages: list[tuple[int, Message]]) -> None:
        """Extract messages from the buffer; the last one may be incomplete."""
        start = 0
        while self._filled - start >= HEAD_SIZE:
            head = self._head(self._buffer, start)
            start += HEAD_SIZE
            end = start + head.nbytes
            if end > self._filled:
                body = np.empty(head.nbytes, np.uint8)
                here = self._filled - start
                body.data[:here] = self._view[start : self._filled]
                self._partial, self._missing = (head, body), body.data[here:]
                start = self._filled
                break
            messages.append((self.rank, head.message(self._buffer[start:end])))
            start = end
        if start < self._filled:
            self._buffer[: self._filled - start] = self._buffer[start : self._filled]
        self._filled -= start

    def close(self) -> None:
        """Close the connection; the kernel still delivers data that it has."""
        self.outgoing.clear()
        self.socket.close()


def _make_poller() -> Any:
    return select.epoll() if LENDABLE else select.poll()  # both have the same numbers of events


def _poll(poller: Any, timeout: float) -> Ready:
    ready: Ready = poller.poll(timeout if LENDABLE else math.ceil(1000 * timeout))
    return ready


class Network:
    """Connections from this site to all others.

    `send` and `wake` may be called from any thread, `wait` from one thread only. `poll`, `read` and `send_heartbeats`
    may be called from any thread, but not concurrently.

    Args:
        sockets: connected sockets by rank, of `handshake.connect_sites` or of a hub.
        timeout: seconds without a heartbeat after which a connection counts as lost.
        traffic: meter of sent bytes.
        widths: width of each table; the caller appends to it when tables are added.

    Attributes:
        connections: connections by rank.
    """

    def __init__(
        self, sockets: Mapping[int, socket.socket], timeout: float, traffic: Traffic, widths: Sequence[int]
    ) -> None:
        sites = len(sockets) + 1
        self._traffic = traffic
        self._timeout = timeout
        self._poller: Any = _make_poller()
        self._idle_poller: Any = _make_poller() if LENDABLE else self._poller
        self._watch_lock = threading.Lock()
        self.connections = {
            peer: Connection(peer, connected, lambda buffer, offset: Head(buffer, offset, widths, sites))
            for peer, connected in sorted(sockets.items())
        }
        self._peers = {each.socket.fileno(): each for each in self.connections.values()}
        self._pipe = WakePipe()
        self._idle_poller.register(self._pipe, select.POLLIN)
        if LENDABLE:
            self._idle_poller.register(self._poller, select.POLLIN)
        for connection in self.connections.values():
            self._poller.register(connection.socket, select.POLLIN)
        self._last_poll = self._last_check = time.monotonic()
        close_in_children(self)

    def send(self, peer: int, message: Message) -> None:
        """Send a message without blocking; its arrays must not change afterwards."""
        buffers = message.encode()
        self._traffic.add(sum(map(len, buffers)))
        if not self.connections[peer].outgoing.send(buffers):
            self.wake()

    def lend(self, lent: bool) -> None:
        """Set whether another thread receives messages, so that `wait` ignores them; from any thread."""
        self._idle_poller.modify(self._poller, 0 if lent else select.POLLIN)

    def wait(self, timeout: float) -> None:
        """Wait until data has arrived or `wake` is called, at most for a number of seconds."""
        self._watch()
        timeout = min(max(timeout, 0.0), self._timeout / _HEARTBEATS)
        for descriptor, _ in _poll(self._idle_poller, timeout):
            if descriptor == self._pipe.fileno():
                self._pipe.clear()

    def poll(self, timeout: float) -> Ready:
        """Wait until data has arrived, at most for a number of seconds; return the sockets for `read`."""
        return _poll(self._poller, timeout)

    def read(self, ready: Ready) -> tuple[list[tuple[int, Message]], dict[int, Exception]]:
        """Receive messages, and send data that the kernel had no room for before.

        Args:
            ready: result of `poll`.

        Returns:
            Messages with their senders, and the reason by site for lost connections.
        """
        messages: list[tuple[int, Message]] = []
        lost: dict[int, Exception] = {}
        for descriptor, events in ready:
            connection = self._peers.get(descriptor)
            if connection is None:  # the wake-up pipe
                continue
            if events & select.POLLOUT:
                connection.outgoing.flush()
                self._watch()
            if events & ~select.POLLOUT:
                try:
                    connection.read(messages)
                except (OSError, ProtocolError) as error:
                    lost[connection.rank] = error
                    self._forget(connection)
        return messages, lost

    def _watch(self) -> None:
        """Poll for room on connections that have unsent data."""
        with self._watch_lock:
            for connection in self._peers.values():
                blocked = connection.outgoing.blocked
                if blocked is not connection.watched:
                    self._poller.modify(connection.socket, select.POLLIN | select.POLLOUT * blocked)
                    connection.watched = blocked

    def _forget(self, connection: Connection) -> None:
        with self._watch_lock:
            self._poller.unregister(connection.socket)
            self._peers = {number: each for number, each in self._peers.items() if each is not connection}

    def send_heartbeats(self) -> dict[int, Exception]:
        """Send heartbeats that are due; return the reason by site for sites whose heartbeats are missing, once."""
        lost: dict[int, Exception] = {}
        now = time.monotonic()
        step = self._timeout / _HEARTBEATS
        if now - self._last_poll > 2 * step:  # this process was suspended
            for connection in self._peers.values():
                connection.heard = now
        self._last_poll = now
        if now - self._last_check < step / 2:
            return lost
        self._last_check = now
        for connection in list(self._peers.values()):
            if now - connection.outgoing.sent > step / 2:
                self.send(connection.rank, Message(Kind.ALIVE))
            if now - connection.heard > self._timeout:
                lost[connection.rank] = TimeoutError("timed out")
                self._forget(connection)
        return lost

    @property
    def silent(self) -> int | None:
        """The site whose heartbeat is most overdue; None if all are on time."""
        step = self._timeout / _HEARTBEATS
        heard, peer = min((each.heard, each.rank) for each in self.connections.values())
        return peer if time.monotonic() - heard > 2 * step else None

    def wake(self) -> None:
        """End `wait`; from any thread."""
        self._pipe.wake()

    def close_descriptors(self) -> None:
        """Close the sockets alone, in a forked child."""
        for connection in self.connections.values():
            connection.socket.close()

    def close(self) -> None:
        """Close all connections after sending the last messages; no other thread may receive."""
        deadline = time.monotonic() + _CLOSE
        while any(not each.outgoing.flush() for each in self._peers.values()) and time.monotonic() < deadline:
            self._watch()
            self.poll(0.05)
        for connection in self.connections.values():
            connection.close()
        self._pipe.close()
        if LENDABLE:
            self._poller.close()
            self._idle_poller.close()
