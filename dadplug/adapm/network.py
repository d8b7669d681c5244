"""Messages from site to site: any site sends to any other at any time, from any thread.

Two pollers divide the work between threads: one has all connections, the other the first one and a bell. The background
thread waits for the second. A worker that is about to get an answer takes the first one out of the second, and receives
by itself: messages then wake no other thread.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..exchange import Traffic
from .connections import Connection, connect_sites
from .messages import Head, Kind, Message, ProtocolError

_CLOSE = 1.0  # seconds that the last messages get to leave
_LENDABLE = hasattr(select, "epoll")  # such pollers can be polled
_SIGNS = 4  # signs of life in the time after which a silent site counts as lost

Ready = list[tuple[int, int]]  # descriptors of sockets, and what they are ready for


def _make_poller() -> Any:
    return select.epoll() if _LENDABLE else select.poll()  # with the same numbers for events


def _poll(poller: Any, timeout: float) -> Ready:
    ready: Ready = poller.poll(timeout if _LENDABLE else math.ceil(1000 * timeout))
    return ready


class Network:
    """Connections from this site to each other one.

    `send` and `wake` may be called from any thread, `wait` from one. `poll`, `read` and
    `show_life` may be called from several, but by one at a time.

    Args:
        rank: this site.
        exchange: gathers one object a site, by rank; all sites call it together.
        timeout: seconds after which a connection without a sign of life counts as lost.
        traffic: the meter.
        widths: the width of each table; more are appended as tables are added.
        name: how messages call a site.

    Attributes:
        connections: to each other site, by rank.
        lendable: whether `lend` is supported.

    Raises:
        SiteError: if a site does not come.
    """

    def __init__(
        self,
        rank: int,
        exchange: Callable[[Any], list[Any]],
        timeout: float,
        traffic: Traffic,
        widths: Sequence[int],
        name: Callable[[int], str],
    ) -> None:
        sockets = connect_sites(rank, exchange, timeout, name)
        sites = len(sockets) + 1
        self._traffic = traffic
        self._timeout = timeout
        self._poller: Any = _make_poller()
        self._idle_poller: Any = _make_poller() if _LENDABLE else self._poller
        self._watched = dict.fromkeys(sockets, False)  # whether room to send is polled for, by rank
        self._watch_lock = threading.Lock()
        self.connections = {
            peer: Connection(peer, connected, lambda buffer, offset: Head(buffer, offset, widths, sites))
            for peer, connected in sorted(sockets.items())
        }
        self._peers = {each.socket.fileno(): each for each in self.connections.values()}
        self.lendable = _LENDABLE
        self._ring, self._bell = socket.socketpair()
        for end in (self._ring, self._bell):
            end.setblocking(False)
        self._bell_descriptor = self._bell.fileno()
        self._idle_poller.register(self._bell, select.POLLIN)
        if self.lendable:
            self._idle_poller.register(self._poller, select.POLLIN)
        for connection in self.connections.values():
            self._poller.register(connection.socket, select.POLLIN)
        self._awake = self._alive = time.monotonic()
        _open.add(self)

    def send(self, peer: int, message: Message) -> None:
        """Send a message, and return at once; its arrays must not change afterwards."""
        buffers = message.encode()
        self._traffic.add(sum(map(len, buffers)))
        if not self.connections[peer].send(buffers):
            self.wake()

    def lend(self, lent: bool) -> None:
        """Have `wait` ignore what comes, since another thread receives, or heed it again; from any thread."""
        self._idle_poller.modify(self._poller, 0 if lent else select.POLLIN)

    def wait(self, timeout: float) -> None:
        """Wait until something has come, for `wake`, or for a time in seconds."""
        self._watch()
        timeout = min(max(timeout, 0.0), self._timeout / _SIGNS)
        for descriptor, _ in _poll(self._idle_poller, timeout):
            if descriptor == self._bell_descriptor:
                with suppress(OSError):
                    while self._bell.recv(4096):
                        pass

    def poll(self, timeout: float) -> Ready:
        """Wait until something has come, for a time in seconds; return what `read` takes."""
        return _poll(self._poller, timeout)

    def read(self, ready: Ready) -> tuple[list[tuple[int, Message]], dict[int, Exception]]:
        """Receive what has come, and send what the kernel had no room for before.

        Args:
            ready: what `poll` has returned.

        Returns:
            Messages with their senders, and the sites whose connections are lost, with the reason.
        """
        messages: list[tuple[int, Message]] = []
        lost: dict[int, Exception] = {}
        for descriptor, events in ready:
            connection = self._peers.get(descriptor)
            if connection is None:  # the bell
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
        """Poll for room on connections that have something left to send."""
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

    def show_life(self) -> dict[int, Exception]:
        """Send signs of life where they are due; return the sites from which none come, once, with the reason."""
        lost: dict[int, Exception] = {}
        now = time.monotonic()
        step = self._timeout / _SIGNS
        if now - self._awake > 2 * step:  # it is this process that has slept
            for connection in self._peers.values():
                connection.heard = now
        self._awake = now
        if now - self._alive < step / 2:
            return lost
        self._alive = now
        for connection in list(self._peers.values()):
            if now - connection.sent > step / 2:
                self.send(connection.rank, Message(Kind.ALIVE))
            if now - connection.heard > self._timeout:
                lost[connection.rank] = TimeoutError("timed out")
                self._forget(connection)
        return lost

    @property
    def silent(self) -> int | None:
        """The site that has missed its signs of life for longest; None if all are on time."""
        step = self._timeout / _SIGNS
        heard, peer = min((each.heard, each.rank) for each in self.connections.values())
        return peer if time.monotonic() - heard > 2 * step else None

    def wake(self) -> None:
        """End `wait`; from any thread."""
        with suppress(OSError):  # the pipe of wake-ups is full
            self._ring.send(b"!")

    def close(self) -> None:
        """Close all connections once the last messages have left; while no other thread receives."""
        deadline = time.monotonic() + _CLOSE
        while any(not each.flush() for each in self._peers.values()) and time.monotonic() < deadline:
            self._watch()
            self.poll(0.05)
        self._close_sockets()

    def _close_sockets(self) -> None:
        _open.discard(self)
        for connection in self.connections.values():
            connection.close()
        self._ring.close()
        self._bell.close()
        if _LENDABLE:
            self._poller.close()
            self._idle_poller.close()


_open: weakref.WeakSet[Network] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked child, such as a loader's worker: a dead site would seem to live on in it."""
    for network in list(_open):
        for connection in network.connections.values():
            connection.socket.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
