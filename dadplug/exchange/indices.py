"""Row numbers in a bucket: integers that are sent exactly, beside values in any wire format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .buckets import Slot
from .payload import FactorPayload
from .wire import WireFormat

_SPARE = 16  # one row in so many is kept free


class IndexSlot(Slot):
    """Room for rows of a table: in `left` their deltas, in `right` their row numbers, shape (rows, 1).

    Row numbers lie in the payload as integers, each in as many elements as it needs. Only the deltas are rounded to the
    wire format.

    Args:
        out: width of the table's rows.
        table_rows: number of the table's rows.
        wire: format of the payload.
        world_size: number of sites.
    """

    def __init__(self, out: int, table_rows: int, wire: WireFormat, world_size: int) -> None:
        small = table_rows <= torch.iinfo(torch.int32).max and wire.itemsize <= torch.int32.itemsize
        self._integers = torch.int32 if small else torch.int64
        super().__init__(out, 0, 0, world_size, wire)
        self.width = self._integers.itemsize // wire.itemsize

    def learn(self, rows: Sequence[int]) -> bool:
        # Every batch looks up another number of rows; without some room to spare each record would take a second round.
        return super().learn([count + count // _SPARE for count in rows])

    def cut(self, payload: Tensor, start: int, rows: int) -> tuple[FactorPayload, int]:
        share, end = super().cut(payload, start, rows)
        return share._replace(right=share.right.view(self._integers)), end

    def pack(self, share: FactorPayload) -> FactorPayload:
        return share._replace(left=self.wire.encode(share.left)) if self.wire.quantised else share

    def unpack(self, share: FactorPayload) -> FactorPayload:
        return share._replace(left=self.wire.decode(share.left)) if self.wire.quantised else share
