"""Framed messages on non-blocking connections between the processes of a group.

gloo hands every message to a thread of its own, which wakes up for each packet and takes the core away from backward.
Here the training thread writes a payload in one system call and goes on; the kernel sends and receives meanwhile, and a
payload is read when it is needed. A helper thread moves only the bytes that the kernel has no room for.

Every message has a tag. In flat groups tags are the numbers of the exchanges, which all sites launch in the same order:
another tag or size than the expected one shows that sites are not at the same exchange. In hierarchical groups worker
threads forward messages while the main thread computes, so that those of a connection have no order that both ends
know: a message that arrives before it is expected is kept until it is. A thread that waits for messages reads their
connections; others that wait on the same connection are notified by it.

Other connections use parts of this: a pipe that ends a wait, and the bytes that a socket had no room for.
"""

from __future__ import annotations

import operator
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import filterfalse, islice
from typing import Any

import torch
from torch import Tensor

from ..errors import MismatchError
from .calls import ASK_SECONDS
from .handshake import KERNEL_BYTES, close_in_children

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


def send_parts(connected: socket.socket, parts: deque[Any]) -> int:
    """Send bytes, all of them where the socket blocks, else as many as it has room for, and remove those it has taken.

    Args:
        connected: the socket.
        parts: the bytes, in parts that are not empty, each a buffer of bytes.

    Returns:
        The number of bytes that it has taken.

    Raises:
        OSError: if the connection is lost.
    """
    total = 0
    with suppress(BlockingIOError):
        while parts:
            left = connected.sendmsg(islice(parts, _MOST_PARTS))
            total += left
            while parts and left >= len(parts[0]):
                left -= len(parts.popleft())
            if left:
                parts[0] = memoryview(parts[0])[left:]
                if connected.gettimeout() == 0:
                    break
    return total


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
        try:
            if send_parts(self._socket, self._parts):
                self.sent = time.monotonic()
        except OSError:  # the next read reports that the connection is closed
            self._parts.clear()
        return not self._parts


_HEADER = struct.Struct("<IIQ")  # magic number, tag of the message, bytes of its body
_MAGIC = 0x64616474
_POLL_SECONDS = 0.02  # of a poll while another thread reads a connection that this one waits for, too
_CHUNK_BYTES = 1 << 16  # read at once of a message that is not expected yet


