"""Streams of frames between a site and the hub that survive the loss of their connection.

Both ends number the frames that they send, pings excluded. A frame is kept until the other end has acknowledged it (the
field `step` of its `PING` frames is the number of frames that it has received). When the connection is lost, the site
connects again, both ends tell how many frames they have received, and what is missing is sent again. So a short outage
is invisible to everything above: no frame is lost, doubled or reordered.

`PeerStream` is a byte stream between two sites over the hub, inside of such frames, with flow control of its own. At
each of the two sites it has two connected local sockets. The program uses one of them as if it were a TCP
connection; the tunnel has the other. A message frame of a stream has a kind of its own (its tag):

- `DATA`: bytes; the offset of the head counts all bytes of the stream before them;
- `ROOM`: how many bytes of the stream may be sent in all, 8 bytes. A receiver grants more once it has passed bytes on
  to its program, so that a program that does not read holds up its own stream only, and neither site nor hub has to
  store more than the window;
- `END`: nothing follows; the program has closed its socket.

**Redialing.** A site whose hub is away tries again after pauses that grow with the outage, so that many sites do not
all connect at once, and a hub that is away for hours costs nothing. Every site has tried within `return_seconds` after
the end of an outage. A hub that gave sites up sooner would lose those that come last.
"""

from __future__ import annotations

import random
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any

from ...errors import FrameError
from ...exchange.framing import send_parts
from ..secure.sealing import OPEN_BYTES, Opener, Sealer
from ..secure.secure_socket import SecureSocket
from .messages import HEAD_BYTES, PIECE_BYTES, Head, Kind, frames

PackedFrame = bytes | bytearray  # head and body

LIMIT = 1 << 28  # bytes of frames that are kept
_KEPT = (Kind.PAYLOAD, Kind.SUMMAND, Kind.END)
_CHUNK = 1 << 17  # bytes that are encrypted before they are sent, or read at a time
_PING_BYTES = 1 << 22  # received bytes after which the other end gets an acknowledgement
_MOST_EXPECTED = 1 << 17  # bytes that may arrive before they are decrypted


class FrameReceiver:
    """Reader of one connection's frames, which arrive in parts of any size. Not to be used by two threads at once.

    Args:
        connection: the connection; it may block or not.
        room: returns room for the body of a frame by its head, and raises an error to refuse the frame.

    Attributes:
        head_bytes: the last head, as it has arrived.
        body: body of the last frame; what `room` has returned for it.
        nbytes: bytes received so far.
        filled: bytes of the incomplete frame.
    """

    def __init__(self, connection: SecureSocket, room: Callable[[Head], memoryview]) -> None:
        self._connection = connection
        self._room = room
        self.head_bytes = memoryview(bytearray(HEAD_BYTES))
        self._head: Head | None = None
        self._target = self.head_bytes
        self.filled = 0
        self.body = memoryview(b"")
        self.nbytes = 0

    @property
    def missing(self) -> int:
        """Bytes of the frame that is arriving which are known to follow."""
        return len(self._target) - self.filled if self._head is not None else 0

    def receive(self) -> Head | None:
        """Receive the next frame.

        Returns:
            Its head; None where more has to arrive first. Call again until None: decrypted bytes wake up no poll.

        Raises:
            FrameError: if what arrives is no frame.
            OSError: if the connection is lost, or the other end has closed it.
        """
        while True:
            target, filled = self._target, self.filled
            count = self._connection.recv_into(target[filled:] if filled else target)
            if count is None:
                return None
            if not count:
                raise ConnectionError("the other end has closed the connection")
            self.nbytes += count
            filled += count
            if filled < len(target):
                self.filled = filled
                continue
            self.filled = 0
            if self._head is None:
                head = Head.unpack(target)
                if head.length:
                    self._target = self._room(head)
                    self._head = head
                    continue
                self.body = target[:0]
            else:
                head, self._head = self._head, None
                self.body, self._target = target, self.head_bytes
            return head


