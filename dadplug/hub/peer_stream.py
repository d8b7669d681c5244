"""Byte streams between two sites over the hub, with flow control of their own.

At each of the two sites a stream has two connected local sockets. The program uses one of them as if it were a TCP
connection; the tunnel has the other. A message frame of a stream has a kind of its own (its tag):

- `DATA`: bytes; the offset of the head counts all bytes of the stream before them;
- `ROOM`: how many bytes of the stream may be sent in all, 8 bytes. A receiver grants more once it has passed bytes on
  to its program, so that a program that does not read holds up its own stream only, and neither site nor hub has to
  store more than the window;
- `END`: nothing follows; the program has closed its socket.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from ..errors import FrameError
from .frames import Head, Kind
from .sealing import OPEN_BYTES

if TYPE_CHECKING:
    from .sealing import Opener, Sealer

HUB_SLOT = 0xFFFF  # in place of the slot of a site: the hub itself
WINDOW = 4 << 20  # bytes that a site may send before the other one has passed any of them on
ROOM_FORMAT = struct.Struct("<Q")
_BUFFER = 1 << 20  # bytes of the local sockets, as far as the system allows


class Tag(IntEnum):
    """Kind of a message of a stream."""

    DATA = 0
    ROOM = 1
    END = 2


def pieces(buffers: Sequence[Any], most: int) -> Iterator[tuple[list[memoryview], int]]:
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
                yield parts, size
                parts, size = [], 0
    if parts:
        yield parts, size


class PeerStream:
    """One site's end of a stream. Its methods are called with the tunnel's lock held.

    Args:
        channel: number of the channel.
        slot: slot of the other site; `HUB_SLOT` for streams between a site and the hub.
        keys: what seals and opens the frames of this stream; None where they are not sealed.

    Attributes:
        channel: number of the channel.
        slot: slot of the other site.
        local: the tunnel's local socket.
        program: the program's local socket.
        sent: bytes that have been sent.
        granted: bytes that may be sent in all.
        spilled: bytes that the program has written to its local socket, and that have not been sent.
        ended: whether the program has closed its socket.
    """

    def __init__(self, channel: int, slot: int, keys: tuple[Sealer, Opener] | None = None) -> None:
        self.channel, self.slot = channel, slot
        self._keys = keys
        self.local, self.program = socket.socketpair()
        for each in (self.local, self.program):
            each.setblocking(False)
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self.sent = self.spilled = 0
        self.granted = WINDOW
        self.ended = False
        self._incoming: deque[memoryview] = deque()
        self._received = self._passed_on = 0
        self._announced = WINDOW
        self._peer_ended = False

    @property
    def holds_incoming(self) -> bool:
        """Whether bytes have arrived that the local socket had no room for."""
        return bool(self._incoming)

    def frame(self, tag: Tag, parts: Sequence[Any]) -> bytes:
        """Return the next frame of this stream.

        Args:
            tag: kind of the message.
            parts: its content, in parts, `OPEN_BYTES` at most.
        """
        content = b"".join(parts)
        offset = self.sent if tag is Tag.DATA else 0
        head = Head(Kind.MESSAGE, self.slot, 0, self.channel, offset, len(content), tag)
        return head.pack() + content if self._keys is None else self._keys[0].frame(head, content)

    def take(self, head: Head, body: memoryview) -> None:
        """Take a frame that has arrived.

        Raises:
            SealingError: if it is sealed, and is not the next one that the other site has sent.
            FrameError: if it is damaged, its bytes are not the next ones, or more than was granted.
        """
        if self._keys is not None:
            body = memoryview(self._keys[1].open(head, body))
        if head.tag == Tag.DATA:
            self._receive(head.offset, body)
        elif head.tag == Tag.ROOM:
            if len(body) != ROOM_FORMAT.size:
                raise FrameError(f"a message of {len(body)} bytes where {ROOM_FORMAT.size} are due")
            self.granted = max(self.granted, ROOM_FORMAT.unpack(body)[0])
        elif head.tag == Tag.END:
            self.end()
        else:
            raise FrameError(f"unknown message {head.tag} of a stream")

    def _receive(self, offset: int, body: memoryview) -> None:
        """Take bytes that have arrived, and their place in the stream."""
        other = "the other end" if self.slot == HUB_SLOT else f"site {self.slot}"
        if offset != self._received:
            raise FrameError(f"bytes of {other} begin at {offset}, and byte {self._received} comes next")
        if self._received + len(body) > self._announced:
            raise FrameError(f"{other} has sent more than the {self._announced} bytes that it may send")
        self._received += len(body)
        self._incoming.append(body)

    def end(self) -> None:
        """Let the program read the end of the stream, after what has arrived."""
        self._peer_ended = True

    def read_program(self, most: int) -> bytes | None:
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

    def pass_on(self) -> bytes:
        """Write what has arrived to the local socket, as far as it has room.

        Returns:
            The content of a message `ROOM` that is to be sent; empty where none is due.
        """
        incoming = self._incoming
        while incoming:
            try:
                count = self.local.sendmsg(list(incoming)[:64])
            except BlockingIOError:
                break
            except OSError:  # the program has closed its socket
                incoming.clear()
                break
            self._passed_on += count
            while incoming and count >= len(incoming[0]):
                count -= len(incoming.popleft())
            if count:
                incoming[0] = incoming[0][count:]
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
