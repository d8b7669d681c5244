"""Frames as tests read them: by the package's receiver, from bytes in parts of any size, or from a connection."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from dadplug.hub.wire.messages import Head
from dadplug.hub.wire.streams import FrameReceiver


class Frame(NamedTuple):
    """Frame that has been received."""

    head: Head
    body: bytes


class Parts:
    """Connection whose bytes arrive in parts."""

    def __init__(self, *parts: bytes) -> None:
        self.waiting = deque(memoryview(part) for part in parts if part)

    def recv_into(self, buffer: memoryview) -> int | None:
        if not self.waiting:
            return None
        part = self.waiting.popleft()
        count = min(len(part), len(buffer))
        buffer[:count] = part[:count]
        if count < len(part):
            self.waiting.appendleft(part[count:])
        return count


class Reader:
    """Reader of a connection, such as `Parts`."""

    def __init__(self, connection: Any, room: Callable[[Head], memoryview] | None = None) -> None:
        self._receiver = FrameReceiver(connection, room or (lambda head: memoryview(bytearray(head.length))))

    def next(self) -> Frame | None:
        head = self._receiver.receive()
        return None if head is None else Frame(head, bytes(self._receiver.body))


def read(*parts: bytes) -> list[Frame]:
    """Return the frames that bytes hold."""
    reader, found = Reader(Parts(*parts)), []
    while (frame := reader.next()) is not None:
        found.append(frame)
    return found