class SendQueue:
    """Frames to be sent, and those sent but not acknowledged.

    Attributes:
        acknowledged: number of frames that the other end has acknowledged.
        nbytes: bytes of all kept frames.
        unsent_bytes: bytes of those that have not been sent.
    """

    def __init__(self) -> None:
        self.acknowledged = 0
        self.nbytes = self.unsent_bytes = 0
        self._kept: deque[PackedFrame] = deque()
        self._sent = 0  # of the kept ones

    @property
    def count(self) -> int:
        """Number of frames since the beginning."""
        return self.acknowledged + len(self._kept)

    def append(self, frame: PackedFrame) -> None:
        """Append a frame, head and body."""
        self._kept.append(frame)
        self.nbytes += len(frame)
        self.unsent_bytes += len(frame)

    def take(self) -> PackedFrame | None:
        """Return the frame to be sent next, and count it as sent; None if there is none."""
        if self._sent == len(self._kept):
            return None
        frame = self._kept[self._sent]
        self.unsent_bytes -= len(frame)
        self._sent += 1
        return frame

    def acknowledge(self, count: int) -> None:
        """Forget the frames that the other end has received.

        Args:
            count: number of frames that it has received from the beginning.

        Raises:
            FrameError: if it cannot have received so many, or had received more before.
        """
        if not self.acknowledged <= count <= self.acknowledged + self._sent:
            raise FrameError(f"the other end acknowledges {count} frames, {self.acknowledged + self._sent} were sent")
        for _ in range(count - self.acknowledged):
            self.nbytes -= len(self._kept.popleft())
        self._sent -= count - self.acknowledged
        self.acknowledged = count

    def resume(self, count: int) -> None:
        """Send the frames again that were lost with a connection.

        Args:
            count: number of frames that the other end has received from the beginning.

        Raises:
            FrameError: if it cannot have received so many, or some of those that it lacks are no longer kept.
        """
        self.acknowledge(count)
        self._sent = 0
        self.unsent_bytes = self.nbytes


class Stream:
    """Encrypted connection that neither blocks nor waits. Not to be used by two threads at once.

    Args:
        connection: the connection, after handshake and verdict.

    Attributes:
        connection: the connection.
        notes: frames without a number, such as pings; `flush` sends them before those of the queue.
    """

    def __init__(self, connection: SecureSocket) -> None:
        connection.settimeout(0.0)
        self.connection = connection
        self.notes: deque[bytes] = deque()

    def flush(self, queue: SendQueue) -> bool:
        """Send notes and frames of a queue as long as the connection takes them.

        Returns:
            Whether it has taken all of them.

        Raises:
            OSError: if the connection is lost.
        """
        connection, notes = self.connection, self.notes
        while connection.flush():
            nbytes = 0
            while nbytes < _CHUNK:
                frame = notes.popleft() if notes else queue.take()
                if frame is None:
                    break
                connection.write(frame)
                nbytes += len(frame)
            if not nbytes:
                return True
        return False


class KeptFrames:
    """Frames that a site has sent, by step.

    Args:
        limit: bytes that are kept; beyond it the frames of all steps so far are forgotten.

    Attributes:
        limit: see above; None where `forget_before` is called after every step, so that no more than two are kept.
        first: step from which on all frames are kept.
    """

    def __init__(self, limit: int | None = LIMIT) -> None:
        self.limit = limit
        self._frames: dict[int, list[bytes]] = {}
        self._nbytes = 0
        self.first = 0

    def append(self, head: Head, frame: bytes) -> None:
        """Keep a frame, if it is of a kind that may have to be sent again."""
        if head.kind not in _KEPT or head.step < self.first:
            return
        self._frames.setdefault(head.step, []).append(frame)
        self._nbytes += len(frame)
        if self.limit is not None and self._nbytes > self.limit:
            self.first = head.step + 1
            self.forget_before(self.first)

    def forget_before(self, step: int) -> None:
        """Forget the frames of all steps before one."""
        for each in [each for each in self._frames if each < step]:
            self._nbytes -= sum(map(len, self._frames.pop(each)))

    def frames(self, first: int, last: int | None = None) -> list[bytes]:
        """Return the frames of some steps, in the order in which they were sent.

        Args:
            first: the first step.
            last: the last one; None for all.
        """
        steps = sorted(each for each in self._frames if first <= each <= (each if last is None else last))
        return [frame for step in steps for frame in self._frames[step]]


