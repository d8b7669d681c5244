"""Acceptor of the hub: listens, carries out handshakes, and closes connections that end. Nothing here blocks."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ...errors import FrameError, KitError, RefusedError, TryAgainError
from ..pki.kits import Kit, certificate_end
from ..secure import tls
from ..secure.secure_socket import SecureSocket
from ..wire.messages import VERSION, Head, Hello, Kind, Refuse, pack_control, pack_refusal_before_9, read_control
from ..wire.streams import FrameReceiver
from .journal import Journal

HANDSHAKE_SECONDS = 2.0  # for the TLS handshake, and again for the first message
_CLOSING_SECONDS = 0.5
_LONGEST_HELLO = 4096  # bytes


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
        host: the same without the port.
        connection: the encrypted connection.
        name: name of the site; empty until it is accepted.
        serial: serial number of its certificate, from then on.
        expires: end of its certificate, too.
        deadline: time by which the present part of its start has to be complete.
        silent: whether nothing has arrived from it.
        writing: whether it waits until it can send, rather than receive.

    Raises:
        OSError: if the connection is lost.
    """

    def __init__(self, connection: socket.socket, address: str, context: ssl.SSLContext, kit: Kit, now: float) -> None:
        connection.setblocking(False)
        self.address, self.host = address, address.rpartition(":")[0]
        self.deadline = now + HANDSHAKE_SECONDS
        self.silent, self.writing = True, False
        self._kit = kit
        self.connection = SecureSocket(connection, context, server_side=True)
        self.name = ""
        self._receiver: FrameReceiver | None = None
        self._speaks = VERSION

    def advance(self, now: float) -> Hello | None:
        """Go on with the start of the connection, as far as possible.

        Args:
            now: the time, in seconds.

        Returns:
            The site's first message once it is here, otherwise None.

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
            raise self.refusal(error) from error
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
        certificate: dict[str, Any] = dict(self.connection.tls.getpeercert() or {})
        self.serial, self.expires = int(certificate["serialNumber"], 16), certificate_end(certificate)
        self.connection.sendall(tls.ACCEPTED)  # nothing else was sent since the handshake: there is room
        self._receiver = FrameReceiver(self.connection, _room)
        self.deadline = now + HANDSHAKE_SECONDS
        return True

    def _read_hello(self) -> Hello | None:
        receiver = self._receiver
        assert receiver is not None
        head = receiver.receive()
        if head is None:
            return None
        hello = read_control(bytes(receiver.body), len(self._kit.roster.sites)) if head.length else None
        if not isinstance(hello, Hello) or receiver.receive() is not None or receiver.filled:
            raise FrameError("its first message is no Hello, or it has not waited for the answer")
        self._speaks = hello.version
        return hello

    def refusal(self, error: Exception) -> RefusedError:
        """Tell a site that it is refused, and return the error for the journal."""
        refusal = Refuse(self.name, str(error), isinstance(error, TryAgainError))
        self.refuse(pack_control(refusal, 0) if self._speaks >= 9 else pack_refusal_before_9(refusal))
        return RefusedError(f"{self.name}: {error}")

    def refuse(self, answer: bytes) -> None:
        """Send a last message."""
        with contextlib.suppress(OSError):  # the other end may have gone
            self.connection.sendall(answer)

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
        connection: the connection below TLS.
        deadline: time at which the connection is closed in any case.
    """

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.deadline = now + _CLOSING_SECONDS
        self.connection = connection
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)

    def drain(self) -> bool:
        """Read and forget what has arrived; return whether the other end has closed the connection."""
        try:
            return not self.connection.recv(65536)
        except BlockingIOError:
            return False
        except OSError:
            return True


def _room(head: Head) -> memoryview:
    """Return room for the body of the first frame."""
    if head.kind is not Kind.CONTROL or head.length > _LONGEST_HELLO:
        raise FrameError(f"the first frame is of kind {head.kind.name} and {head.length} bytes, and no Hello")
    return memoryview(bytearray(head.length))


