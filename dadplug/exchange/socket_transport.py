"""TCP connections between sites, on which the training thread writes payloads to and reads them from kernel buffers.

gloo hands every message to a thread of its own, which wakes up for each packet and takes the core away from backward.
Here the training thread writes a payload in one system call and goes on; the kernel sends and receives meanwhile, and a
payload is read when it is needed. A helper thread moves only the bytes that the kernel has no room for.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ..errors import MismatchError
from .transport import Gather, Transport

_HEADER = struct.Struct("<IIQ")  # magic number, number of the message on its connection, bytes of its body
_MAGIC = 0x64616470
KERNEL_BYTES = 1 << 20  # that the kernel is assumed to buffer in each direction
_POLL_SECONDS = 0.02


class Message:
    """Header and body that are sent or received.

    Attributes:
        body: the bytes to send, or room for those received.
        header: the header.
        left: bytes that are not sent or received yet, the header's included.
        done: whether none are left.
    """

    __slots__ = ("body", "done", "header", "left")

    def __init__(self, body: memoryview, header: bytes | None = None) -> None:
        self.body = body
        self.header = memoryview(bytearray(_HEADER.size) if header is None else header)
        self.left = _HEADER.size + len(body)
        self.done = False

    def parts(self) -> list[memoryview]:
        """Return the bytes that are left, as buffers for one system call."""
        past = _HEADER.size + len(self.body) - self.left
        return [self.header[past:], self.body] if past < _HEADER.size else [self.body[past - _HEADER.size :]]

    def advance(self, count: int) -> None:
        """Count bytes as sent or received."""
        self.left -= count
        self.done = self.left == 0


class _Connection:
    """Connection to one site, with the messages in progress in both directions.

    Args:
        rank: rank of the site.
        connected: the connected socket.
    """

    def __init__(self, rank: int, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank = rank
        self.socket = connected
        self.outgoing: deque[Message] = deque()
        self.incoming: deque[Message] = deque()
        self._sent = self._received = 0
        self._mismatched = False

    def send(self, body: memoryview) -> Message:
        """Append a message to those to be sent."""
        message = Message(body, _HEADER.pack(_MAGIC, self._sent & 0xFFFFFFFF, len(body)))
        self._sent += 1
        self.outgoing.append(message)
        return message

    def expect(self, body: memoryview) -> Message:
        """Append a message to those to be received, into `body`."""
        message = Message(body)
        self.incoming.append(message)
        return message

    def write(self) -> None:
        """Send as much as the kernel accepts."""
        while self.outgoing:
            message = self.outgoing[0]
            try:
                message.advance(self.socket.sendmsg(message.parts()))
            except BlockingIOError:
                return
            if message.done:
                self.outgoing.popleft()

    def read(self) -> None:
        """Receive as much of the expected messages as has arrived.

        Raises:
            _Mismatch: if a header is not that of the expected message.
            ConnectionError: if the other site has closed the connection.
        """
        if self._mismatched:  # the helper thread may have found it; the training thread raises it
            raise _Mismatch(self.rank)
        while self.incoming:
            message = self.incoming[0]
            try:
                count = self.socket.recvmsg_into(message.parts())[0]
            except BlockingIOError:
                return
            if not count:
                raise ConnectionError("connection closed by the other site")
            incomplete = len(message.body) + _HEADER.size - message.left < _HEADER.size
            message.advance(count)
            if incomplete and message.left <= len(message.body):
                self._check_header(message)
            if message.done:
                self.incoming.popleft()

    def _check_header(self, message: Message) -> None:
        magic, number, size = _HEADER.unpack(message.header)
        if (magic, number, size) != (_MAGIC, self._received & 0xFFFFFFFF, len(message.body)):
            self._mismatched = True
            raise _Mismatch(self.rank)
        self._received += 1

    def close(self) -> None:
        with suppress(OSError):
            self.socket.close()


class _Mismatch(Exception):
    """A message is not the expected one."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class PeerSockets:
    """Connections to all other sites of a transport. Made by `socket_setup.connect_sockets`.

    Messages carry no tags: on every connection they arrive in the order in which they were sent, and all sites launch
    theirs in the same order. The header of each message shows whether they do.

    Args:
        transport: the transport.
        connections: connected sockets by rank.
    """

    def __init__(self, transport: Transport, connections: dict[int, socket.socket]) -> None:
        self._transport = weakref.proxy(transport)
        self.connections = {rank: _Connection(rank, connected) for rank, connected in sorted(connections.items())}
        self._lock = threading.Lock()
        self._wake = threading.Condition()
        self._helper: threading.Thread | None = None
        self._has_backlog = False
        self._closed = False
        _open.add(self)

    def launch(self, own: Mapping[int, memoryview], others: Mapping[int, memoryview]) -> list[Message]:
        """Start to send to other sites and to receive from them; return at once.

        Args:
            own: this site's payload for each other site, by rank; without those that get none.
            others: room for the payload of each other site, by rank; without those that send none.

        Returns:
            The messages, for `wait`.
        """
        messages = []
        with self._lock:
            for rank, connection in self.connections.items():
                if rank in others:
                    messages.append(connection.expect(others[rank]))
                if rank in own:
                    messages.append(connection.send(own[rank]))
                    self._transfer(connection, write=True)
        self._wake_helper()
        return messages

    def wait(self, messages: Sequence[Message]) -> None:
        """Wait until messages have been sent or received.

        Raises:
            SiteError: if a site is gone, or nothing has moved for the transport's timeout.
            MismatchError: if a site has sent another message than the expected one.
        """
        self._has_backlog = False  # keeps the helper thread out of the way
        deadline, before = time.monotonic() + self._transport.timeout, -1
        while True:  # polls are short, since the helper thread may read what this one waits for
            with self._lock:
                for connection in self.connections.values():
                    self._transfer(connection, write=bool(connection.outgoing), read=bool(connection.incoming))
                left = sum(message.left for message in messages)
                if not left:
                    break
                poll, now = self._poll(), time.monotonic()
            if left != before:
                deadline, before = now + self._transport.timeout, left
            if now > deadline:
                self._raise_silence(messages)
            # Past the deadline, where the helper thread has just ended all that was late: a negative time has no end.
            poll.poll(1e3 * max(0.0, min(_POLL_SECONDS, deadline - now + 0.001)))
        self._wake_helper()

    def _raise_silence(self, messages: Sequence[Message]) -> None:
        undone = {id(message) for message in messages if not message.done}
        with self._lock:
            open_messages = {
                rank: [*connection.incoming, *connection.outgoing] for rank, connection in self.connections.items()
            }
        for rank, waiting in open_messages.items():
            if any(id(message) in undone for message in waiting):
                raise self._transport.lost(TimeoutError("timed out"), rank)

    def _poll(self) -> select.poll:
        poll = select.poll()
        for connection in self.connections.values():
            events = select.POLLIN * bool(connection.incoming) | select.POLLOUT * bool(connection.outgoing)
            if events:
                poll.register(connection.socket, events)
        return poll

    def _transfer(self, connection: _Connection, *, write: bool = False, read: bool = False) -> None:
        """Send or receive, with errors that name the site at the other end."""
        try:
            if write:
                connection.write()
            if read:
                connection.read()
        except _Mismatch as error:
            raise MismatchError(mismatch(self._transport, error.rank)) from None
        except (OSError, ValueError) as error:
            raise self._transport.lost(error, connection.rank) from error

    def _needs_helper(self) -> bool:
        """Return whether more is in progress than the kernel does by itself."""
        connections = self.connections.values()
        return any(each.outgoing for each in connections) or any(
            sum(message.left for message in each.incoming) > KERNEL_BYTES for each in connections
        )

    def _wake_helper(self) -> None:
        """Have the helper thread send and receive what the kernel has no room for."""
        with self._lock:  # the helper thread may be reading and writing
            behind = self._needs_helper()
        if not behind:
            return
        with self._wake:
            self._has_backlog = True
            if self._helper is None:
                self._helper = threading.Thread(target=self._run_helper, name="dadplug-sockets", daemon=True)
                self._helper.start()
            self._wake.notify()

    def _run_helper(self) -> None:
        while True:
            with self._wake:
                while not self._has_backlog and not self._closed:
                    self._wake.wait()
            if self._closed:
                return
            try:
                with self._lock:
                    for connection in self.connections.values():
                        connection.write()
                        connection.read()
                    self._has_backlog = self._has_backlog and self._needs_helper()
                    poll = self._poll()
                poll.poll(50)
            except Exception:
                self._has_backlog = False  # the training thread gets the same error, and reports it

    def close(self) -> None:
        """Close the connections. May be called twice."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for connection in self.connections.values():
            connection.close()


class SocketGather(Gather):
    """Gather on the sites' own connections.

    Args:
        transport: the transport.
        sockets: the connections.
        sizes: number of elements of each site's payload, by rank.
        dtype: type of the elements.
    """

    def __init__(self, transport: Transport, sockets: PeerSockets, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self._transport = transport
        self._sockets = sockets
        self._payloads = [torch.zeros(size, dtype=dtype) for size in sizes]
        self.payload = self._payloads[transport.rank]
        own = bytes_of(self.payload)
        self._own = {rank: own for rank in range(len(sizes)) if rank != transport.rank and len(own)}
        self._bytes = len(self._own) * len(own)
        self._others = others_of(self._payloads, transport.rank)
        self._messages: list[Message] = []

    def launch(self) -> None:
        self._transport.traffic.add(self._bytes)
        self._messages = self._sockets.launch(self._own, self._others)

    def wait(self) -> list[Tensor]:
        if self._messages:
            with self._transport.traffic.waiting():
                self._sockets.wait(self._messages)
            self._messages = []
        return self._payloads


def mismatch(transport: Transport, rank: int) -> str:
    """Return the text of the error for a message of a site that is not the expected one."""
    sites = transport.sites
    return (
        f"{sites[rank]} and {sites[transport.rank]} are not at the same exchange: every site must call synchronize() "
        "equally often, with the same model; a site that has run out of data calls idle()"
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, which share its memory."""
    return tensor.view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def others_of(payloads: Sequence[Tensor], rank: int) -> dict[int, memoryview]:
    """Return the bytes of payloads by rank, without that of one site and without empty ones."""
    return {each: bytes_of(payload) for each, payload in enumerate(payloads) if each != rank and payload.numel()}


_open: weakref.WeakSet[PeerSockets] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked child, such as a loader's worker: they would hide the end of its parent."""
    for sockets in list(_open):
        for connection in sockets.connections.values():
            connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