class NumberedStream:
    """Frames that one end sends and receives on one channel, over one connection after the other.

    Args:
        slot: slot of the site.

    Attributes:
        slot: slot of the site.
        queue: frames to the other end.
        received: number of frames that have been received, pings excluded.
        stream: the connection; None while it is lost.
        blocked: whether the connection has no room for what is to be sent.
    """

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.queue = SendQueue()
        self.received = 0
        self.stream: Stream | None = None
        self.blocked = False
        self._receiver: FrameReceiver
        self._unacknowledged = 0  # bytes received since the last ping

    def send(self, frame: PackedFrame) -> None:
        """Append a frame to those that are to be sent."""
        self.queue.append(frame)

    def take_over(self, stream: Stream, room: Callable[[Head], memoryview]) -> None:
        """Go on over a new connection; what the last one has lost is in the queue again.

        Args:
            stream: the connection.
            room: see `FrameReceiver`.
        """
        self.stream, self.blocked = stream, False
        self._receiver = FrameReceiver(stream.connection, room)
        self._unacknowledged = 0

    def detach(self) -> Stream | None:
        """Forget the connection, which is lost, and return it."""
        stream, self.stream, self.blocked = self.stream, None, False
        return stream

    def ping(self) -> None:
        """Send an acknowledgement at the next opportunity, unless other notes wait for it."""
        if self.stream is not None and not self.stream.notes:
            self.stream.notes.append(Head(Kind.PING, self.slot, self.received).pack())
            self._unacknowledged = 0

    def next_frame(self) -> Head | None:
        """Receive the next frame; see `FrameReceiver.receive`. A ping has been taken when it is returned."""
        head = self._receiver.receive()
        if head is not None and head.kind is Kind.PING:
            self.queue.acknowledge(head.step)
        elif head is not None:
            self.received += 1
        return head

    def count(self, nbytes: int) -> None:
        """Count bytes that have arrived, and acknowledge them from time to time."""
        self._unacknowledged += nbytes
        if self._unacknowledged >= _PING_BYTES:
            self.ping()


class NumberedFrames(NumberedStream):
    """Frames of a site's end of a channel, which cuts messages into them.

    Args:
        slot: slot of the site.
        complete: takes a frame that is complete.

    Attributes:
        seal: function that cuts a message into frames, where it is to be sealed.
        kept: where the frames of messages are kept; None to keep none.
        payload_bytes: bytes of a frame's body, at most, where it is a piece of a payload.
        held: whether messages are not sent, since the other end does not know this stream.
    """

    def __init__(self, slot: int, complete: Callable[[Head, memoryview], None]) -> None:
        super().__init__(slot)
        self._complete = complete
        self.seal: Callable[[Head, memoryview], Iterable[bytes]] | None = None
        self.kept: KeptFrames | None = None
        self.payload_bytes = PIECE_BYTES
        self.held = False

    def begin_anew(self, held: bool) -> None:
        """Begin a new stream in both directions; what has not been sent is forgotten.

        Args:
            held: whether messages are not sent until `release` is called.
        """
        self.detach()
        self.queue = SendQueue()
        self.received = 0
        self.held = held

    def release(self, frames: Iterable[bytes]) -> None:
        """Send some frames, and then all messages again."""
        for frame in frames:
            self.send(frame)
        self.held = False

    @property
    def idle(self) -> bool:
        """Whether the connection has taken all frames."""
        return not self.blocked and not self.queue.unsent_bytes

    def send_message(self, head: Head, content: memoryview | bytes) -> None:
        """Send a message, cut into frames; an empty one as a frame without a body."""
        for frame in self._cut(head, content):
            if self.kept is not None:
                self.kept.append(head, frame)
            if not self.held:
                self.send(frame)

    def _cut(self, head: Head, content: memoryview | bytes) -> Iterable[bytes]:
        if not len(content):
            return (head.pack(),)
        if self.seal is not None:
            return self.seal(head, memoryview(content))
        most = self.payload_bytes if head.kind is Kind.PAYLOAD else PIECE_BYTES  # those of sums are equal at all sites
        return (b"".join(parts) for parts in frames(head, memoryview(content), most))

    def flush(self) -> None:
        """Send as much as the connection takes.

        Raises:
            OSError: if the connection is lost.
        """
        if self.stream is not None and (self.blocked or self.queue.unsent_bytes or self.stream.notes):
            self.blocked = not self.stream.flush(self.queue)

    def expect(self, nbytes: int) -> None:
        """Let the connection become readable when so many bytes of frames have arrived, with those that have already.

        To be called after `receive`. A hint, see `SecureSocket.expect`.

        Args:
            nbytes: the number; 1 for any.
        """
        if self.stream is not None:
            self.stream.connection.expect(max(1, min(nbytes, _MOST_EXPECTED) - self._receiver.filled))

    def receive(self) -> bool:
        """Receive what has arrived.

        Returns:
            Whether anything has.

        Raises:
            OSError: if the connection is lost.
            FrameError: if the other end does not keep to the protocol.
        """
        receiver, before = self._receiver, self._receiver.nbytes
        while self.stream is not None and (head := self.next_frame()) is not None:
            if head.kind is not Kind.PING:
                self._complete(head, receiver.body)
        self.count(receiver.nbytes - before)
        return receiver.nbytes > before


