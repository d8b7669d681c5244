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
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
    OWNER = 10  # keys, moves; extra: the site
    BARRIER = 11  # request: its number
    BYE = 12


_KEYS, _NUMBERS, _CODES, _VALUES = "<i8", "<i4", "<i1", "<f4"
ARRAYS: dict[Kind, tuple[str, ...]] = {
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
}
_HEADER = struct.Struct("<BHhqq")


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

    @property
    def nbytes(self) -> int:
        """Size on the wire in bytes, without that of the transport's own frames."""
        return _HEADER.size + sum(array.nbytes for array in self.arrays)

    def encode(self) -> list[Any]:
        """Returns the frames of the message, without copying its arrays."""
        head = _HEADER.pack(self.kind, self.table, self.origin, self.request, self.extra)
        return [head, *(array.reshape(-1).data if array.size else b"" for array in self.arrays)]

    @classmethod
    def decode(cls, frames: Sequence[Any], widths: Sequence[int]) -> Message:
        """Reads the frames of a message, without copying where they lie well in memory.

        Args:
            frames: buffers that may be written to.
            widths: the width of each table.
        """
        number, table, origin, request, extra = _HEADER.unpack(frames[0])
        kind = Kind(number)
        arrays = []
        for frame, dtype in zip(frames[1:], ARRAYS[kind], strict=True):
            array = np.frombuffer(frame, dtype)
            if not (array.flags.aligned and array.flags.writeable):
                array = array.copy()
            arrays.append(array.reshape(-1, widths[table]) if dtype == _VALUES else array)
        return cls(kind, table, origin, request, extra, arrays)
