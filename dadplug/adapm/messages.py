"""The protocol: what sites say to each other, and why it holds.

Where a key lives
    Each key has one **owner**, which holds its true value. It begins at its home, ``key mod sites``. Where a key moves,
    the move gets a number, one higher than the last; the former owner and the home note (site, number) in their
    directory, and a note is only replaced by one with a higher number. A message for a key that a site does not own
    goes on to where its directory points, else to the key's home. Each hop leads to a later move, so that a message
    reaches the owner; one that overtakes the key on its way is sent back and forth until the key has arrived. No step
    relies on messages arriving in the order in which they were sent.

What a site asks for
    PULL and PUSH carry any keys. The owner answers the asking site directly, with values or with the number of keys
    that it has added to. INTENT asks for keys that the site will need. The owner answers with a REPLICA if itself or a
    third site has intent for the key, else with a MOVE, which makes the asking site the owner.

    Replicas add what is pushed to them to their value, and to a delta. In each round a site sends SYNC for all its
    replicas: key, version and, where there is one, the delta. The owner adds the delta and answers (SYNCED) with its
    value where it is news to the replica. A replica without intent ahead says in its SYNC that it leaves. If the site
    that asks is the last one with intent, the answer is a MOVE.

Why no push is lost and own pushes are visible
    1. For each key a site has at most one INTENT or SYNC under way, and only the answer to it changes the key's state
       at that site. What the answer holds includes all that the request held, so ``answer + what was pushed since`` is
       right whatever happened meanwhile.
    2. An INTENT leaves when the pushes that this site had sent before are answered; from the moment it is noted on,
       pushes to its keys wait here. So the value in the answer includes all earlier pushes of this site.
    3. A PULL, too, leaves when the pushes sent before are answered. Pushes to a requested key are added to what the
       owner answers. Should a replica have come and gone meanwhile, the pull is repeated.
    4. A replica that leaves stays readable until the owner has answered; what was pushed since then goes as a PUSH.
    5. Pushes commute, so that an owner may add them in any order.

    `set` does not commute: it first has this site's own pushes delivered. Among sites that set and push the same key
    at the same time, the owner's order counts.

On the wire
    A message is a head of fixed size, with the numbers of its keys and rows of values, then its arrays. Sizes follow
    from these two numbers. A site splits what is larger than `MOST_BYTES` into several messages. So a receiver checks
    the size of a message by its head, before it allocates memory, and all that the arrays index before it uses them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_BYTES = 16 << 20  # of a message, unless a single key has more


class Kind(IntEnum):
    """The kinds of message, with their arrays."""

    PULL = 0  # keys, positions
    PULLED = 1  # positions, values
    PUSH = 2  # keys, deltas
    SET = 3  # keys, values
    APPLIED = 4  # extra: how many keys
    INTENT = 5  # keys
    REPLICA = 6  # keys, versions, values
    MOVE = 7  # keys, versions, moves, masks, values
    SYNC = 8  # keys, versions, flags, deltas of the dirty ones
    SYNCED = 9  # keys, codes, versions, values of the new ones
    OWNER = 10  # keys, moves; origin: the site where they are
    BARRIER = 11  # request: its number
    BYE = 12
    ALIVE = 13  # sent when there is nothing else to send


_KEYS, _NUMBERS, _CODES, _VALUES = (np.dtype(name) for name in ("<i8", "<i4", "<i1", "<f4"))
ARRAYS: dict[Kind, tuple[np.dtype[Any], ...]] = {
    Kind.PULL: (_KEYS, _NUMBERS),
    Kind.PULLED: (_NUMBERS, _VALUES),
    Kind.PUSH: (_KEYS, _VALUES),
    Kind.SET: (_KEYS, _VALUES),
    Kind.APPLIED: (),
    Kind.INTENT: (_KEYS,),
    Kind.REPLICA: (_KEYS, _NUMBERS, _VALUES),
    Kind.MOVE: (_KEYS, _NUMBERS, _NUMBERS, _KEYS, _VALUES),
    Kind.SYNC: (_KEYS, _NUMBERS, _CODES, _VALUES),
    Kind.SYNCED: (_KEYS, _CODES, _NUMBERS, _VALUES),
    Kind.OWNER: (_KEYS, _NUMBERS),
    Kind.BARRIER: (),
    Kind.BYE: (),
    Kind.ALIVE: (),
}
_PARTLY = (Kind.SYNC, Kind.SYNCED)  # have values for some keys only
_KINDS = dict(enumerate(Kind))
_HEAD = struct.Struct("<B3xHhIIqq")  # kind, table, origin, keys, rows of values, request, extra
HEAD_SIZE = _HEAD.size
_MOST_PER_KEY = 32  # bytes of a key in any message, beside its values
_PAD = bytes(8)
_SMALL = 4096  # bytes of arrays that are copied into one buffer with the head


class ProtocolError(Exception):
    """A site has sent what is no message of this protocol."""


def most_keys(width: int) -> int:
    """Return how many keys of a table of this width a message may have."""
    return max(1, MOST_BYTES // (_MOST_PER_KEY + 4 * width))


@dataclass(slots=True)
class Message:
    """A message. Arrays of values have shape (n, width of the table).

    Attributes:
        kind: what it says.
        table: number of the table.
        origin: the site that asked first; a forwarded message keeps it.
        request: number of the request at its origin.
        extra: a number, see `Kind`.
        arrays: see `Kind`.
    """

    kind: Kind
    table: int = 0
    origin: int = 0
    request: int = 0
    extra: int = 0
    arrays: list[NDArray[Any]] = field(default_factory=list)

    def encode(self) -> list[Any]:
        """Return the message as buffers that follow one another; large arrays are not copied."""
        kind, arrays = self.kind, self.arrays
        keys = rows = size = 0
        if arrays:
            keys = arrays[0].shape[0]
            rows = arrays[-1].shape[0] if ARRAYS[kind][-1] is _VALUES else 0
            size = sum([array.nbytes for array in arrays])
        buffers: list[Any] = [_HEAD.pack(kind, self.table, self.origin, keys, rows, self.request, self.extra)]
        offset = 0
        for array in arrays:
            if gap := -offset % array.itemsize:
                buffers.append(_PAD[:gap])
            if size <= _SMALL:
                buffers.append(array.tobytes())
            elif array.size:
                buffers.append(array.reshape(-1).view(np.uint8).data)
            offset += gap + array.nbytes
        return [b"".join(buffers)] if size <= _SMALL else buffers


_Places = tuple[tuple[Any, np.dtype[Any], int], ...]  # shape, type and offset of each array of a message


@lru_cache(maxsize=1024)
def _layout(number: int, table: int, width: int | None, keys: int, rows: int) -> tuple[Kind, int, _Places]:
    """Return the kind of a message, the size of its arrays in bytes, and their places; see `Head`."""
    kind = _KINDS.get(number)
    if kind is None:
        raise ProtocolError(f"a message of unknown kind {number}")
    types = ARRAYS[kind]
    if not types:
        return kind, 0, ()
    if width is None:
        raise ProtocolError(f"{kind.name} for table {table}, which this site does not have")
    expected = 0 if types[-1] is not _VALUES else min(rows, keys) if kind in _PARTLY else keys
    if not 0 < keys <= most_keys(width) or rows != expected:
        raise ProtocolError(f"{kind.name} of {keys} keys and {rows} rows of {width} values")
    offset = 0
    places: list[tuple[Any, np.dtype[Any], int]] = []
    for dtype in types:
        offset += -offset % dtype.itemsize
        places.append(((rows, width) if dtype is _VALUES else keys, dtype, offset))
        offset += (rows * width if dtype is _VALUES else keys) * dtype.itemsize
    return kind, offset, tuple(places)


class Head:
    """The head of a message that arrives: what it announces, checked.

    Args:
        buffer: at least `HEAD_SIZE` bytes from `offset` on.
        offset: where the head begins.
        widths: the width of each table.
        sites: number of sites.

    Attributes:
        nbytes: size of the arrays that follow.

    Raises:
        ProtocolError: if no site sends such a message.
    """

    __slots__ = ("_message", "_places", "nbytes")

    def __init__(self, buffer: Any, offset: int, widths: Sequence[int], sites: int) -> None:
        number, table, origin, keys, rows, request, extra = _HEAD.unpack_from(buffer, offset)
        width = widths[table] if table < len(widths) else None
        kind, self.nbytes, self._places = _layout(number, table, width, keys, rows)
        if not 0 <= origin < sites:
            raise ProtocolError(f"{kind.name} of site {origin}, and there are {sites}")
        self._message = Message(kind, table, origin, request, extra)

    def message(self, body: Any) -> Message:
        """Return the message; its arrays are views of the body, a buffer of `nbytes` bytes."""
        message = self._message
        message.arrays = [np.ndarray(shape, dtype, body, offset) for shape, dtype, offset in self._places]
        return message
