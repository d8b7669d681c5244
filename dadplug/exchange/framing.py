"""Framed messages on non-blocking connections: in order to all other sites, and by tag between pairs of processes.

gloo hands every message to a thread of its own, which wakes up for each packet and takes the core away from backward.
Here the training thread writes a payload in one system call and goes on; the kernel sends and receives meanwhile, and a
payload is read when it is needed. A helper thread moves only the bytes that the kernel has no room for.

Worker threads of hierarchical groups forward messages while the main thread computes, so that those of a connection
have no order that both ends know. There each has a tag, and one that arrives before it is expected is kept until it is.
A thread that waits for such a message reads whatever arrives on its connection; others that wait on the same
connection are notified by it.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor

from ..errors import MismatchError
from .handshake import KERNEL_BYTES, close_in_children
from .transport import Transport

_HEADER = struct.Struct("<IIQ")  # magic number, number or tag of the message, bytes of its body
_IN_ORDER, _TAGGED = 0x64616470, 0x64616474  # the magic numbers
_POLL_SECONDS = 0.02
_CHUNK_BYTES = 1 << 16  # read at once of a message that is not expected yet


class Message:
    """Header and body that are sent or received.

    Args:
        body: the bytes to send, or room for those received.
        header: the header to send; None for a message to receive.

    Attributes:
        left: bytes that are not sent or received yet, the header's included.
        done: whether none are left, or it never will be sent or received.
        error: why it never will be.
    """

    def __init__(self, body: memoryview, header: bytes | None = None) -> None:
        self.body = body
        self.header = memoryview(bytearray(_HEADER.size) if header is None else header)
        self.left = _HEADER.size + len(body)
        self.done = False
        self.error: Exception | None = None

    def parts(self) -> list[memoryview]:
        """Return the bytes that are left, as buffers for one system call."""
        past = _HEADER.size + len(self.body) - self.left
        return [self.header[past:], self.body] if past < _HEADER.size else [self.body[past - _HEADER.size :]]

    def advance(self, count: int) -> None:
        """Count bytes as sent or received."""
        self.left -= count
        self.done = self.left == 0

    def finish(self, error: Exception | None = None) -> None:
        """Record that it has been received, or never will be sent or received."""
        self.error, self.done = error, True


class FramedConnection:
    """Non-blocking connection with the messages that are to be sent on it.

    Args:
        connected: the connected socket.

    Attributes:
        socket: the socket.
        outgoing: the messages that have not been sent in full.
        moved_at: when the last byte was sent or received, on the clock of `time.monotonic`.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.outgoing: deque[Message] = deque()
        self.moved_at = 0.0

    def write(self) -> bool:
        """Send as much as the kernel accepts; return whether that is all."""
        while self.outgoing:
            message = self.outgoing[0]
            try:
                message.advance(self.socket.sendmsg(message.parts()))
            except BlockingIOError:
                return False
            self.moved_at = time.monotonic()
            if message.done:
                self.outgoing.popleft()
        return True

    def close(self) -> None:
        """Close the socket."""
        with suppress(OSError):
            self.socket.close()


