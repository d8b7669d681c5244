"""Parts of non-blocking connections: a pipe that ends a wait, and the bytes that a socket had no room for."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

_MOST_PARTS = 64  # of a system call


class WakePipe:
    """Pipe by which any thread ends another thread's wait for sockets, which waits for this one, too."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable; -1 once the pipe is closed."""
        return self._reader.fileno()

    def wake(self) -> None:
        """End the wait that goes on, or the next one."""
        with suppress(OSError):  # the pipe is full, or closed
            self._writer.send(b"!")

    def clear(self) -> None:
        """Let the next wait begin anew."""
        with suppress(OSError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        """Close the pipe. May be called twice."""
        self._reader.close()
        self._writer.close()


def send_parts(connected: socket.socket, parts: deque[Any]) -> tuple[int, bool]:
    """Send bytes by one system call, and remove what the socket has taken.

    Args:
        connected: the socket.
        parts: the bytes, in parts that are not empty, each a buffer of bytes.

    Returns:
        The number of bytes that it has taken, and whether it had room for more.

    Raises:
        BlockingIOError: if the socket has no room.
        OSError: if the connection is lost.
    """
    left = count = connected.sendmsg(islice(parts, _MOST_PARTS))
    while parts and left >= len(parts[0]):
        left -= len(parts.popleft())
    if left:
        parts[0] = memoryview(parts[0])[left:]
    return count, not left


class Outgoing:
    """Bytes on their way into a non-blocking socket. Any thread may use it.

    Args:
        connected: the socket.

    Attributes:
        sent: time of the last sent bytes, on the clock of `time.monotonic`.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.sent = time.monotonic()
        self._socket = connected
        self._lock = threading.Lock()
        self._parts: deque[Any] = deque()

    @property
    def blocked(self) -> bool:
        """Whether there are bytes that the kernel had no room for."""
        with self._lock:  # another thread may be sending
            return bool(self._parts)

    @property
    def nbytes(self) -> int:
        """Number of the bytes that the kernel had no room for."""
        with self._lock:
            return sum(map(len, self._parts))

    def send(self, buffers: Sequence[Any]) -> bool:
        """Send buffers without blocking; return False if `flush` has to go on.

        Args:
            buffers: buffers of bytes, which must not change afterwards; none of them is empty.
        """
        with self._lock:
            waiting = bool(self._parts)
            self._parts.extend(buffers)
            return not waiting and self._write()

    def flush(self) -> bool:
        """Send what the kernel has room for; return whether that is all."""
        with self._lock:
            return self._write()

    def clear(self) -> None:
        """Forget what has not been sent."""
        with self._lock:
            self._parts.clear()

    def _write(self) -> bool:
        while self._parts:
            try:
                _, roomy = send_parts(self._socket, self._parts)
            except BlockingIOError:
                return False
            except OSError:  # the next read reports that the connection is closed
                self._parts.clear()
                break
            self.sent = time.monotonic()
            if not roomy:
                return False
        return True
