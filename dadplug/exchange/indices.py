"""Row numbers in a bucket: integers that travel to the bit beside numbers of any type."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .buckets import Slot
from .payload import FactorPayload
from .quantised import SCALE, pack, unpack

_SPARE = 16  # one row in so many is kept free


class IndexSlot(Slot):
    """Room for rows of a table: in `left` their deltas, in `right` their row numbers, shape (rows, 1).

    Row numbers lie in the payload as integers, in as many of its elements as one takes: what is rounded on the wire are
    the deltas alone.

    Args:
        out: width of the table's rows.
        table_rows: number of the table's rows.
        wire: type of the payload's elements.
        world_size: number of sites.
    """

    def __init__(self, out: int, table_rows: int, wire: torch.dtype, world_size: int) -> None:
        small = table_rows <= torch.iinfo(torch.int32).max and wire.itemsize <= torch.int32.itemsize
        self._integers = torch.int32 if small else torch.int64
        self._coded = wire == torch.int8
        super().__init__(out + SCALE * self._coded, self._integers.itemsize // wire.itemsize, 0, world_size)

    def learn(self, rows: Sequence[int]) -> bool:
        # Every batch looks up another number of rows; without some room to spare each record would take a second round.
        return super().learn([count + count // _SPARE for count in rows])

    def cut(self, payload: Tensor, start: int, rows: int) -> tuple[FactorPayload, int]:
        share, end = super().cut(payload, start, rows)
        return share._replace(right=share.right.view(self._integers)), end

    def pack(self, share: FactorPayload) -> FactorPayload:
        return share._replace(left=pack(share.left)) if self._coded else share

    def unpack(self, share: FactorPayload) -> FactorPayload:
        return share._replace(left=unpack(share.left)) if self._coded else share