class _OrderedConnection(FramedConnection):
    """Connection to one site, with the messages in progress in both directions."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        self.incoming: deque[Message] = deque()
        self._sent = self._received = 0
        self._mismatched = False

    def send(self, body: memoryview) -> Message:
        """Append a message to those to be sent."""
        message = Message(body, _HEADER.pack(_IN_ORDER, self._sent & 0xFFFFFFFF, len(body)))
        self._sent += 1
        self.outgoing.append(message)
        return message

    def expect(self, body: memoryview) -> Message:
        """Append a message to those to be received, into `body`."""
        message = Message(body)
        self.incoming.append(message)
        return message

    def read(self) -> None:
        """Receive as much of the expected messages as has arrived.

        Raises:
            MismatchError: if a header is not that of the expected message.
            ConnectionError: if the other site has closed the connection.
        """
        if self._mismatched:  # the helper thread may have found it; the training thread raises it
            raise MismatchError
        while self.incoming:
            message = self.incoming[0]
            try:
                count = self.socket.recvmsg_into(message.parts())[0]
            except BlockingIOError:
                return
            if not count:
                raise ConnectionError("connection closed by the other site")
            incomplete = message.left > len(message.body)
            message.advance(count)
            if incomplete and message.left <= len(message.body):
                self._check_header(message)
            if message.done:
                self.incoming.popleft()

    def _check_header(self, message: Message) -> None:
        expected = _IN_ORDER, self._received & 0xFFFFFFFF, len(message.body)
        if _HEADER.unpack(message.header) != expected:
            self._mismatched = True
            raise MismatchError
        self._received += 1


class PeerSockets:
    """Connections to all other sites of a transport. Made by `handshake.connect_sockets`.

    Messages carry no tags: on every connection they arrive in the order in which they were sent, and all sites launch
    theirs in the same order. The header of each message shows whether they do.

    Args:
        transport: the transport.
        connections: connected sockets by rank.
    """

    def __init__(self, transport: Transport, connections: dict[int, socket.socket]) -> None:
        self._transport = weakref.proxy(transport)
        self.connections = {rank: _OrderedConnection(connected) for rank, connected in sorted(connections.items())}
        self._lock = threading.Lock()
        self._wake = threading.Condition()
        self._helper: threading.Thread | None = None
        self._has_backlog = False
        self._closed = False
        close_in_children(self)

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
                    self._transfer(rank, write=True)
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
                for rank, connection in self.connections.items():
                    self._transfer(rank, write=bool(connection.outgoing), read=bool(connection.incoming))
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
            silent = [
                rank
                for rank, connection in self.connections.items()
                if not undone.isdisjoint(map(id, (*connection.incoming, *connection.outgoing)))
            ]
        for rank in silent:
            raise self._transport.lost(TimeoutError("timed out"), rank)

    def _poll(self) -> select.poll:
        poll = select.poll()
        for connection in self.connections.values():
            events = select.POLLIN * bool(connection.incoming) | select.POLLOUT * bool(connection.outgoing)
            if events:
                poll.register(connection.socket, events)
        return poll

    def _transfer(self, rank: int, *, write: bool = False, read: bool = False) -> None:
        """Send or receive, with errors that name the site at the other end."""
        try:
            if write:
                self.connections[rank].write()
            if read:
                self.connections[rank].read()
        except MismatchError:
            raise MismatchError(mismatch(self._transport, rank)) from None
        except (OSError, ValueError) as error:
            raise self._transport.lost(error, rank) from error

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
                self._wake.wait_for(lambda: self._has_backlog or self._closed)
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
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close the sockets alone."""
        for connection in self.connections.values():
            connection.close()


