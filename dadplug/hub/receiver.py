"""Reader of frames that receives each body where it belongs, without copies in between."""

from __future__ import annotations

from collections.abc import Callable

from .frames import HEAD_BYTES, Head
from .secure_socket import SecureSocket


class FrameReceiver:
    """Reader of one connection's frames, which arrive in parts of any size. Not to be used by two threads at once.

    Args:
        connection: the connection; it may block or not.
        room: returns room for the body of a frame by its head, and raises an error to refuse the frame.

    Attributes:
        head_bytes: the last head, as it has arrived.
        body: body of the last frame; what `room` has returned for it.
        nbytes: bytes received so far.
    """

    def __init__(self, connection: SecureSocket, room: Callable[[Head], memoryview]) -> None:
        self._connection = connection
        self._room = room
        self.head_bytes = memoryview(bytearray(HEAD_BYTES))
        self._head: Head | None = None
        self._target = self.head_bytes
        self._filled = 0
        self.body = memoryview(b"")
        self.nbytes = 0

    @property
    def missing(self) -> int:
        """Bytes of the frame that is arriving which are known to follow."""
        return len(self._target) - self._filled if self._head is not None else 0

    @property
    def filled(self) -> int:
        """Bytes of the incomplete frame."""
        return self._filled

    def receive(self) -> Head | None:
        """Receive the next frame.

        Returns:
            Its head; None where more has to arrive first. Call again until None: decrypted bytes wake up no poll.

        Raises:
            FrameError: if what arrives is no frame.
            OSError: if the connection is lost, or the other end has closed it.
        """
        while True:
            target, filled = self._target, self._filled
            count = self._connection.recv_into(target[filled:] if filled else target)
            if count is None:
                return None
            if not count:
                raise ConnectionError("the other end has closed the connection")
            self.nbytes += count
            filled += count
            if filled < len(target):
                self._filled = filled
                continue
            self._filled = 0
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
