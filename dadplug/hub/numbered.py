"""Numbered frames in both directions over a connection that may be lost and replaced. Without threads and locks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .continuation import KeptFrames
from .frames import PIECE_BYTES, Head, Kind, frames
from .receiver import FrameReceiver
from .secure_socket import SecureSocket
from .stream import SendQueue, Stream

_PING_BYTES = 1 << 22  # received bytes after which the other end gets an acknowledgement
_MOST_EXPECTED = 1 << 17  # bytes that may arrive before they are decrypted


class NumberedFrames:
    """Frames that a site sends and receives on one channel.

    Args:
        rank: slot of the site.
        room: returns room for the body of a frame that is arriving.
        complete: takes a frame that is complete, in the room that `room` has returned.

    Attributes:
        received: number of frames that have been received, pings excluded.
        bytes_sent: bytes of the frames that have been handed over for sending.
        blocked: whether the connection has no room for what is to be sent.
        seal: function that cuts a message into frames, where it is to be sealed.
        kept: where the frames of messages are kept; None to keep none.
        payload_bytes: bytes of a frame's body, at most, where it is a piece of a payload.
        held: whether messages are not sent, since the other end does not know this stream.
    """

    def __init__(
        self, rank: int, room: Callable[[Head], memoryview], complete: Callable[[Head, memoryview], None]
    ) -> None:
        self._rank, self._room, self._complete = rank, room, complete
        self._queue = SendQueue()
        self._stream: Stream | None = None
        self.blocked = False
        self._unacknowledged = 0  # bytes received since the last ping
        self.received = 0
        self.bytes_sent = 0
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
        self._queue = SendQueue()
        self._unacknowledged = self.received = 0
        self.held = held

    def release(self, frames: Iterable[bytes]) -> None:
        """Send some frames, and then all messages again."""
        for frame in frames:
            self.append(frame)
        self.held = False

    def attach(self, connection: SecureSocket, received: int) -> None:
        """Take a new connection, and send again what the last one has lost.

        Args:
            connection: the connection, after the answer to `Hello`.
            received: number of frames that the other end has received before.

        Raises:
            FrameError: if the other end cannot have received so many.
        """
        self._queue.resume(received)
        self._stream, self.blocked = Stream(connection), False
        self._receiver = FrameReceiver(connection, self._room)

    def detach(self) -> None:
        """Forget the connection, which is lost."""
        self._stream, self.blocked = None, False

    @property
    def idle(self) -> bool:
        """Whether the connection has taken all frames."""
        return not self.blocked and self._queue.following is None

    @property
    def unsent_bytes(self) -> int:
        """Bytes of the frames that the connection has not taken."""
        return self._queue.unsent_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of the frames that the other end has not acknowledged."""
        return self._queue.nbytes

    def append(self, frame: bytes) -> None:
        """Append a frame to those that are to be sent."""
        self._queue.append(frame)
        self.bytes_sent += len(frame)

    def append_message(self, head: Head, content: memoryview | bytes) -> None:
        """Append a message, cut into frames; an empty one as a frame without a body."""
        for frame in self._cut(head, content):
            if self.kept is not None:
                self.kept.append(head, frame)
            if not self.held:
                self.append(frame)

    def _cut(self, head: Head, content: memoryview | bytes) -> Iterable[bytes]:
        if not len(content):
            return (head.pack(),)
        if self.seal is not None:
            return self.seal(head, memoryview(content))
        most = self.payload_bytes if head.kind is Kind.PAYLOAD else PIECE_BYTES  # those of sums are equal at all sites
        if len(content) <= most:
            return (b"".join((head.pack_piece(0, len(content)), content)),)
        return (b"".join(parts) for parts in frames(head, memoryview(content), most))

    def ping(self) -> None:
        """Send an acknowledgement at the next opportunity."""
        if self._stream is not None and not self._stream.notes:
            self._stream.notes.append(Head(Kind.PING, self._rank, self.received).pack())
            self._unacknowledged = 0

    def flush(self) -> None:
        """Send as much as the connection takes.

        Raises:
            OSError: if the connection is lost.
        """
        if self._stream is not None and (self.blocked or self._queue.unsent_bytes or self._stream.notes):
            self.blocked = not self._stream.flush(self._queue)

    def expect(self, nbytes: int) -> None:
        """Let the connection become readable when so many bytes of frames have arrived, with those that have already.

        To be called after `receive`. A hint, see `SecureSocket.expect`.

        Args:
            nbytes: the number; 1 for any.
        """
        if self._stream is not None:
            self._stream.connection.expect(max(1, min(nbytes, _MOST_EXPECTED) - self._receiver.filled))

    def receive(self) -> bool:
        """Receive what has arrived.

        Returns:
            Whether anything has.

        Raises:
            OSError: if the connection is lost.
            FrameError: if the other end does not keep to the protocol.
        """
        receiver, before = self._receiver, self._receiver.nbytes
        while self._stream is not None and (head := receiver.receive()) is not None:
            self._unacknowledged += head.length
            if head.kind is Kind.PING:
                self._queue.acknowledge(head.step)
            else:
                self.received += 1
                self._complete(head, receiver.body)
        if self._unacknowledged >= _PING_BYTES:
            self.ping()
        return receiver.nbytes > before