class TaggedMessage(Message):
    """Message with a tag, which any thread may wait for.

    Args:
        connection: its connection.
        body: the bytes to send, or room for those received.
        header: the header to send; None for a message to receive.
    """

    def __init__(self, connection: TaggedConnection, body: memoryview, header: bytes | None = None) -> None:
        super().__init__(body, header)
        self.is_sent = header is not None
        self._connection = connection

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the message.

        Args:
            timeout: time to wait at most for anything to move on the connection; that of the connection by default.

        Raises:
            MismatchError: if another message has come with its tag.
            RuntimeError: if the connection has closed, or nothing has moved on it for as long as the timeout.
        """
        if not self.done:
            self._connection.wait(self, timeout.total_seconds() if timeout else self._connection.timeout)
        if isinstance(self.error, MismatchError):
            raise MismatchError(str(self.error))
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error
        return True


class _EarlyMessage:
    """Message that has arrived, in full or in part, before it was expected.

    Attributes:
        content: what has arrived.
        complete: whether that is all.
        expected: the message that is expected now; None before.
    """

    def __init__(self) -> None:
        self.content = bytearray()
        self.complete = False
        self.expected: TaggedMessage | None = None


class TaggedConnection(FramedConnection):
    """Connection to one process, whose messages have tags.

    Args:
        connected: the connected socket.
        timeout: seconds without a byte after which a wait ends.
        mismatch: text of the error for a message that does not fit.
        has_backlog: called when the kernel does not accept all that is to be sent.
    """

    def __init__(
        self, connected: socket.socket, timeout: float, mismatch: str, has_backlog: Callable[[], None]
    ) -> None:
        super().__init__(connected)
        self.timeout = timeout
        self._mismatch = mismatch
        self._has_backlog = has_backlog
        self._sending = threading.Lock()
        self._changed = threading.Condition()  # guards what follows, up to the header
        self._expected: defaultdict[int, deque[TaggedMessage]] = defaultdict(deque)
        self._early: defaultdict[int, deque[_EarlyMessage]] = defaultdict(deque)
        self._is_read = False
        self._error: Exception | None = None
        # Used only by the thread that reads.
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)
        self._header, self._header_left = bytearray(_HEADER.size), _HEADER.size
        self._incoming: TaggedMessage | _EarlyMessage | None = None
        self._left = 0  # bytes of its body

    def send(self, body: memoryview, tag: int) -> TaggedMessage:
        """Start to send a message."""
        message = TaggedMessage(self, body, _HEADER.pack(_TAGGED, tag, len(body)))
        with self._sending:
            if self._error is not None:
                message.finish(self._error)
                return message
            self.outgoing.append(message)
        self.write()
        if not message.done:
            self._has_backlog()
        return message

    def write(self) -> bool:
        try:
            with self._sending:
                return super().write()
        except (OSError, ValueError) as error:
            self.fail(error)
        return True

    def expect(self, room: memoryview, tag: int) -> TaggedMessage:
        """Start to receive a message."""
        message = TaggedMessage(self, room)
        with self._changed:
            waiting = self._early.get(tag, ())
            early = next((each for each in waiting if each.expected is None), None)
            if early is not None and early.complete:
                self._early[tag].remove(early)
                self._deliver(early, message)
            elif self._error is not None:
                message.finish(self._error)
            elif early is not None:
                early.expected = message
            else:
                self._expected[tag].append(message)
        return message

    def wait(self, message: TaggedMessage, seconds: float) -> None:
        """Wait until a message is done, and read what arrives meanwhile unless another thread does."""
        begun = time.monotonic()
        while not message.done:
            now, deadline = time.monotonic(), max(begun, self.moved_at) + seconds
            if now > deadline:
                raise RuntimeError("timed out")
            with self._changed:
                if message.done:
                    return
                if self._is_read or message.is_sent:
                    self._changed.wait(deadline - now + 0.001)
                    continue
                self._is_read = True
            try:
                self._read_until(message, deadline)
            finally:
                with self._changed:
                    self._is_read = False
                    self._changed.notify_all()

    def _read_until(self, message: TaggedMessage, deadline: float) -> None:
        """Read until a message is done, nothing has come up to the deadline, or the connection has failed."""
        try:
            while not message.done:
                if not self._read() and not message.done:
                    left = deadline - time.monotonic()
                    if left < 0 or not self._readable.poll(1e3 * left + 1):
                        return
        except (OSError, ValueError, MismatchError) as error:
            self.fail(error)

    def _read(self) -> bool:
        """Read what has arrived of a header or a body; return whether there was anything.

        Raises:
            MismatchError: if a message does not fit.
            ConnectionError: if the other process has closed the connection.
        """
        incoming = self._incoming
        if incoming is None:
            room = memoryview(self._header)[_HEADER.size - self._header_left :]
        elif isinstance(incoming, TaggedMessage):
            room = incoming.body[len(incoming.body) - self._left :]
        else:
            room = memoryview(bytearray(min(self._left, _CHUNK_BYTES)))
        try:
            count = self.socket.recv_into(room)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionError("connection closed by the other process")
        self.moved_at = time.monotonic()
        if incoming is None:
            self._header_left -= count
            if not self._header_left:
                self._begin()
            return True
        self._left -= count
        if isinstance(incoming, _EarlyMessage):
            incoming.content += room[:count]
        if not self._left:
            self._complete(incoming)
            self._incoming, self._header_left = None, _HEADER.size
        return True

    def _begin(self) -> None:
        """Take the message whose header has arrived as the one that is received."""
        magic, tag, self._left = _HEADER.unpack(self._header)
        with self._changed:
            if self._expected.get(tag):
                self._incoming = self._expected[tag].popleft()
            else:
                self._incoming = _EarlyMessage()
                self._early[tag].append(self._incoming)
        expected = self._incoming
        if magic != _TAGGED or (isinstance(expected, TaggedMessage) and len(expected.body) != self._left):
            raise MismatchError(self._mismatch)

    def _complete(self, message: TaggedMessage | _EarlyMessage) -> None:
        with self._changed:
            if isinstance(message, TaggedMessage):
                message.finish()
            elif message.expected is None:
                message.complete = True
            else:
                for waiting in self._early.values():
                    if message in waiting:
                        waiting.remove(message)
                self._deliver(message, message.expected)
            self._changed.notify_all()

    def _deliver(self, early: _EarlyMessage, message: TaggedMessage) -> None:
        """Copy an early message to the one that is expected now."""
        if len(early.content) != len(message.body):
            message.finish(MismatchError(self._mismatch))
            return
        message.body[:] = early.content
        message.finish()

    def fail(self, error: Exception) -> None:
        """End all messages with an error, and those to come."""
        with self._sending:
            self._error = self._error or error
            unfinished = list(self.outgoing)
            self.outgoing.clear()
        with self._changed:
            unfinished += [message for messages in self._expected.values() for message in messages]
            unfinished += [each.expected for early in self._early.values() for each in early if each.expected]
            if isinstance(self._incoming, TaggedMessage):
                unfinished.append(self._incoming)
            for message in unfinished:
                message.finish(self._error)
            self._expected.clear()
            self._changed.notify_all()

    def notify(self) -> None:
        """Wake up the threads that wait for a message to be sent."""
        with self._changed:
            self._changed.notify_all()


class TaggedSockets:
    """Connections to other processes, by rank.

    A sender writes what the kernel accepts in its own thread; a helper thread writes the rest.

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
        close_in_children(self)

    def start(self, tensor: Tensor, rank: int, tag: int, sends: bool) -> TaggedMessage:
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
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close the sockets alone."""
        for connection in self.connections.values():
            connection.close()
        self._wake_end.close()
        self._woken_end.close()


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