HUB_SLOT = 0xFFFF  # in place of the slot of a site: the hub itself
WINDOW = 4 << 20  # bytes that a site may send before the other one has passed any of them on
ROOM_FORMAT = struct.Struct("<Q")
_BUFFER = 1 << 20  # bytes of the local sockets, as far as the system allows
_MOST_UNSENT = 1 << 20  # bytes that the connection has not taken, beyond which streams are held up


class Tag(IntEnum):
    """Kind of a message of a stream."""

    DATA = 0
    ROOM = 1
    END = 2


def pieces(buffers: Sequence[Any], most: int) -> Iterator[list[memoryview]]:
    """Cut buffers into the parts of frames, up to a number of bytes in all."""
    parts: list[memoryview] = []
    size = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        while len(view) and most:
            part = view[: min(OPEN_BYTES - size, most)]
            parts.append(part)
            size, most, view = size + len(part), most - len(part), view[len(part) :]
            if size == OPEN_BYTES:
                yield parts
                parts, size = [], 0
    if parts:
        yield parts


class PeerStream:
    """One end of a stream. Not to be used by two threads at once: a tunnel calls its methods with its lock held.

    Args:
        channel: number of the channel.
        slot: slot of the other site; `HUB_SLOT` for streams between a site and the hub.
        carrier: the frames among which those of this stream travel.
        most_kept: bytes that the carrier's other end has not acknowledged, beyond which the stream is held up.
        keys: what seals and opens the frames of this stream; None where they are not sealed.

    Attributes:
        channel: number of the channel.
        slot: slot of the other site.
        local: the tunnel's local socket.
        program: the program's local socket.
        incoming: bytes that have arrived, and that the local socket had no room for.
        sent: bytes that have been sent.
        granted: bytes that may be sent in all.
        spilled: bytes that the program has written to its local socket, and that have not been sent.
        ended: whether the other end knows that the program has closed its socket.
    """

    def __init__(
        self,
        channel: int,
        slot: int,
        carrier: NumberedStream,
        most_kept: int,
        keys: tuple[Sealer, Opener] | None = None,
    ) -> None:
        self.channel, self.slot = channel, slot
        self._carrier, self._most_kept, self._keys = carrier, most_kept, keys
        self.local, self.program = socket.socketpair()
        for each in (self.local, self.program):
            each.setblocking(False)
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self.sent = self.spilled = 0
        self.granted = WINDOW
        self.ended = False
        self.incoming: deque[memoryview] = deque()
        self._received = self._passed_on = 0
        self._announced = WINDOW
        self._peer_ended = False

    @property
    def sendable(self) -> int:
        """Bytes that may be sent at present."""
        queue = self._carrier.queue
        room = min(self.granted - self.sent, _MOST_UNSENT - queue.unsent_bytes, self._most_kept - queue.nbytes)
        return max(0, room)

    def send(self, tag: Tag, parts: Sequence[Any]) -> None:
        """Send the next frame of this stream.

        Args:
            tag: kind of the message.
            parts: its content, in parts, `OPEN_BYTES` at most.
        """
        content = b"".join(parts)
        offset = self.sent if tag is Tag.DATA else 0
        head = Head(Kind.MESSAGE, self.slot, 0, self.channel, offset, len(content), tag)
        self._carrier.send(head.pack() + content if self._keys is None else self._keys[0].frame(head, content))
        self.sent += len(content) * (tag is Tag.DATA)

    def take(self, head: Head, body: memoryview) -> None:
        """Take a frame that has arrived.

        Raises:
            SealingError: if it is sealed, and is not the next one that the other site has sent.
            FrameError: if it is damaged, its bytes are not the next ones, or more than was granted.
        """
        if self._keys is not None:
            body = memoryview(self._keys[1].open(head, body))
        match head.tag:
            case Tag.DATA:
                self._receive(head.offset, body)
            case Tag.ROOM:
                if len(body) != ROOM_FORMAT.size:
                    raise FrameError(f"a message of {len(body)} bytes where {ROOM_FORMAT.size} are due")
                self.granted = max(self.granted, ROOM_FORMAT.unpack(body)[0])
            case Tag.END:
                self.end()
            case _:
                raise FrameError(f"unknown message {head.tag} of a stream")

    def _receive(self, offset: int, body: memoryview) -> None:
        """Take bytes that have arrived, and their place in the stream."""
        other = "the other end" if self.slot == HUB_SLOT else f"site {self.slot}"
        if offset != self._received:
            raise FrameError(f"bytes of {other} begin at {offset}, and byte {self._received} comes next")
        if self._received + len(body) > self._announced:
            raise FrameError(f"{other} has sent more than the {self._announced} bytes that it may send")
        self._received += len(body)
        self.incoming.append(body)

    def end(self) -> None:
        """Let the program read the end of the stream, after what has arrived."""
        self._peer_ended = True

    def serve(self, passes_on: bool, sends: bool) -> bool:
        """Pass on what has arrived, and send what the program has written.

        Args:
            passes_on: whether something has arrived, or the local socket has room.
            sends: whether the program may have written something.

        Returns:
            Whether the stream is over, since the program has closed its socket.
        """
        if passes_on and (grant := self._pass_on()):
            self.send(Tag.ROOM, [grant])
        while sends and (room := self.sendable):
            content = self._read_program(room)
            if content is None:
                break
            if not content:
                self.end_program()
                return True
            self.spilled -= len(content)
            self.send(Tag.DATA, [content])
        return False

    def end_program(self) -> None:
        """Send that the program has closed its socket, unless that has been done."""
        if not self.ended:
            self.send(Tag.END, [b"\0"])
        self.ended = True

    def _read_program(self, most: int) -> bytes | None:
        """Return bytes that the program has written; none at the end of its stream, and None where there are none yet.

        Args:
            most: their number, at most; a frame takes no more than `OPEN_BYTES`.
        """
        try:
            return self.local.recv(min(most, OPEN_BYTES))
        except BlockingIOError:
            return None
        except OSError:  # the program has closed its socket with bytes unread
            return b""

    def _pass_on(self) -> bytes:
        """Write what has arrived to the local socket, as far as it has room.

        Returns:
            The content of a message `ROOM` that is to be sent; empty where none is due.
        """
        incoming = self.incoming
        try:
            self._passed_on += send_parts(self.local, incoming)
        except OSError:  # the program has closed its socket
            incoming.clear()
        if self._peer_ended and not incoming:
            with suppress(OSError):
                self.local.shutdown(socket.SHUT_WR)
        if self._passed_on + WINDOW - self._announced < WINDOW // 4:
            return b""
        self._announced = self._passed_on + WINDOW
        return ROOM_FORMAT.pack(self._announced)

    def close(self) -> None:
        """Close the tunnel's local socket: the program reads the end of the stream."""
        self.local.close()


