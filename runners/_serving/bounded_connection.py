"""Limits on the number and duration of HTTP connections, so that clients without a key cannot block others."""

from __future__ import annotations

import asyncio
import math
from typing import Any

MOST_CONNECTIONS, READ_SECONDS = 1000, 10.0
_RESERVED = 128  # descriptors for files, models' processes and the event loop
_FEWEST = 16
_LONGEST_HEAD = 1 << 16  # bytes
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_LONG_HEAD = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_Base: Any = object  # uvicorn's protocol in the class that `connection_class` makes


class Limits:
    """The open connections of a server, and their limits.

    Args:
        most: largest number of connections; fewer where the system allows this process fewer descriptors.
        seconds: time limit of a request's head, and of what is read on after an early answer.
    """

    def __init__(self, most: int = MOST_CONNECTIONS, seconds: float = READ_SECONDS) -> None:
        self.most, self.seconds = min(most, _most_descriptors()), seconds
        self._open: dict[BoundedConnection, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def admit(self, connection: BoundedConnection) -> bool:
        """Add a connection; where there are too many, end the one that has waited longest for a request.

        Returns:
            Whether there is room: every other connection may have a request in progress.
        """
        if len(self._open) >= self.most:
            waiting = [each for each in self._open if each.idle]
            if not waiting:
                return False
            self._end(min(waiting, key=lambda each: (each.served, each.touched)))
        self._open[connection] = None
        if self._timer is None:
            self._begin_timer()
        return True

    def remove(self, connection: BoundedConnection) -> None:
        """Remove a connection that has ended."""
        self._open.pop(connection, None)

    def _end(self, connection: BoundedConnection) -> None:
        self.remove(connection)  # `connection_lost` follows later
        connection.abort()

    def _begin_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(min(1.0, self.seconds / 4), self._sweep)

    def _sweep(self) -> None:
        """End connections whose time is over; runs while there are any."""
        self._timer = None
        oldest = asyncio.get_running_loop().time() - self.seconds
        for connection in list(self._open):
            if connection.idle and connection.waiting_since is not None and connection.waiting_since < oldest:
                self._end(connection)
        if self._open:
            self._begin_timer()


def _most_descriptors() -> float:
    """Return the number of connections that the system allows this process."""
    try:
        import resource
    except ImportError:  # Windows
        return math.inf
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return math.inf if descriptors == resource.RLIM_INFINITY else max(_FEWEST, descriptors - _RESERVED)


class BoundedConnection(_Base):
    """Part of the connection that keeps the limits. The class that has it has `limits`.

    Attributes:
        waiting_since: time from which a head is awaited, or the rest of a refused body; None between two requests,
            which uvicorn's own timer bounds.
        touched: time of the last bytes.
        served: whether a request has been received.
    """

    limits: Limits

    def connection_made(self, transport: Any) -> None:
        """Admit or refuse the connection; called by the event loop."""
        self._real, self._lingering, self._at_once = transport, False, False
        self.waiting_since: float | None = self.loop.time()
        self.touched, self.served, self._head_bytes = self.waiting_since, False, 0
        super().connection_made(_LingeringTransport(transport, self))
        if not self.limits.admit(self):
            transport.write(_BUSY)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; called by the event loop."""
        self._at_once = True
        self.limits.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bound the head; called by the event loop."""
        if self._lingering:
            return
        self.touched = self.loop.time()
        if self.waiting_since is None and self.idle:
            self.waiting_since = self.touched
        super().data_received(data)
        if self._lingering:  # refused by the parser
            return
        if not self.idle:
            self.head_ended()
            return
        if self.waiting_since is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _LONGEST_HEAD:
                if self.cycle is None:
                    self._real.write(_LONG_HEAD)
                self.linger()

    def head_ended(self) -> None:
        """Note that a head has been received."""
        self.waiting_since, self._head_bytes, self.served = None, 0, True

    @property
    def idle(self) -> bool:
        """Whether no request is in progress: none has begun, its head is incomplete, or it has been answered."""
        return self.cycle is None or self.cycle.response_complete

    def close(self) -> None:
        """Close the connection; after an answer to a body that has not been received, once the client has read it.

        The kernel answers bytes that nobody has read with a reset, by which the client loses the answer.
        """
        unread = self.cycle is None or self.cycle.more_body  # without one, a head that is not valid
        if self._at_once or self._lingering or not unread:
            self._real.close()
        else:
            self.linger()

    def linger(self) -> None:
        """Read on and discard all until the client closes the connection, or its time is over."""
        if self._lingering or self._real.is_closing():
            return
        self._lingering, self.waiting_since = True, self.loop.time()
        if self._real.can_write_eof():
            self._real.write_eof()
        self.flow.resume_reading()

    @property
    def lingering(self) -> bool:
        """Whether the rest of a request is discarded."""
        return self._lingering

    def abort(self) -> None:
        """End the connection at once."""
        self._real.abort()

    def shutdown(self) -> None:
        """Close the connection after the request in progress; called by the server."""
        self._at_once = self._at_once or self.idle
        super().shutdown()


class _LingeringTransport:
    """Transport of a connection, whose `close` leaves the client time to read the answer."""

    def __init__(self, transport: Any, connection: BoundedConnection) -> None:
        self._transport, self._connection = transport, connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._connection.close()

    def is_closing(self) -> bool:
        return bool(self._connection.lingering or self._transport.is_closing())
