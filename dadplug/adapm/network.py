"""Messages from site to site: any site sends to any other at any time, from any thread."""

from __future__ import annotations

import math
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..exchange import Traffic
from .connections import Connection, connect_sites
from .messages import Head, Kind, Message, ProtocolError

_CLOSE = 1.0  # seconds that the last messages get to leave
_SIGNS = 4  # signs of life in the time after which a silent site counts as lost


class Network:
    """Connections from this site to each other one.

    `send` may be called from any thread, `receive` from one.

    Args:
        rank: this site.
        exchange: gathers one object a site, by rank; all sites call it together.
        timeout: seconds after which a connection without a sign of life counts as lost.
        traffic: the meter.
        widths: the width of each table; more are appended as tables are added.
        name: how messages call a site.

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
        self._poll = select.poll()
        self._watched: dict[int, int] = {}  # events that are polled for, by rank
        self.connections = {
            peer: Connection(peer, connected, lambda buffer, offset: Head(buffer, offset, widths, sites))
            for peer, connected in sorted(sockets.items())
        }
        self._peers = {each.socket.fileno(): each for each in self.connections.values()}
        self._ring, self._bell = socket.socketpair()
        for end in (self._ring, self._bell):
            end.setblocking(False)
        self._poll.register(self._bell, select.POLLIN)
        self._awake = self._alive = time.monotonic()
        _open.add(self)

    def send(self, peer: int, message: Message) -> None:
        """Send a message, and return at once; its arrays must not change afterwards."""
        buffers = message.encode()
        self._traffic.add(sum(map(len, buffers)))
        if not self.connections[peer].send(buffers):
            self.wake()

    def receive(self, timeout: float) -> tuple[list[tuple[int, Message]], dict[int, Exception]]:
        """Wait for messages.

        Args:
            timeout: seconds to wait at most.

        Returns:
            Messages with their senders, and the sites that are lost, with the reason.
        """
        messages: list[tuple[int, Message]] = []
        lost: dict[int, Exception] = {}
        self._watch()
        for descriptor, events in self._poll.poll(math.ceil(1000 * min(max(timeout, 0.0), self._timeout / _SIGNS))):
            if descriptor not in self._peers:
                with suppress(OSError):
                    while self._bell.recv(4096):
                        pass
                continue
            connection = self._peers[descriptor]
            if events & select.POLLOUT:
                connection.flush()
            if events & ~select.POLLOUT:
                try:
                    connection.read(messages)
                except (OSError, ProtocolError) as error:
                    lost[connection.rank] = error
                    self._forget(connection)
        self._show_life(lost)
        return [(sender, message) for sender, message in messages if message.kind is not Kind.ALIVE], lost

    def _watch(self) -> None:
        """Poll for room on connections that have something left to send."""
        for connection in self._peers.values():
            events = select.POLLIN | select.POLLOUT * connection.blocked
            if self._watched.get(connection.rank) != events:
                self._poll.register(connection.socket, events)
                self._watched[connection.rank] = events

    def _forget(self, connection: Connection) -> None:
        self._poll.unregister(connection.socket)
        self._peers = {number: each for number, each in self._peers.items() if each is not connection}

    def _show_life(self, lost: dict[int, Exception]) -> None:
        """Send signs of life, and find the sites from which none come."""
        now = time.monotonic()
        step = self._timeout / _SIGNS
        if now - self._awake > 2 * step:  # it is this process that has slept
            for connection in self._peers.values():
                connection.heard = now
        self._awake = now
        if now - self._alive < step / 2:
            return
        self._alive = now
        for connection in list(self._peers.values()):
            if now - connection.sent > step / 2:
                self.send(connection.rank, Message(Kind.ALIVE))
            if now - connection.heard > self._timeout:
                lost[connection.rank] = TimeoutError("timed out")
                self._forget(connection)

    @property
    def silent(self) -> int | None:
        """The site that has missed its signs of life for longest; None if all are on time."""
        step = self._timeout / _SIGNS
        heard, peer = min((each.heard, each.rank) for each in self.connections.values())
        return peer if time.monotonic() - heard > 2 * step else None

    def wake(self) -> None:
        """End the wait of `receive`; from any thread."""
        with suppress(OSError):  # the pipe of wake-ups is full
            self._ring.send(b"!")

    def close(self) -> None:
        """Close all connections once the last messages have left; from the thread that receives."""
        deadline = time.monotonic() + _CLOSE
        while any(not each.flush() for each in self._peers.values()) and time.monotonic() < deadline:
            self._watch()
            self._poll.poll(50)
        self._close_sockets()

    def _close_sockets(self) -> None:
        _open.discard(self)
        for connection in self.connections.values():
            connection.close()
        self._ring.close()
        self._bell.close()


_open: weakref.WeakSet[Network] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked child, such as a loader's worker: a dead site would seem to live on in it."""
    for network in list(_open):
        for connection in network.connections.values():
            connection.socket.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
