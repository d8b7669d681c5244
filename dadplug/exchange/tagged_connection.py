"""Connection between two processes whose messages have tags.

Worker threads of hierarchical groups forward messages while the main thread computes, so that those of a connection
have no order that both ends know. Each has a tag, and one that arrives before it is expected is kept until it is.

A thread that waits for a message reads whatever arrives on its connection; others that wait on the same connection are
notified by it.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ..errors import MismatchError

_HEADER = struct.Struct("<IIQ")  # magic number, tag, bytes of the body
_MAGIC = 0x64616474
_CHUNK_BYTES = 1 << 16  # read at once of a message that is not expected yet


class TaggedWork(dist.Work):
    """Message that is sent or received.

    Args:
        connection: its connection.
        body: the bytes to send, or room for those received.
        is_sent: whether it is sent.

    Attributes:
        done: whether it has been sent or received, or never will be.
        error: why it never will be.
    """

    def __init__(self, connection: TaggedConnection, body: memoryview, is_sent: bool) -> None:
        super().__init__()
        self.body = body
        self.is_sent = is_sent
        self.done = False
        self.error: Exception | None = None
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

    def finish(self, error: Exception | None = None) -> None:
        """Take note that it has been sent or received, or never will be."""
        self.error, self.done = error, True


class _EarlyMessage:
    """Message that has arrived, in full or in part, before it was expected.

    Attributes:
        content: what has arrived.
        complete: whether that is all.
        work: the message that is expected now; None before.
    """

    def __init__(self) -> None:
        self.content = bytearray()
        self.complete = False
        self.work: TaggedWork | None = None


class _Outgoing:
    """Message to be sent, with the bytes that are left of its header and body."""

    def __init__(self, work: TaggedWork, tag: int) -> None:
        self.work = work
        self.parts = [memoryview(_HEADER.pack(_MAGIC, tag, len(work.body))), work.body]

    def advance(self, count: int) -> bool:
        """Count bytes as sent; return whether none are left."""
        while self.parts and count >= len(self.parts[0]):
            count -= len(self.parts.pop(0))
        if self.parts:
            self.parts[0] = self.parts[0][count:]
        return not self.parts


class TaggedConnection:
    """Connection to one process.

    Args:
        connected: the connected socket.
        timeout: seconds without a byte after which a wait ends.
        mismatch: text of the error for a message that does not fit.
        has_backlog: called when the kernel does not accept all that is to be sent.
    """

    def __init__(
        self, connected: socket.socket, timeout: float, mismatch: str, has_backlog: Callable[[], None]
    ) -> None:
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.timeout = timeout
        self._mismatch = mismatch
        self._has_backlog = has_backlog
        self._sending = threading.Lock()
        self._outgoing: deque[_Outgoing] = deque()
        self._changed = threading.Condition()  # guards what follows, up to the header
        self._expected: defaultdict[int, deque[TaggedWork]] = defaultdict(deque)
        self._early: defaultdict[int, deque[_EarlyMessage]] = defaultdict(deque)
        self._is_read = False
        self._error: Exception | None = None
        self._moved_at = 0.0  # when the last byte was sent or received
        # Used only by the thread that reads.
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)
        self._header, self._header_left = bytearray(_HEADER.size), _HEADER.size
        self._incoming: TaggedWork | _EarlyMessage | None = None
        self._left = 0  # bytes of its body

    def send(self, body: memoryview, tag: int) -> TaggedWork:
        """Start to send a message."""
        work = TaggedWork(self, body, True)
        with self._sending:
            if self._error is not None:
                work.finish(self._error)
                return work
            self._outgoing.append(_Outgoing(work, tag))
        self.write()
        if not work.done:
            self._has_backlog()
        return work

    def write(self) -> bool:
        """Send as much as the kernel accepts; return whether that is all."""
        error = None
        with self._sending:
            try:
                while self._outgoing:
                    sent = self.socket.sendmsg(self._outgoing[0].parts)
                    self._moved_at = time.monotonic()
                    if self._outgoing[0].advance(sent):
                        self._outgoing.popleft().work.finish()
            except BlockingIOError:
                return False
            except (OSError, ValueError) as closed:
                error = closed
        if error is not None:
            self.fail(error)
        return True

    def expect(self, room: memoryview, tag: int) -> TaggedWork:
        """Start to receive a message."""
        work = TaggedWork(self, room, False)
        with self._changed:
            waiting = self._early.get(tag, ())
            early = next((each for each in waiting if each.work is None), None)
            if early is not None and early.complete:
                self._early[tag].remove(early)
                self._deliver(early, work)
            elif self._error is not None:
                work.finish(self._error)
            elif early is not None:
                early.work = work
            else:
                self._expected[tag].append(work)
        return work

    def wait(self, work: TaggedWork, seconds: float) -> None:
        """Wait until a message is done, and read what arrives meanwhile unless another thread does."""
        begun = time.monotonic()
        while not work.done:
            now, deadline = time.monotonic(), max(begun, self._moved_at) + seconds
            if now > deadline:
                raise RuntimeError("timed out")
            with self._changed:
                if work.done:
                    return
                if self._is_read or work.is_sent:
                    self._changed.wait(deadline - now + 0.001)
                    continue
                self._is_read = True
            try:
                self._read_until(work, deadline)
            finally:
                with self._changed:
                    self._is_read = False
                    self._changed.notify_all()

    def _read_until(self, work: TaggedWork, deadline: float) -> None:
        """Read until a message is done, nothing has come up to the deadline, or the connection has failed."""
        try:
            while not work.done:
                if not self._read() and not work.done:
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
        if self._incoming is None:
            room = memoryview(self._header)[_HEADER.size - self._header_left :]
        elif isinstance(self._incoming, TaggedWork):
            room = self._incoming.body[len(self._incoming.body) - self._left :]
        else:
            room = memoryview(bytearray(min(self._left, _CHUNK_BYTES)))
        try:
            count = self.socket.recv_into(room)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionError("connection closed by the other process")
        self._moved_at = time.monotonic()
        if self._incoming is None:
            self._header_left -= count
            if not self._header_left:
                self._begin()
            return True
        self._left -= count
        if isinstance(self._incoming, _EarlyMessage):
            self._incoming.content += room[:count]
        if not self._left:
            self._complete(self._incoming)
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
        if magic != _MAGIC or (isinstance(expected, TaggedWork) and len(expected.body) != self._left):
            raise MismatchError(self._mismatch)

    def _complete(self, message: TaggedWork | _EarlyMessage) -> None:
        with self._changed:
            if isinstance(message, TaggedWork):
                message.finish()
            elif message.work is None:
                message.complete = True
            else:
                for waiting in self._early.values():
                    if message in waiting:
                        waiting.remove(message)
                self._deliver(message, message.work)
            self._changed.notify_all()

    def _deliver(self, early: _EarlyMessage, work: TaggedWork) -> None:
        """Hand an early message to the one who expects it now."""
        if len(early.content) != len(work.body):
            work.finish(MismatchError(self._mismatch))
            return
        work.body[:] = early.content
        work.finish()

    def fail(self, error: Exception) -> None:
        """End all messages with an error, and those to come."""
        with self._sending:
            self._error = self._error or error
            for each in self._outgoing:
                each.work.finish(self._error)
            self._outgoing.clear()
        with self._changed:
            unfinished = [work for works in self._expected.values() for work in works]
            unfinished += [each.work for early in self._early.values() for each in early if each.work is not None]
            if isinstance(self._incoming, TaggedWork):
                unfinished.append(self._incoming)
            for work in unfinished:
                work.finish(self._error)
            self._expected.clear()
            self._changed.notify_all()

    def notify(self) -> None:
        """Wake up the threads that wait for a message to be sent."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Close the socket."""
        with suppress(OSError):
            self.socket.close()