class Message:
    """Message that is sent or received, for which any thread may wait.

    Args:
        connection: its connection.
        body: the bytes to send, or room for those received.
        tag: its tag.
        is_sent: whether it is sent.

    Attributes:
        left: bytes that are not sent yet, the header's included.
        done: whether it has been sent or received, or never will be.
        error: why it never will be.
    """

    def __init__(self, connection: FramedConnection, body: memoryview, tag: int, is_sent: bool) -> None:
        self.connection = connection
        self.body = body
        self.tag = tag
        self.is_sent = is_sent
        self.left = _HEADER.size + len(body)
        self.done = False
        self.error: Exception | None = None

    def parts(self) -> list[memoryview]:
        """Return the bytes that are left to send, as buffers for one system call."""
        past = _HEADER.size + len(self.body) - self.left
        if past >= _HEADER.size:
            return [self.body[past - _HEADER.size :]]
        return [memoryview(_HEADER.pack(_MAGIC, self.tag, len(self.body)))[past:], self.body]

    def finish(self, error: Exception | None = None) -> None:
        """Record that it has been sent or received, or never will be."""
        self.error = error
        self.done = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the message.

        Args:
            timeout: time to wait at most for anything to move on the connection; that of the connection by default.

        Raises:
            MismatchError: if another message has come in its place; without a text, as only the sites' calls say why.
            RuntimeError: if the connection has closed, or nothing has moved on it for as long as the timeout.
        """
        wait_together([self], timeout.total_seconds() if timeout else self.connection.timeout)
        if isinstance(self.error, MismatchError):
            raise MismatchError
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error
        return True


_MOVED_AT, _CONNECTION, _IS_SENT, _IS_EXPECTING = map(
    operator.attrgetter, ("connection.moved_at", "connection", "is_sent", "is_expecting")
)
_LEAD, _READ = map(operator.methodcaller, ("lead", "read"))


def wait_together(
    messages: Sequence[Message], seconds: float, check: Callable[[], None] = lambda: None
) -> Message | None:
    """Wait until all messages are done, or one has failed; read what arrives, unless another thread does.

    Args:
        messages: the messages, of any connections.
        seconds: time after which a message fails if nothing moves on the connections of those that are not done.
        check: called now and then while nothing moves.

    Returns:
        A message that has failed; None if there is none.
    """
    begun = checked = time.monotonic()
    led: list[FramedConnection] = []
    try:
        while True:
            undone = []
            for message in messages:
                if message.error is not None:
                    return message
                if not message.done:
                    undone.append(message)
            if not undone:
                return None
            now = time.monotonic()
            moved = max(begun, *map(_MOVED_AT, undone))
            deadline = moved + seconds
            if now > deadline:
                undone[0].error = TimeoutError("timed out")
                return undone[0]
            if now > max(moved, checked) + ASK_SECONDS:
                check()
                checked = time.monotonic()
            limit = min(deadline - now, ASK_SECONDS)
            needed = set(map(_CONNECTION, filterfalse(_IS_SENT, undone))).difference(led)
            led += filter(_LEAD, needed)
            if any([*map(_READ, led)]):
                continue
            readable = [*filter(_IS_EXPECTING, led)]
            if not readable:
                undone[0].connection.await_change(undone[0], limit + 0.001)
                continue
            poll = select.poll()
            for connection in readable:
                poll.register(connection.socket, select.POLLIN)
            poll.poll(1e3 * (limit if needed.issubset(led) else min(_POLL_SECONDS, limit)) + 1)
    finally:
        for connection in led:
            connection.release()


def have_arrived(messages: Sequence[Message]) -> bool:
    """Read what has arrived, unless another thread does; return at once whether all messages are done.

    Args:
        messages: the messages, of any connections.
    """
    for connection in {message.connection for message in messages if not message.done}:
        if connection.lead():
            while connection.read():
                pass
            connection.release()
    return all(message.done for message in messages)


class _EarlyMessage:
    """Message that has arrived, in full or in part, before it was expected.

    Attributes:
        tag: its tag.
        content: what has arrived.
        complete: whether that is all.
        expected: the message that is expected now; None before.
    """

    def __init__(self, tag: int) -> None:
        self.tag = tag
        self.content = bytearray()
        self.complete = False
        self.expected: Message | None = None


class FramedConnection:
    """Non-blocking connection to one process.

    Args:
        connected: the connected socket.
        timeout: seconds without a byte after which a wait ends.
        in_order: whether messages arrive in the order in which they are expected, and none before it is.
        has_backlog: called when the kernel has no room for all that is sent or expected.

    Attributes:
        moved_at: when the last byte was sent or received, on the clock of `time.monotonic`.
    """

    def __init__(
        self,
        connected: socket.socket,
        timeout: float,
        in_order: bool,
        has_backlog: Callable[[], None],
    ) -> None:
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.timeout = timeout
        self.moved_at = 0.0
        self._in_order = in_order
        self._has_backlog = has_backlog
        self._sending = threading.Lock()
        self._outgoing: deque[Message] = deque()
        self._has_reported = False  # a mismatch, to the other process
        self._changed = threading.Condition()  # guards what follows, up to the header
        self._expected: list[Message] = []
        self._expected_bytes = 0
        self._early: list[_EarlyMessage] = []
        self._is_led = False
        self._error: Exception | None = None
        # Used only by the thread that leads.
        self._header = bytearray(_HEADER.size)
        self._incoming: Message | _EarlyMessage | None = None
        self._left = _HEADER.size  # bytes of the header, or of the body of the incoming message

    def send(self, body: memoryview, tag: int) -> Message:
        """Start to send a message."""
        message = Message(self, body, tag, is_sent=True)
        with self._sending:
            if self._error is not None:
                if isinstance(self._error, MismatchError) and not self._has_reported:
                    # The header alone: by it the other process sees the mismatch, too.
                    self._has_reported = True
                    with suppress(OSError):
                        self.socket.send(_HEADER.pack(_MAGIC, tag, len(body)))
                message.finish(self._error)
                return message
            self._outgoing.append(message)
        if not self.write():
            self._has_backlog()
        return message

    def write(self) -> bool:
        """Send as much as the kernel accepts; return whether that is all."""
        try:
            with self._sending:
                while self._outgoing:
                    message = self._outgoing[0]
                    message.left -= self.socket.sendmsg(message.parts())
                    self.moved_at = time.monotonic()
                    if not message.left:
                        message.done = True
                        self._outgoing.popleft()
        except BlockingIOError:
            return False
        except (OSError, ValueError) as error:
            self.fail(error)
        return True

    def expect(self, room: memoryview, tag: int) -> Message:
        """Start to receive a message."""
        message = Message(self, room, tag, is_sent=False)
        with self._changed:
            early = next((each for each in self._early if each.tag == tag and each.expected is None), None)
            if early is not None and early.complete:
                self._early.remove(early)
                self._deliver(early, message)
            elif self._error is not None:
                message.finish(self._error)
            elif early is not None:
                early.expected = message
            else:
                self._expected.append(message)
                self._expected_bytes += len(room)
        if self.reads_ahead:
            self._has_backlog()
        return message

    @property
    def is_expecting(self) -> bool:
        """Whether a message is expected, or on the way."""
        return bool(self._expected) or self._incoming is not None

    @property
    def reads_ahead(self) -> bool:
        """Whether more is expected than the kernel buffers, and no thread may be waiting for it yet."""
        return self._in_order and self._expected_bytes + self._left > KERNEL_BYTES

    def lead(self) -> bool:
        """Become the thread that reads, up to `release`; return whether no other thread is."""
        with self._changed:
            is_first = not self._is_led
            self._is_led = True
            return is_first

    def release(self) -> None:
        """Let another thread read."""
        with self._changed:
            self._is_led = False
            self._changed.notify_all()

    def await_change(self, message: Message, seconds: float) -> None:
        """Wait while another thread reads or sends a message."""
        with self._changed:
            if not message.done and (self._is_led or message.is_sent):
                self._changed.wait(seconds)

    def read(self) -> bool:
        """Read what has arrived of a header or a body; return whether there was anything, or the connection failed."""
        try:
            return self.is_expecting and self._read()
        except (OSError, ValueError, MismatchError) as error:
            self.fail(error)
            return True

    def _read(self) -> bool:
        incoming = self._incoming
        if isinstance(incoming, Message):
            rooms = [incoming.body[len(incoming.body) - self._left :]]
        elif incoming is not None:
            rooms = [memoryview(bytearray(min(self._left, _CHUNK_BYTES)))]
        else:
            rooms = [memoryview(self._header)[_HEADER.size - self._left :]]
            if self._in_order and self._expected:
                rooms.append(self._expected[0].body)
        try:
            count = self.socket.recvmsg_into(rooms)[0]
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionError("connection closed by the other process")
        self.moved_at = time.monotonic()
        if incoming is None:
            in_header = min(count, self._left)
            self._left -= in_header
            if self._left:
                return True
            incoming = self._begin()
            count -= in_header
        elif isinstance(incoming, _EarlyMessage):
            incoming.content += rooms[0][:count]
        self._left -= count
        if not self._left:
            self._complete(incoming)
        return True

    def _begin(self) -> Message | _EarlyMessage:
        """Take the message whose header has arrived as the one that is received."""
        magic, tag, self._left = _HEADER.unpack(self._header)
        with self._changed:
            expected = None
            for message in self._expected[:1] if self._in_order else self._expected:
                if message.tag == tag:
                    expected = message
                    break
            differs = self._in_order if expected is None else len(expected.body) != self._left
            if magic != _MAGIC or differs:
                raise MismatchError
            if expected is None:
                early = _EarlyMessage(tag)
                self._early.append(early)
                self._incoming = early
                return early
            self._expected.remove(expected)
            self._expected_bytes -= len(expected.body)
            self._incoming = expected
            return expected

    def _complete(self, message: Message | _EarlyMessage) -> None:
        with self._changed:
            self._incoming = None
            self._left = _HEADER.size
            if isinstance(message, Message):
                message.done = True
            elif message.expected is None:
                message.complete = True
            else:
                self._early.remove(message)
                self._deliver(message, message.expected)
            self._changed.notify_all()

    def _deliver(self, early: _EarlyMessage, message: Message) -> None:
        """Copy an early message to the one that is expected now."""
        if len(early.content) != len(message.body):
            message.finish(MismatchError())
            return
        message.body[:] = early.content
        message.finish()

    def fail(self, error: Exception) -> None:
        """End all messages with an error, and those to come."""
        with self._sending:
            self._error = self._error or error
            unfinished = list(self._outgoing)
            self._has_reported |= bool(unfinished)  # by a header that has left
            self._outgoing.clear()
        with self._changed:
            unfinished += self._expected
            unfinished += [each.expected for each in self._early if each.expected is not None]
            if isinstance(self._incoming, Message):
                unfinished.append(self._incoming)
            for message in unfinished:
                message.finish(self._error)
            self._expected.clear()
            self._expected_bytes = 0
            self._incoming = None
            self._left = _HEADER.size
            self._changed.notify_all()

    def notify(self) -> None:
        """Wake up the threads that wait for a message to be sent."""
        with self._changed:
            self._changed.notify_all()


class PeerSockets:
    """Connections to other processes, by rank.

    A sender writes what the kernel accepts in its own thread; a helper thread writes the rest.

    Args:
        sockets: connected sockets by rank.
        timeout: seconds without a byte on a connection after which a wait ends.
        in_order: whether messages arrive in the order in which they are expected. Then the helper thread also reads
            those that the kernel has no room for.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], timeout: float, in_order: bool) -> None:
        self._pipe = WakePipe()
        self._lock = threading.Lock()
        self._helper: threading.Thread | None = None
        self._closed = False
        self.connections = {
            rank: FramedConnection(connected, timeout, in_order, self._wake_helper)
            for rank, connected in sorted(sockets.items())
        }
        close_in_children(self)

    def _wake_helper(self) -> None:
        """Have the helper thread move what the kernel has no room for."""
        with self._lock:
            if self._closed:
                return
            if self._helper is None:
                self._helper = threading.Thread(target=self._run_helper, name="dadplug-sockets", daemon=True)
                self._helper.start()
            self._pipe.wake()

    def _run_helper(self) -> None:
        while not self._closed:
            poll, limit = select.poll(), None
            poll.register(self._pipe, select.POLLIN)
            for connection in self.connections.values():
                events = 0 if connection.write() else select.POLLOUT
                if connection.reads_ahead:
                    if connection.lead():
                        while connection.read():
                            pass
                        connection.release()
                        events |= select.POLLIN
                    else:
                        limit = 1e3 * _POLL_SECONDS
                if events:
                    poll.register(connection.socket, events)
                connection.notify()
            for descriptor, _ in poll.poll(limit):
                if descriptor == self._pipe.fileno():
                    self._pipe.clear()

    def shut_down(self) -> None:
        """End all messages with an error, and the waits of other threads. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._pipe.wake()
        for connection in self.connections.values():
            connection.fail(ConnectionError("connection closed by this process"))
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections, which no thread waits on any more. May be called twice."""
        self.shut_down()
        if self._helper not in (None, threading.current_thread()):
            self._helper.join()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close the sockets alone."""
        for connection in self.connections.values():
            with suppress(OSError):
                connection.socket.close()
        self._pipe.close()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, which share its memory."""
    return tensor.view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
