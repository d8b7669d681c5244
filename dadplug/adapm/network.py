"""Messages between sites: any site sends to any other at any time, from any thread.

There are two pollers: one has all connections; the other has the first poller and a wake-up pipe, and the background
thread waits for it. A worker that waits for a reply removes the first poller from the second and receives messages
itself, so that messages wake up no other thread.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..errors import ProtocolError
from ..exchange import Traffic
from .connections import Connection
from .messages import Head, Kind, Message

_CLOSE = 1.0  # seconds to send the last messages
_LENDABLE = hasattr(select, "epoll")  # its descriptor can be polled
_HEARTBEATS = 4  # heartbeats within the timeout

Ready = list[tuple[int, int]]  # descriptors of sockets and their events


def _make_poller() -> Any:
    return select.epoll() if _LENDABLE else select.poll()  # both have the same numbers of events


def _poll(poller: Any, timeout: float) -> Ready:
    ready: Ready = poller.poll(timeout if _LENDABLE else math.ceil(1000 * timeout))
    return ready


class Network:
    """Connections from this site to all others.

    `send` and `wake` may be called from any thread, `wait` from one thread only. `poll`, `read` and `send_heartbeats`
    may be called from any thread, but not concurrently.

    Args:
        sockets: connected sockets by rank, of `dadplug.adapm.connections.connect_sites` or of a hub.
        timeout: seconds without a heartbeat after which a connection counts as lost.
        traffic: meter of sent bytes.
        widths: width of each table; the caller appends to it when tables are added.

    Attributes:
        connections: connections by rank.
        lendable: whether `lend` is supported.
    """

    def __init__(
        self, sockets: Mapping[int, socket.socket], timeout: float, traffic: Traffic, widths: Sequence[int]
    ) -> None:
        sites = len(sockets) + 1
        self._traffic = traffic
        self._timeout = timeout
        self._poller: Any = _make_poller()
        self._idle_poller: Any = _make_poller() if _LENDABLE else self._poller
        self._watched = dict.fromkeys(sockets, False)  # whether the connection is polled for room to send, by rank
        self._watch_lock = threading.Lock()
        self.connections = {
            peer: Connection(peer, connected, lambda buffer, offset: Head(buffer, offset, widths, sites))
            for peer, connected in sorted(sockets.items())
        }
        self._peers = {each.socket.fileno(): each for each in self.connections.values()}
        self.lendable = _LENDABLE
        self._wake_writer, self._wake_reader = socket.socketpair()
        for end in (self._wake_writer, self._wake_reader):
            end.setblocking(False)
        self._wake_descriptor = self._wake_reader.fileno()
        self._idle_poller.register(self._wake_reader, select.POLLIN)
        if self.lendable:
            self._idle_poller.register(self._poller, select.POLLIN)
        for connection in self.connections.values():
            self._poller.register(connection.socket, select.POLLIN)
        self._last_poll = self._last_check = time.monotonic()
        _open.add(self)

    def send(self, peer: int, message: Message) -> None:
        """Send a message without blocking; its arrays must not change afterwards."""
        buffers = message.encode()
        self._traffic.add(sum(map(len, buffers)))
        if not self.connections[peer].send(buffers):
            self.wake()

    def lend(self, lent: bool) -> None:
        """Set whether another thread receives messages, so that `wait` ignores them; from any thread."""
        self._idle_poller.modify(self._poller, 0 if lent else select.POLLIN)

    def wait(self, timeout: float) -> None:
        """Wait until data has arrived or `wake` is called, at most for a number of seconds."""
        self._watch()
        timeout = min(max(timeout, 0.0), self._timeout / _HEARTBEATS)
        for descriptor, _ in _poll(self._idle_poller, timeout):
            if descriptor == self._wake_descriptor:
                with suppress(OSError):
                    while self._wake_reader.recv(4096):
                        pass

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
                connection.flush()
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
                blocked = connection.blocked
                if blocked is not self._watched[connection.rank]:
                    self._poller.modify(connection.socket, select.POLLIN | select.POLLOUT * blocked)
                    self._watched[connection.rank] = blocked

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
            if now - connection.sent > step / 2:
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
        with suppress(OSError):  # the wake-up pipe is full
            self._wake_writer.send(b"!")

    def close(self) -> None:
        """Close all connections after sending the last messages; no other thread may receive."""
        deadline = time.monotonic() + _CLOSE
        while any(not each.flush() for each in self._peers.values()) and time.monotonic() < deadline:
            self._watch()
            self.poll(0.05)
        self._close_sockets()

    def _close_sockets(self) -> None:
        _open.discard(self)
        for connection in self.connections.values():
            connection.close()
        self._wake_writer.close()
        self._wake_reader.close()
        if _LENDABLE:
            self._poller.close()
            self._idle_poller.close()


_open: weakref.WeakSet[Network] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked child, such as a loader's worker, which would keep them open after an exit."""
    for network in list(_open):
        for connection in network.connections.values():
            connection.socket.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
