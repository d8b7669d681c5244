"""Connections to the hub that have not shown who they are, or that are refused. Nothing here blocks."""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Any, NamedTuple

from ..errors import FrameError, RefusedError
from . import tls
from .actions import Refuse
from .frames import Head, Hello, Kind, pack_control, read_control
from .kits import Kit
from .receiver import FrameReceiver
from .secure_socket import SecureSocket
from .stream import Stream

HANDSHAKE_SECONDS = 2.0  # for the TLS handshake, and again for the first message
_CLOSING_SECONDS = 0.5
_LONGEST_HELLO = 4096  # bytes


class Arrival(NamedTuple):
    """Site that has shown who it is.

    Attributes:
        stream: the connection.
        name: name of the site.
        serial: serial number of its certificate.
        hello: its first message.
    """

    stream: Stream
    name: str
    serial: int
    hello: Hello


class PendingConnection:
    """Connection during its handshake and until its first message.

    Args:
        connection: an accepted connection.
        address: address of the other end, for the journal.
        context: of `tls.hub_context`.
        kit: the hub's kit.
        now: the time, in seconds.

    Attributes:
        address: address of the other end.
        connection: the encrypted connection.
        name: name of the site; empty until it is accepted.
        deadline: time by which the present part of its start has to be complete.
        silent: whether nothing has arrived from it.
        writing: whether it waits until it can send, rather than receive.

    Raises:
        OSError: if the connection is lost.
    """

    def __init__(self, connection: socket.socket, address: str, context: ssl.SSLContext, kit: Kit, now: float) -> None:
        connection.setblocking(False)
        self.address = address
        self.deadline = now + HANDSHAKE_SECONDS
        self.silent, self.writing = True, False
        self._kit = kit
        self.connection = SecureSocket(connection, context, server_side=True)
        self.name = ""
        self._receiver: FrameReceiver | None = None

    def advance(self, now: float) -> Arrival | None:
        """Go on with the start of the connection, as far as possible.

        Args:
            now: the time, in seconds.

        Returns:
            The site once its first message is here, otherwise None.

        Raises:
            RefusedError: if it is refused; the other end has been told the reason.
            OSError: if the connection is lost.
        """
        self.silent = False
        try:
            if self._receiver is None and not self._shake_hands(now):
                return None
            return self._read_hello()
        except FrameError as error:
            self.refuse(pack_control(Refuse(self.name, str(error), False), 0))
            raise RefusedError(f"{self.name}: {error}") from error
        except ssl.SSLError as error:
            if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                raise ConnectionError("the other end has closed the connection during the handshake") from error
            raise RefusedError(tls.explain(error)) from error

    def _shake_hands(self, now: float) -> bool:
        """Return whether the TLS handshake is complete and the site accepted."""
        self.writing = False
        try:
            self.connection.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self.writing = True
            return False
        try:
            self.name = tls.peer_site(self.connection, self._kit)
        except RefusedError as error:
            self.refuse(tls.refusal(str(error)))
            raise
        self.connection.send(tls.ACCEPTED)  # nothing else was sent since the handshake: there is room
        self._receiver = FrameReceiver(self.connection, _room)
        self.deadline = now + HANDSHAKE_SECONDS
        return True

    def _read_hello(self) -> Arrival | None:
        receiver = self._receiver
        assert receiver is not None
        head = receiver.receive()
        if head is None:
            return None
        hello = read_control(bytes(receiver.body), len(self._kit.roster.sites)) if head.length else None
        if not isinstance(hello, Hello) or receiver.receive() is not None or receiver.filled:
            raise FrameError("its first message is no Hello, or it has not waited for the answer")
        certificate: dict[str, Any] = dict(self.connection.getpeercert() or {})
        return Arrival(Stream(self.connection), self.name, int(certificate["serialNumber"], 16), hello)

    def refuse(self, answer: bytes) -> None:
        """Send a last message."""
        with contextlib.suppress(OSError):  # the other end may have gone
            self.connection.send(answer)

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self.connection.fileno()

    def detach(self) -> socket.socket:
        """Return the connection below TLS."""
        return socket.socket(fileno=self.connection.detach())


class ClosingConnection:
    """End of a connection, such that what was sent last arrives.

    A socket that is closed with bytes unread resets the connection, and the other end may lose an alert or a reason.

    Args:
        connection: the connection below TLS.
        now: the time, in seconds.

    Attributes:
        deadline: time at which the connection is closed in any case.
    """

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.deadline = now + _CLOSING_SECONDS
        self._connection = connection
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)

    def drain(self) -> bool:
        """Read and forget what has arrived; return whether the other end has closed the connection."""
        try:
            return not self._connection.recv(65536)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _room(head: Head) -> memoryview:
    """Return room for the body of the first frame."""
    if head.kind is not Kind.CONTROL or head.length > _LONGEST_HELLO:
        raise FrameError(f"the first frame is of kind {head.kind.name} and {head.length} bytes, and no Hello")
    return memoryview(bytearray(head.length))