MAX_PENDING = 64  # at most at once
_A_TURN = 4  # connections that are accepted, and that get on, in a turn of the hub's loop
# Share of the hub's time for handshakes while members train, and seconds of it that may be spent at once.
_SHARE, _MOST_SECONDS = 0.02, 0.2
_READ = selectors.EVENT_READ


class Acceptor:
    """Connections that do not belong to a session.

    Args:
        kit: the hub's kit.
        address: host and port to listen at; None for those of the kit's roster.
        selector: the hub's selector, whose keys hold a `ClosingConnection`, or this object where there is a new
            connection or a pending one is ready.
        journal: log of who is refused.
        greet: takes a site that has shown who it is, its first message and the time; raises RefusedError or
            TryAgainError to refuse it.

    Attributes:
        address: host and port that the hub listens at.
        refused: number of connections that were refused.
        closing: connections that are being ended.

    Raises:
        KitError: if the address cannot be listened at.
    """

    def __init__(
        self,
        kit: Kit,
        address: tuple[str, int] | None,
        selector: selectors.BaseSelector,
        journal: Journal,
        greet: Callable[[PendingConnection, Hello, float], None],
    ) -> None:
        self.use(kit)
        self._selector, self._journal, self._greet = selector, journal, greet
        self._listener = _listener(*(address or kit.roster.address()), given=address is not None)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.refused = 0
        self._pending: list[PendingConnection] = []  # the oldest first
        self.closing: list[ClosingConnection] = []
        self._pauses = False
        self._budget, self._ticked = _MOST_SECONDS, time.monotonic()  # seconds of work
        self._own: Any = selectors.DefaultSelector()  # which the hub's waits for
        self._own.register(self._listener, _READ)
        selector.register(self._own, _READ, self)

    def use(self, kit: Kit) -> None:
        """Use a kit for connections from now on.

        Args:
            kit: the kit.

        Raises:
            ssl.SSLError: if a file of the kit is damaged.
        """
        self._kit = kit  # its revocations and sites count even if the files of the certificate are damaged
        self._context = tls.hub_context(kit)

    @property
    def dials(self) -> bool:
        """Whether a connection is in its handshake, and has sent something."""
        return any(not each.silent for each in self._pending)

    def serve(self, now: float, spares: bool = False) -> None:
        """Let a few connections get on, first those from addresses with the fewest; the others do in a later turn.

        Args:
            now: the time, in seconds.
            spares: whether to spare members, which train: where the work takes more than its share of the time, all
                wait for the next tick.
        """
        begin, counts = time.thread_time(), self._by_host()
        most = 1 if spares else _A_TURN
        ready = [key.data for key, _ in self._own.select(0)]
        for pending in sorted(filter(None, ready), key=lambda each: counts[each.host])[:most]:
            self._advance(pending, now)
        if None in ready:
            self._accept(now, most)
        if spares:
            self._budget -= time.thread_time() - begin
            if self._budget < 0:
                self._pause(True)

    def _by_host(self) -> Counter[str]:
        """Return the numbers of pending connections by host."""
        return Counter(each.host for each in self._pending)

    def _pause(self, pauses: bool) -> None:
        """Leave all connections as they are, or go on with them."""
        if pauses != self._pauses:
            self._pauses = pauses
            if pauses:
                self._selector.unregister(self._own)
            else:
                self._selector.register(self._own, _READ, self)

    def stop_listening(self) -> None:
        """Accept no connection any more."""
        self._own.unregister(self._listener)
        self._listener.close()

    def _accept(self, now: float, most: int) -> None:
        """Accept some connections."""
        for _ in range(most):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._journal.refuse("a connection", str(error), now)
                self._pause(True)
                return
            if len(self._pending) >= MAX_PENDING:
                self._refuse_one(now)
            self._admit(connection, f"{address[0]}:{address[1]}", now)

    def _refuse_one(self, now: float) -> None:
        """Refuse a pending connection: the oldest that has sent nothing, else the oldest of the host with the most."""
        counts = self._by_host()
        silent = [each for each in self._pending if each.silent]
        found = (silent or sorted(self._pending, key=lambda each: -counts[each.host]))[0]
        reason = "it has sent nothing" if silent else "it has not finished the handshake"
        self._refuse(found, f"{reason}, and there are many other connections", now)

    def _admit(self, connection: socket.socket, address: str, now: float) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pending = PendingConnection(connection, address, self._context, self._kit, now)
        except OSError as error:
            connection.close()
            self._journal.refuse(address, tls.explain(error), now)
            return
        self._pending.append(pending)
        self._own.register(pending.connection, _READ, pending)

    def _advance(self, pending: PendingConnection, now: float) -> None:
        try:
            hello = pending.advance(now)
        except (RefusedError, OSError) as error:
            self._refuse(pending, str(error), now)
            return
        except Exception as error:
            self._journal.fault(f"the connection of {pending.address} cannot be served", error)
            self._refuse(pending, f"{type(error).__name__}: {error}", now)
            return
        if hello is None:
            events = selectors.EVENT_WRITE if pending.writing else _READ
            self._own.modify(pending.connection, events, pending)
            return
        self._forget(pending)
        try:
            self._greet(pending, hello, now)
        except (RefusedError, TryAgainError) as error:
            self._end(pending, str(pending.refusal(error)), now)

    def _refuse(self, pending: PendingConnection, reason: str, now: float) -> None:
        self._forget(pending)
        self._end(pending, reason, now)

    def _forget(self, pending: PendingConnection) -> None:
        self._own.unregister(pending.connection)
        self._pending.remove(pending)

    def _end(self, pending: PendingConnection, reason: str, now: float) -> None:
        """End a connection that is refused."""
        self.refused += 1
        self._journal.refuse(pending.address, reason, now)
        self.close_gracefully(pending.detach(), now)

    def close_gracefully(self, connection: socket.socket, now: float) -> None:
        """End a connection such that what was sent last arrives.

        Args:
            connection: the connection below TLS.
            now: the time, in seconds.
        """
        if len(self.closing) >= MAX_PENDING:
            self.end_closing(self.closing[0])
        closing = ClosingConnection(connection, now)
        self.closing.append(closing)
        self._selector.register(connection, _READ, closing)

    def end_closing(self, closing: ClosingConnection) -> None:
        """Close a connection whose last bytes have been sent."""
        self._selector.unregister(closing.connection)
        self.closing.remove(closing)
        closing.connection.close()

    def tick(self, now: float, spares: bool = False) -> None:
        """End what has taken too long.

        Args:
            now: the time, in seconds.
            spares: see `serve`.
        """
        self._budget = min(_MOST_SECONDS, self._budget + _SHARE * (now - self._ticked))
        self._ticked = now
        if self._budget >= 0 or not spares:
            self._pause(False)
        for pending in [each for each in self._pending if now >= each.deadline]:
            self._refuse(pending, "it has not finished the handshake in time", now)
        for closing in [each for each in self.closing if now >= each.deadline]:
            self.end_closing(closing)

    def close(self) -> None:
        """Close all connections."""
        self._own.close()
        self._listener.close()
        for pending in self._pending:
            pending.detach().close()
        for closing in self.closing:
            closing.connection.close()


def _listener(host: str, port: int, given: bool) -> socket.socket:
    """Return a socket that listens at an address.

    Args:
        host: host name or address of this machine.
        port: the port; 0 for any.
        given: whether the user has given the address, rather than the kit.

    Raises:
        KitError: if that is not possible.
    """
    reason: Exception | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                listener = socket.create_server(address[:2], family=family, backlog=256)
            except OSError as error:
                reason = error
                continue
            listener.setblocking(False)
            return listener
    except OSError as error:
        reason = error
    advice = "" if given else "; if sites reach this machine by another address, give --listen HOST:PORT"
    raise KitError(f"cannot listen at {host}:{port}: {reason}{advice}")
