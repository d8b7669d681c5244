"""Streams of frames between a site and the hub that survive the loss of their connection.

Both ends number the frames that they send, pings excluded. A frame is kept until the other end has acknowledged it (the
field `step` of its `PING` frames is the number of frames that it has received). When the connection is lost, the site
dials again, both ends tell how many frames they have received, and what is missing is sent again. So a short outage is
invisible to everything above: no frame is lost, doubled or reordered.
"""

from __future__ import annotations

from collections import deque

from ..errors import FrameError
from .secure_socket import SecureSocket

PackedFrame = bytes | bytearray  # head and body

_CHUNK = 1 << 17  # bytes that are encrypted before they are sent, or read at a time


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

    def append(self, frame: PackedFrame) -> None:
        """Append a frame, head and body."""
        self._kept.append(frame)
        self.nbytes += len(frame)
        self.unsent_bytes += len(frame)

    @property
    def following(self) -> PackedFrame | None:
        """The frame to be sent next."""
        return self._kept[self._sent] if self._sent < len(self._kept) else None

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
        connection.setblocking(False)
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

    def receive(self) -> memoryview | None:
        """Receive what has arrived, up to a limit; None if nothing has.

        Call again until None: decrypted bytes do not wake up a poll.

        Raises:
            OSError: if the connection is lost, or the other end has closed it.
        """
        view, filled = memoryview(bytearray(_CHUNK)), 0
        while filled < _CHUNK:
            try:
                count = self.connection.recv_into(view[filled:])
            except OSError:
                if filled:
                    break  # the error comes again
                raise
            if not count:
                if count is None or filled:
                    break
                raise ConnectionError("the other end has closed the connection")
            filled += count
        return view[:filled] if filled else None

    def close(self) -> None:
        """Close the connection without a TLS closing alert."""
        self.connection.close()
