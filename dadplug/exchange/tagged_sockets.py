"""Tagged messages between pairs of processes, on connections of their own, for hierarchical groups.

A sender writes what the kernel accepts in its own thread; a helper thread writes the rest.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress

from torch import Tensor

from .socket_transport import bytes_of
from .tagged_connection import TaggedConnection, TaggedWork


class TaggedSockets:
    """Connections to other processes, by rank.

    Args:
        sockets: connected sockets by rank.
        timeout: seconds without a byte on a connection after which a wait ends.
        mismatches: texts of the errors for messages that do not fit, by rank.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], timeout: float, mismatches: Mapping[int, str]) -> None:
        self._wake_end, self._woken_end = socket.socketpair()
        self._woken_end.setblocking(False)
        self._lock = threading.Lock()
        self._helper: threading.Thread | None = None
        self._closed = False
        self.connections = {
            rank: TaggedConnection(connected, timeout, mismatches[rank], self._wake_helper)
            for rank, connected in sockets.items()
        }
        _open.add(self)

    def start(self, tensor: Tensor, rank: int, tag: int, sends: bool) -> TaggedWork:
        """Start to send a contiguous tensor of bytes, or to receive one.

        Args:
            tensor: what is sent, or room for what is received; must not change before the message is done.
            rank: rank of the other process.
            tag: tag of the message; messages with the same tag are received in the order in which they are sent.
            sends: whether it is sent.
        """
        connection = self.connections[rank]
        return (connection.send if sends else connection.expect)(bytes_of(tensor), tag)

    def _wake_helper(self) -> None:
        """Have the helper thread send what the kernel has no room for."""
        with self._lock:
            if self._closed:
                return
            if self._helper is None:
                self._helper = threading.Thread(target=self._run_helper, name="dadplug-tagged-sockets", daemon=True)
                self._helper.start()
            self._wake_end.send(b"\0")

    def _run_helper(self) -> None:
        woken = self._woken_end.fileno()
        while not self._closed:
            poll = select.poll()
            poll.register(woken, select.POLLIN)
            for connection in self.connections.values():
                if not connection.write():
                    poll.register(connection.socket, select.POLLOUT)
                connection.notify()
            for descriptor, _ in poll.poll():
                if descriptor == woken:
                    with suppress(BlockingIOError):
                        self._woken_end.recv(1 << 12)

    def shut_down(self) -> None:
        """End all messages with an error, and the waits of other threads. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wake_end.send(b"\0")
        for connection in self.connections.values():
            connection.fail(ConnectionError("connection closed by this process"))
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections, which no thread waits on any more. May be called twice."""
        self.shut_down()
        if self._helper is not None:
            self._helper.join()
        self.close_sockets()

    def close_sockets(self) -> None:
        """Close the sockets alone."""
        for connection in self.connections.values():
            connection.close()
        self._wake_end.close()
        self._woken_end.close()


_open: weakref.WeakSet[TaggedSockets] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked child, such as a loader's worker: they would hide the end of its parent."""
    for sockets in list(_open):
        sockets.close_sockets()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
