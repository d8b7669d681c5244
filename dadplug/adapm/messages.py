"""The protocol of the parameter manager, and its messages.

Location of keys
    Each key has one **owner**, which holds its true value. The first owner is its home, site ``key mod sites``. Each
    move of a key has a number, one higher than that of the last move. The former owner and the home record (site,
    number) in their directories; an entry is only replaced by one with a higher number. A message for a key that a site
    does not own is forwarded to the site in its directory, otherwise to the home of the key. Each hop leads to a later
    move, so a message reaches the owner. A message that overtakes a moving key is forwarded back and forth until the
    key has arrived. The protocol does not depend on the order of messages.

Requests
    PULL and PUSH are sent for any keys. The owner replies directly to the site of origin, with values or with the
    number of keys that it has added to. INTENT requests keys that the site will need. The owner replies with REPLICA if
    it has intent for the key itself or a third site has a replica, otherwise with MOVE, which makes the requesting site
    the owner.

    A push to a replica is added to its value and to a delta. In each round a site sends SYNC for all its replicas: key,
    version and, if there is one, the delta. The owner adds the delta and replies with SYNCED, which has the value if
    its version is newer. The SYNC of a replica without intent ahead has a flag that the replica leaves. If the
    requesting site is the last one with intent, the reply is MOVE.

No push is lost, and own pushes are visible
    1. A site has at most one INTENT or SYNC in flight per key, and only the reply to it changes the state of the key at
       that site. The value in the reply includes everything in the request, so ``reply + pushes since the request`` is
       correct in any order of events.
    2. An INTENT is sent when all earlier pushes of the site have been confirmed; from the moment it is recorded, pushes
       to its keys are held at the site. So the value in the reply includes all earlier pushes of the site.
    3. A PULL is also sent when all earlier pushes have been confirmed. Pushes to a requested key are added to the value
       in the reply. If a replica has been created and dropped meanwhile, the pull is repeated.
    4. A replica that leaves is readable until the owner has replied; later pushes to it are sent as PUSH.
    5. Pushes commute, so an owner may add them in any order.

    SET does not commute: it is sent when the site's own pushes have been delivered. If sites set and push a key at the
    same time, the order is that of arrival at the owner.

Wire format
    A message is a head of fixed size, which has the numbers of keys and of rows of values, followed by arrays. These
    two numbers determine all sizes. A site splits data larger than `MOST_BYTES` into several messages. So a receiver
    checks the size of a message by its head before it allocates memory, and all indices before it uses them.
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

from ..errors import ProtocolError

MOST_BYTES = 16 << 20  # of a message, unless a single key has more


class MessageKind(IntEnum):
    """Kinds of messages, with their arrays."""

    PULL = 0  # keys, positions
    PULLED = 1  # positions, values
    PUSH = 2  # keys, deltas
    SET = 3  # keys, values
    APPLIED = 4  # extra: number of keys
    INTENT = 5  # keys
    REPLICA = 6  # keys, versions, values
    MOVE = 7  # keys, versions, moves, masks, values
    SYNC = 8  # keys, versions, flags, deltas of the dirty ones
    SYNCED = 9  # keys, codes, versions, values of the new ones
    OWNER = 10  # keys, moves; origin: the owner
    BARRIER = 11  # request: number of the barrier
    BYE = 12  # the site leaves; extra: 1 after an error, which it has announced
    ALIVE = 13  # heartbeat, sent if no other message is


_KEYS, _NUMBERS, _CODES, _VALUES = (np.dtype(name) for name in ("<i8", "<i4", "<i1", "<f4"))
ARRAYS: dict[MessageKind, tuple[np.dtype[Any], ...]] = {
    MessageKind.PULL: (_KEYS, _NUMBERS),
    MessageKind.PULLED: (_NUMBERS, _VALUES),
    MessageKind.PUSH: (_KEYS, _VALUES),
    MessageKind.SET: (_KEYS, _VALUES),
    MessageKind.APPLIED: (),
    MessageKind.INTENT: (_KEYS,),
    MessageKind.REPLICA: (_KEYS, _NUMBERS, _VALUES),
    MessageKind.MOVE: (_KEYS, _NUMBERS, _NUMBERS, _KEYS, _VALUES),
    MessageKind.SYNC: (_KEYS, _NUMBERS, _CODES, _VALUES),
    MessageKind.SYNCED: (_KEYS, _CODES, _NUMBERS, _VALUES),
    MessageKind.OWNER: (_KEYS, _NUMBERS),
    MessageKind.BARRIER: (),
    MessageKind.BYE: (),
    MessageKind.ALIVE: (),
}
_PARTLY = (MessageKind.SYNC, MessageKind.SYNCED)  # have values for some keys only
_KINDS = dict(enumerate(MessageKind))
_HEAD = struct.Struct("<B3xHhIIqq")  # kind, table, origin, keys, rows of values, request, extra
HEAD_SIZE = _HEAD.size
_MOST_PER_KEY = 32  # bytes per key in any message, except its values
_PAD = bytes(8)
_SMALL = 4096  # bytes of arrays that are copied into one buffer with the head


def most_keys(width: int) -> int:
    """Return the maximum number of keys of a message for a table of a width."""
    return max(1, MOST_BYTES // (_MOST_PER_KEY + 4 * width))


@dataclass(slots=True)
class Message:
    """Message between sites. Arrays of values have shape (n, width of the table).

    Attributes:
        kind: kind of the message.
        table: number of the table.
        origin: the site that sent it first; forwarding does not change it.
        request: number of the request at its origin.
        extra: a number, see `MessageKind`.
        arrays: arrays, see `MessageKind`.
    """

    kind: MessageKind
    table: int = 0
    origin: int = 0
    request: int = 0
    extra: int = 0
    arrays: list[NDArray[Any]] = field(default_factory=list)

    def encode(self) -> list[Any]:
        """Return the message as consecutive buffers; large arrays are not copied."""
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
def _layout(number: int, table: int, width: int | None, keys: int, rows: int) -> tuple[MessageKind, int, _Places]:
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
    """Head of a received message, checked.

    Args:
        buffer: at least `HEAD_SIZE` bytes from `offset` on.
        offset: position of the head in the buffer.
        widths: width of each table.
        sites: number of sites.

    Attributes:
        nbytes: size of the arrays that follow.

    Raises:
        ProtocolError: if the head does not follow the protocol.
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
