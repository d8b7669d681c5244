"""Wire format between sites and the hub: frames of a fixed head and at most 128 kB.

**Pieces.** A message of any size is cut into frames, so that the hub passes its first bytes on before it has the last
ones, holds at most one frame of each connection, and can mix the messages of several sites on one connection: a slow
sender delays no other. The head takes 32 bytes, 0.02% of a full frame, which fills eight records of TLS. The hub passes
a piece on once it is whole, 10 ms at 100 Mbit/s. Where payloads take a second line from the hub, pieces are half as
large.

**Sizes.** A head is checked as soon as it is complete, before anything is allocated for the body. Pieces of a message
come in order and without gaps, and within the size that the receiver expects: sites know the sizes of gathers and sums
before a step. Where they do not (objects, states, late rows without a header), an exchange of 8 bytes with the size
goes first, and is checked against a limit. An unexpected frame is an error of the connection, which is closed: there is
no way to resume in the middle of a stream.

**Exchanges.** A frame belongs to a step and, within it, to an exchange. Exchanges are numbered by the plan, not by
counting: a site that learns of a drop sooner than another may leave out an exchange that has become empty. What the
interface `dadplug.exchange.Transport` offers becomes:

- gather: each site sends a `PAYLOAD`, which the hub passes on to all others;
- all-reduce: each site sends a `SUMMAND`; the hub adds them up in the order of slots and sends the `SUM` to all;
- broadcast: the contributor with the lowest slot sends a `PAYLOAD`, the others none; objects: two gathers, sizes first;
- the reason why a site leaves: `Leave`, which the hub announces as the reason of `Drop`.

Each step ends with `END`; set-up collectives are steps of their own. `STATE` goes from a member to a joiner, `MESSAGE`
(of byte streams) from one site to another, or to the hub. The hub passes both on to one site. In what a site sends, the
slot names the receiver of these two kinds, and the sender in all others; in what the hub sends, always the sender.

**Control messages** are those of `dadplug.hub.wire.messages`. The hub puts its announcements into the same sequence as
the frames, and replays them with these.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import torch

from ...errors import FrameError

_HEAD = struct.Struct("<HBBHHIQQI")
HEAD_BYTES = _HEAD.size
PIECE_BYTES = (1 << 17) - HEAD_BYTES  # of a frame's body, at most
SHORT_PIECE_BYTES = (1 << 16) - HEAD_BYTES  # the same for payloads that take two lines
_MAGIC = 0xDAD9


class Kind(IntEnum):
    """Kind of a frame."""

    CONTROL = 1
    PAYLOAD = 2
    SUMMAND = 3
    SUM = 4
    END = 5
    STATE = 6
    MESSAGE = 7
    PING = 8


_KINDS = (Kind.CONTROL, *Kind)  # by their numbers, from 1
_EMPTY = (Kind.END, Kind.PING)  # kinds without a body


class Head(NamedTuple):
    """Head of a frame.

    Attributes:
        kind: what the frame holds.
        slot: slot of a site, see above.
        step: number of the step.
        exchange: number of the exchange in the step.
        offset: bytes of the message before this piece.
        length: bytes of this piece.
        tag: for `STATE` a number that tells one transfer from another.
    """

    kind: Kind
    slot: int
    step: int = 0
    exchange: int = 0
    offset: int = 0
    length: int = 0
    tag: int = 0

    def pack(self) -> bytes:
        """Return the head as bytes.

        Raises:
            struct.error: if a number is out of range.
        """
        return self.pack_piece(self.offset, self.length)

    def pack_piece(self, offset: int, length: int) -> bytes:
        """Return the head of a piece of the same message as bytes.

        Args:
            offset: bytes of the message before the piece.
            length: bytes of the piece.
        """
        return _HEAD.pack(_MAGIC, self.kind, 0, self.slot, self.tag, self.exchange, self.step, offset, length)

    @classmethod
    def unpack(cls, content: bytes | bytearray | memoryview) -> Head:
        """Return the head that `pack` has made bytes of.

        Raises:
            FrameError: if they are no valid head.
        """
        magic, kind, reserved, slot, tag, exchange, step, offset, length = _HEAD.unpack(content)
        if magic != _MAGIC or reserved:
            raise FrameError("these bytes are not the beginning of a frame: the other end does not speak the protocol")
        if not Kind.CONTROL <= kind <= Kind.PING:
            raise FrameError(f"unknown kind of frame: {kind}")
        head = cls(_KINDS[kind], slot, step, exchange, offset, length, tag)
        if length > PIECE_BYTES:
            raise FrameError(f"a frame of {length} bytes: there may be {PIECE_BYTES} at most")
        if bool(length) == (head.kind in _EMPTY):
            raise FrameError(f"a {head.kind.name} frame of {length} bytes")
        if offset and head.kind in (Kind.CONTROL, *_EMPTY):
            raise FrameError(f"a {head.kind.name} frame has only one piece, not one at byte {offset}")
        return head


def frames(head: Head, content: memoryview, most: int = PIECE_BYTES) -> Iterator[tuple[bytes, memoryview]]:
    """Cut a message into frames.

    Args:
        head: head of the message; offset and length are filled in.
        content: the message, of bytes.
        most: bytes of a frame's body, at most.

    Yields:
        Heads and bodies, which share the message's memory; none for an empty message.
    """
    for offset in range(0, len(content), most):
        body = content[offset : offset + most]
        yield head.pack_piece(offset, len(body)), body


# Codes of element types in the heads of `SUMMAND` frames.
CODES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int64: 4,
    torch.int32: 5,
    torch.uint8: 6,
    torch.int8: 7,
    torch.int16: 8,
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
