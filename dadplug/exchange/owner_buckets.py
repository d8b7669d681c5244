"""Buckets of layers that have an owner: every site's rows go to the owner, and the owner's result goes to all sites."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .buckets import Slot, aligned
from .payload import FactorPayload
from .transport import Transport
from .wire import WireFormat


class OwnedSlot(Slot):
    """Space for the merged rows of one part of a layer; only its owner has room for them, in every step the same.

    Args:
        out: width of the rows of `left`.
        width: width of the rows of `right`.
        bias: number of elements of the bias gradient that is sent beside the rows, 0 for none.
        room: number of rows, by sender; 0 for all but the owner.
        wire: format of the payload.
    """

    def __init__(self, out: int, width: int, bias: int, room: Sequence[int], wire: WireFormat) -> None:
        super().__init__(out, width, bias, len(room), wire)
        self.capacity = list(room)

    def sizes(self, rows: int) -> tuple[int, int, int]:
        return super().sizes(rows) if rows else (0, 0, 0)

    def learn(self, rows: Sequence[int]) -> bool:
        return False

    def cut(self, payload: Tensor, start: int, rows: int) -> tuple[FactorPayload, int]:
        if rows:
            return super().cut(payload, start, rows)
        empty = payload[:0]
        return FactorPayload(empty.view(0, self.out), empty.view(0, self.width)), start


class ContributionBucket:
    """Rows of several parts of layers, each sent to its owner alone.

    A payload begins with a header of integers: the samples that the site's gradients stand for, and the rows of each
    part; -1 where the site has no gradient.

    Args:
        slots: a slot for each part, with the room of every site.
        owners: rank of the owner of each part.
        transport: the transport.
        dtype: type of the gradients.
        wire: format of the payloads.

    Attributes:
        owned: indices of the parts that this site owns.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        owners: Sequence[int],
        transport: Transport,
        dtype: torch.dtype,
        wire: WireFormat,
    ) -> None:
        self._slots = list(slots)
        self._owners = list(owners)
        self._transport = transport
        self._dtype = dtype
        self._parts = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(transport.world_size)]
        self._heads = [aligned(-(-4 * (1 + len(parts)) // wire.itemsize)) for parts in self._parts]
        self.owned = self._parts[transport.rank]
        sizes = [
            head + sum(sum(self._slots[index].sizes(self._room(index))) for index in parts) if parts else 0
            for head, parts in zip(self._heads, self._parts, strict=True)
        ]
        self._exchange = transport.all_to_all(sizes, wire.dtype)
        self._rows = [-1] * len(self._slots)
        self._own = {
            index: part
            for rank, parts in enumerate(self._parts)
            for index, part in zip(parts, self._cut(self._exchange.payloads[rank], rank), strict=True)
        }

    def _room(self, index: int) -> int:
        return self._slots[index].capacity[0]

    def _cut(self, payload: Tensor, owner: int) -> list[FactorPayload]:
        """Return views of the parts of one owner in a payload."""
        views, start = [], self._heads[owner]
        for index in self._parts[owner]:
            view, start = self._slots[index].cut(payload, start, self._room(index))
            views.append(view)
        return views

    def _integers(self, payload: Tensor, owner: int) -> Tensor:
        count = 4 * (1 + len(self._parts[owner]))
        return payload[: self._heads[owner]].view(torch.uint8)[:count].view(torch.int32)

    def slot_bytes(self, index: int) -> int:
        """Return the bytes of a part."""
        slot = self._slots[index]
        return sum(slot.sizes(self._room(index))) * self._exchange.payloads[0].element_size()

    def fill(self, index: int, payload: FactorPayload) -> None:
        """Copy the rows of a part into its owner's payload."""
        self._exchange.post()
        place, packed, rows = self._own[index], self._slots[index].pack(payload), payload.rows
        place.left[:rows], place.right[:rows] = packed.left, packed.right
        place.left[rows:], place.right[rows:] = 0, 0
        if place.bias is not None and packed.bias is not None:
            place.bias.copy_(packed.bias)
        self._rows[index] = rows

    def clear(self, index: int) -> None:
        """Send nothing of a part."""
        self._rows[index] = -1

    def launch(self, samples: int) -> None:
        """Send the payloads.

        Args:
            samples: samples that this site's gradients stand for.
        """
        for owner, parts in enumerate(self._parts):
            if parts:
                head = [samples, *(self._rows[index] for index in parts)]
                self._integers(self._exchange.payloads[owner], owner).copy_(torch.tensor(head, dtype=torch.int32))
        self._exchange.launch()

    def wait(self) -> tuple[list[int], dict[int, list[FactorPayload | None]]]:
        """Wait for what the sites have sent to this one.

        Returns:
            The samples of each site, empty where this site owns nothing; and by part that this site owns and by site,
            the rows, None where the site has no gradient. Valid until the next step.
        """
        rank, samples = self._transport.rank, []
        found: dict[int, list[FactorPayload | None]] = {index: [] for index in self.owned}
        received = self._exchange.wait()
        for payload in received if self.owned else ():
            count, *rows = self._integers(payload, rank).tolist()
            samples.append(count)
            for index, number, view in zip(self.owned, rows, self._cut(payload, rank), strict=True):
                part = None
                if number >= 0:
                    part = self._slots[index].unpack(view.part(0, number)).to(payload.device, self._dtype)
                found[index].append(part)
        return samples, found
