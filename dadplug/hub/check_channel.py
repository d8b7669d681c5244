"""Channel "check": the hub tells its time, takes bytes and sends bytes, so that a site can measure the way to it.

The frames are of the kind `PAYLOAD`, with the request as their tag:

- `TIME`: answered with the hub's time, in nanoseconds since 1970 (8 bytes);
- `UP`: bytes that the hub takes and forgets;
- `DOWN`: 8 bytes with a number; answered with as many bytes, in frames of the same tag.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from enum import IntEnum

from ..errors import FrameError
from .frames import Frame, Head, Kind, frames

MOST_BYTES = 8 << 20  # of a check, in each direction
NUMBER = struct.Struct("<Q")
_MOST_REQUESTS = 1000


class Request(IntEnum):
    """Tag of a frame."""

    TIME = 0
    UP = 1
    DOWN = 2


class CheckHandler:
    """Hub's part in the check of one site.

    Args:
        slot: slot of the site.
        clock: function that returns the time in nanoseconds since 1970.
    """

    def __init__(self, slot: int, clock: Callable[[], int] = time.time_ns) -> None:
        self._slot, self._clock = slot, clock
        self._bytes_in = self._bytes_out = self._requests = 0

    def handle(self, frame: Frame) -> list[bytes]:
        """Answer a frame.

        Args:
            frame: the frame.

        Returns:
            The frames of the answer.

        Raises:
            FrameError: if it is no request, or the site sends or asks for more than a check needs.
        """
        head, body = frame
        self._bytes_in += len(body)
        self._requests += 1
        if self._bytes_in > MOST_BYTES or self._requests > _MOST_REQUESTS:
            raise FrameError(f"a check of more than {MOST_BYTES} bytes or {_MOST_REQUESTS} requests")
        if head.tag == Request.TIME:
            return self._frames(head.tag, NUMBER.pack(self._clock()))
        if head.tag == Request.UP:
            return []
        if head.tag != Request.DOWN or len(body) != NUMBER.size:
            raise FrameError(f"an unknown request {head.tag} of {len(body)} bytes in a check")
        count = NUMBER.unpack(body)[0]
        self._bytes_out += count
        if self._bytes_out > MOST_BYTES:
            raise FrameError(f"a check that asks for more than {MOST_BYTES} bytes")
        return self._frames(head.tag, bytes(count))

    def _frames(self, tag: int, content: bytes) -> list[bytes]:
        head = Head(Kind.PAYLOAD, self._slot, tag=tag)
        return [packed + body for packed, body in frames(head, memoryview(content))]