DIAL_SECONDS = 5.0
"""Seconds for each part of the start of a connection."""
LONGEST_PAUSE = 30.0
"""Seconds between two attempts to connect, at most."""
HUB_TIMEOUT = 30.0
"""Seconds after which a hub that is away is given up, where all sites have to stay."""
ELASTIC_HUB_TIMEOUT = 24 * 3600.0
"""The same where training goes on without a site that leaves."""
_FIRST_PAUSE, _SHARE = 0.05, 0.1  # seconds; share of the outage


def longest_pause(outage: float) -> float:
    """Return the longest pause of a site between two attempts to connect.

    Args:
        outage: seconds since the hub was lost.
    """
    return min(LONGEST_PAUSE, max(_FIRST_PAUSE, _SHARE * outage))


def next_pause(outage: float) -> float:
    """Return the seconds until the next attempt to connect, at random, so that sites do not come all at once."""
    return longest_pause(outage) * random.uniform(0.5, 1.0)


def return_seconds(outage: float) -> float:
    """Return the seconds within which every site that can has connected again after an outage.

    Args:
        outage: its length in seconds.
    """
    # An attempt that has begun before the end may first have to fail.
    return longest_pause(outage) + min(2 * DIAL_SECONDS, max(_FIRST_PAUSE, outage))
