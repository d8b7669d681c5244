"""Streams of frames between a site and the hub that survive the loss of their connection.

Both ends number the frames that they send, pings excluded. A frame is kept until the other end has acknowledged it (the
field `step` of its `PING` frames is the number of frames that it has received). When the connection is lost, the site
dials again, both ends tell how many frames they have received, and what is missing is sent again. So a short outage is
invisible to everything above: no frame is lost, doubled or reordered.
"""

from __future__ import annotations

import ssl
from collections import deque
from typing import Literal

from .frames import FrameError

Progress = Literal["done", "read", "write"]

_CHUNK = 1 << 17  # bytes read at a time


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
        self._kept: deque[bytes] = deque()
        self._sent = 0  # of the kept ones

    def append(self, frame: bytes) -> None:
        """Append a frame, head and body."""
        self._kept.append(frame)
        self.nbytes += len(frame)
        self.unsent_bytes += len(frame)

    @property
    def following(self) -> bytes | None:
        """The frame to be sent next."""
        return self._kept[self._sent] if self._sent < len(self._kept) else None

    def advance(self) -> None:
        """Count the next frame as sent."""
        self.unsent_bytes -= len(self._kept[self._sent])
        self._sent += 1

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

    def __init__(self, connection: ssl.SSLSocket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.notes: deque[bytes] = deque()
        self._buffer = bytearray(_CHUNK)
        self._view = memoryview(self._buffer)
        self._unsent: bytes | None = None  # OpenSSL wants the same bytes again

    def send(self, frame: bytes) -> Progress:
        """Send a frame; on any other answer than "done", call again with the same one.

        Returns:
            "done", or what the connection has to be ready for.

        Raises:
            OSError: if the connection is lost.
        """
        assert self._unsent is None or self._unsent is frame
        try:
            self.connection.send(frame)
        except ssl.SSLWantWriteError:
            self._unsent = frame
            return "write"
        except ssl.SSLWantReadError:
            self._unsent = frame
            return "read"
        self._unsent = None
        return "done"

    def flush(self, queue: SendQueue) -> Progress:
        """Send notes and frames of a queue as long as the connection takes them."""
        while True:
            frame = queue.following
            note = bool(self.notes) and (frame is None or self._unsent is not frame)
            if note:
                frame = self.notes[0]
            if frame is None:
                return "done"
            progress = self.send(frame)
            if progress != "done":
                return progress
            if note:
                self.notes.popleft()
            else:
                queue.advance()

    def receive(self) -> memoryview | None:
        """Receive what has arrived, up to a limit; None if nothing has.

        The bytes are valid until the next call. Call again until None: decrypted bytes do not wake up a poll.

        Raises:
            OSError: if the connection is lost, or the other end has closed it.
        """
        filled = 0
        while filled < _CHUNK:
            try:
                count = self.connection.recv_into(self._view[filled:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except OSError:
                if filled:
                    break  # the error comes again
                raise
            if not count:
                if filled:
                    break
                raise ConnectionError("the other end has closed the connection")
            filled += count
        return self._view[:filled] if filled else None

    def close(self) -> None:
        """Close the connection without a TLS closing alert."""
        self.connection.close()
