"""Reading and writing of whole messages by a connection with a timeout."""

from __future__ import annotations

import socket
import time
from typing import Protocol


class Receiver(Protocol):
    """A connection that bytes arrive by: a socket, or a `SecureSocket`."""

    def recv(self, size: int, /) -> bytes:
        """Receive bytes, up to a number; none if the other end has closed the connection."""

    def gettimeout(self) -> float | None:
        """Return the seconds that a call may take; None without a limit."""

    def settimeout(self, seconds: float | None, /) -> None:
        """Set the seconds that a call may take."""


def read_exactly(connected: Receiver, size: int, closed: str = "the connection was closed") -> bytes:
    """Return so many bytes of a connection with a timeout, which is for all of them.

    Args:
        connected: the connection.
        size: their number.
        closed: text of the error if the other end closes the connection before.

    Raises:
        OSError: if they do not arrive in time, or the connection is closed.
    """
    content = bytearray()
    timeout = connected.gettimeout()
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        while len(content) < size:
            if deadline is not None:
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError("timed out")
                connected.settimeout(left)
            part = connected.recv(size - len(content))
            if not part:
                raise ConnectionError(closed)
            content += part
    finally:
        connected.settimeout(timeout)
    return bytes(content)


def write_all(connected: socket.socket, content: bytes) -> None:
    """Send bytes, by a socket with a timeout for each part of them.

    Args:
        connected: the socket.
        content: the bytes.
    """
    while content:
        content = content[connected.send(content) :]
