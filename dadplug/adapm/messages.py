"""What sites say to each other: a kind, a table, who asked, and arrays of numbers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Kind(IntEnum):
    """The kinds of message; `protocol` says what they do."""

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
