"""Connections of the sites' own, on which payloads go straight into and out of the kernel's buffers.

gloo gives every message to a thread of its own, which wakes up for whatever packet comes and takes the core away from
backward. Here the thread that trains writes a payload in one call and goes on; the kernel sends and receives meanwhile,
and what has come is read when it is needed. Only what the kernel has no room for is left to a thread.
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
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import MismatchError

if TYPE_CHECKING:
    from .transport import Transport

_HEAD = struct.Struct("<IIQ")  # a magic number, the message's number on its connection, its bytes
_MAGIC = 0x64616470
ENOUGH = 1 << 20  # bytes that the kernel holds; with as many a buffer of fixed size is worth having
_NAP = 0.02  # seconds


class _Message:
    """Bytes that are to be sent or received, behind their head."""

    __slots__ = ("body", "done", "head", "left")

    def __init__(self, body: memoryview, head: bytes | None = None) -> None:
        self.body = body
        self.head = memoryview(bytearray(_HEAD.size) if head is None else head)
        self.left = _HEAD.size + len(body)
        self.done = False

    def parts(self) -> list[memoryview]:
        """What is left of it."""
        past = _HEAD.size + len(self.body) - self.left
        return [self.head[past:], self.body] if past < _HEAD.size else [self.body[past - _HEAD.size :]]

    def advance(self, count: int) -> None:
        self.left -= count
        self.done = self.left == 0


class _Connection:
    """A connection to one site, with messages that are under way in both directions."""

    def __init__(self, rank: int, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank = rank
        self.socket = connected
        self.outgoing: deque[_Message] = deque()
        self.incoming: deque[_Message] = deque()
        self._sent = self._received = 0
        self._out_of_step = False

    def send(self, body: memoryview) -> _Message:
        message = _Message(body, _HEAD.pack(_MAGIC, self._sent & 0xFFFFFFFF, len(body)))
        self._sent += 1
        self.outgoing.append(message)
        return message

    def expect(self, body: memoryview) -> _Message:
        message = _Message(body)
        self.incoming.append(message)
        return message

    def write(self) -> None:
        """Sends what the kernel takes."""
        while self.outgoing:
            message = self.outgoing[0]
            try:
                message.advance(self.socket.sendmsg(message.parts()))
            except BlockingIOError:
                return
            if message.done:
                self.outgoing.popleft()

    def read(self) -> None:
        """Takes what has come of the messages that are expected."""
        if self._out_of_step:  # whichever thread has found it out, the one that trains has to be told
            raise _OutOfStep(self.rank)
        while self.incoming:
            message = self.incoming[0]
            try:
                count = self.socket.recvmsg_into(message.parts())[0]
            except BlockingIOError:
                return
            if not count:
                raise ConnectionError("connection closed by the other site")
            headless = len(message.body) + _HEAD.size - message.left < _HEAD.size
            message.advance(count)
            if headless and message.left <= len(message.body):
                self._check(message)
            if message.done:
                self.incoming.popleft()

    def _check(self, message: _Message) -> None:
        magic, number, size = _HEAD.unpack(message.head)
        if (magic, number, size) != (_MAGIC, self._received & 0xFFFFFFFF, len(message.body)):
            self._out_of_step = True
            raise _OutOfStep(self.rank)
        self._received += 1

    def close(self) -> None:
        with suppress(OSError):
            self.socket.close()


class _OutOfStep(Exception):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class Streams:
    """Connections to all other sites of a transport; see the module. `socket_setup.open_streams` makes it.

    Messages carry no tags: on every connection they arrive in the order in which they were sent, and all sites launch
    theirs in one order. A head with each tells if they do not.
    """

    def __init__(self, transport: Transport, connections: dict[int, socket.socket]) -> None:
        self._transport = weakref.proxy(transport)
        self.connections = {rank: _Connection(rank, connected) for rank, connected in sorted(connections.items())}
        self._lock = threading.Lock()
        self._wake = threading.Condition()
        self._helper: threading.Thread | None = None
        self._backlog = False
        self._closed = False
        _open.add(self)

    def launch(self, own: memoryview, others: dict[int, memoryview]) -> list[_Message]:
        """Starts to send to all sites what they expect, and to receive from them; returns at once.

        Args:
            own: this site's bytes; nothing is sent where there are none.
            others: where the bytes of each other site go, by rank; left out where a site sends none.

        Returns:
            The messages, for `wait`.
        """
        messages = []
        with self._lock:
            for rank, connection in self.connections.items():
                if rank in others:
                    messages.append(connection.expect(others[rank]))
                if len(own):
                    messages.append(connection.send(own))
                    self._guarded(connection, write=True)
        self._leave_to_helper()
        return messages

    def wait(self, messages: Sequence[_Message]) -> None:
        """Waits until messages have gone, or have come.

        Raises:
            SiteError: if a site is gone, or nothing has moved for the transport's timeout.
            MismatchError: if a site has sent something else than is expected of it.
        """
        self._backlog = False  # the thread would only be in the way
        deadline, before = time.monotonic() + self._transport.timeout, -1
        while True:  # short naps, since the thread may have taken what this one waits for
            with self._lock:
                for connection in self.connections.values():
                    self._guarded(connection, write=bool(connection.outgoing), read=bool(connection.incoming))
                left = sum(message.left for message in messages)
                if not left:
                    break
                poll, now = self._poll(), time.monotonic()
            if left != before:
                deadline, before = now + self._transport.timeout, left
            if now > deadline:
                self._raise_silence(messages)
            poll.poll(1e3 * min(_NAP, deadline - now + 0.001))
        self._leave_to_helper()

    def _raise_silence(self, messages: Sequence[_Message]) -> None:
        undone = {id(message) for message in messages if not message.done}
        for rank, connection in self.connections.items():
            if any(id(message) in undone for message in (*connection.incoming, *connection.outgoing)):
                raise self._transport.lost(TimeoutError("timed out"), rank)

    def _poll(self) -> select.poll:
        poll = select.poll()
        for connection in self.connections.values():
            events = select.POLLIN * bool(connection.incoming) | select.POLLOUT * bool(connection.outgoing)
            if events:
                poll.register(connection.socket, events)
        return poll

    def _guarded(self, connection: _Connection, *, write: bool = False, read: bool = False) -> None:
        """Moves bytes, with errors that name the site at the other end."""
        try:
            if write:
                connection.write()
            if read:
                connection.read()
        except _OutOfStep as error:
            sites = self._transport.sites
            raise MismatchError(
                f"{sites[error.rank]} and {sites[self._transport.rank]} are not at the same exchange: every site must "
                "call synchronize() equally often, with the same model; a site that has run out of data calls idle()"
            ) from None
        except (OSError, ValueError) as error:
            raise self._transport.lost(error, connection.rank) from error

    def _behind(self) -> bool:
        """Says whether there is more to do than the kernel does by itself."""
        connections = self.connections.values()
        return any(each.outgoing for each in connections) or any(
            sum(message.left for message in each.incoming) > ENOUGH for each in connections
        )

    def _leave_to_helper(self) -> None:
        """Has a thread send and receive what the kernel has no room for."""
        if not self._behind():
            return
        with self._wake:
            self._backlog = True
            if self._helper is None:
                self._helper = threading.Thread(target=self._help, name="dadplug streams", daemon=True)
                self._helper.start()
            self._wake.notify()

    def _help(self) -> None:
        while True:
            with self._wake:
                while not self._backlog and not self._closed:
                    self._wake.wait()
            if self._closed:
                return
            try:
                with self._lock:
                    for connection in self.connections.values():
                        connection.write()
                        connection.read()
                    self._backlog = self._backlog and self._behind()
                    poll = self._poll()
                poll.poll(50)
            except Exception:
                self._backlog = False  # the thread that trains meets the same error, and can say more

    def close(self) -> None:
        """Closes the connections. May be called twice."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for connection in self.connections.values():
            connection.close()


class StreamGather:
    """A `Gather` on streams."""

    def __init__(self, transport: Transport, streams: Streams, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self._transport = transport
        self._streams = streams
        self._payloads = [torch.zeros(size, dtype=dtype) for size in sizes]
        self.payload = self._payloads[transport.rank]
        self._own = _bytes_of(self.payload)
        self._others = {
            rank: _bytes_of(payload)
            for rank, payload in enumerate(self._payloads)
            if rank != transport.rank and payload.numel()
        }
        self._messages: list[_Message] = []

    def post(self) -> None:
        """Nothing: the kernel receives by itself."""

    def launch(self) -> None:
        self._transport.traffic.add((self._transport.world_size - 1) * len(self._own))
        self._messages = self._streams.launch(self._own, self._others)

    def wait(self) -> list[Tensor]:
        if self._messages:
            with self._transport.traffic.waiting():
                self._streams.wait(self._messages)
            self._messages = []
        return self._payloads


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


_open: weakref.WeakSet[Streams] = weakref.WeakSet()


def _close_in_child() -> None:
    """Has a forked child, such as a loader's worker, let go: else a site that dies would seem to live on in it."""
    for streams in list(_open):
        for connection in streams.connections.values():
            connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
