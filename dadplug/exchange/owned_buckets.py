"""Exchanges of layers that owners merge: the rows of all sites to the owner of a layer, and its result to all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import MismatchError
from .factor_buckets import FactorPayload, Slot, cut_slots, head_size, integers_of
from .fields import COUNT, check_all
from .transport import AllToAll, Transport
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

    @property
    def owner(self) -> int:
        """The sender that has room."""
        return self.capacity.index(max(self.capacity))

    def deal(self, owner: int) -> None:
        """Give the room to another sender."""
        room = max(self.capacity)
        self.capacity = [room * (sender == owner) for sender in range(len(self.capacity))]

    def restore(self, layout: Sequence[int]) -> None:
        room = max(self.capacity)
        super().restore(layout)
        if sorted(self.capacity) != [*[0] * (len(self.capacity) - 1), room]:
            raise MismatchError("the other sites have laid out the merged layers in another way")

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
        faults: by rank, what is wrong with what a site that is present has sent to this one, in the last step.
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
        self._transport = transport
        self._dtype = dtype
        self._wire = wire
        self._rows = [-1] * len(self._slots)
        self.faults: dict[int, str] = {}
        self._lay_out(owners, None)

    def deal(self, owners: Sequence[int]) -> None:
        """Send the parts to other owners from the next step on; all sites call it together.

        Args:
            owners: rank of the owner of each part.
        """
        self._lay_out(owners, self._exchange)

    def _lay_out(self, owners: Sequence[int], replaced: AllToAll | None) -> None:
        count = self._transport.world_size
        self._parts = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(count)]
        self._heads = [head_size(len(parts), self._wire) for parts in self._parts]
        self.owned = self._parts[self._transport.rank]
        sizes = [
            head + sum(sum(self._slots[index].sizes(self._room(index))) for index in parts) if parts else 0
            for head, parts in zip(self._heads, self._parts, strict=True)
        ]
        self._exchange = self._transport.all_to_all(sizes, self._wire.dtype, replaced)
        self._own = {
            index: part
            for rank, parts in enumerate(self._parts)
            for index, part in zip(parts, self._cut(self._exchange.payloads[rank], rank), strict=True)
        }

    def _room(self, index: int) -> int:
        return self._slots[index].capacity[0]

    def _cut(self, payload: Tensor, owner: int) -> list[FactorPayload]:
        """Return views of the parts of one owner in a payload."""
        layout = ((self._slots[index], self._room(index)) for index in self._parts[owner])
        return cut_slots(payload, self._heads[owner], layout)

    def fill(self, index: int, payload: FactorPayload) -> None:
        """Copy the rows of a part into its owner's payload."""
        self._exchange.post()
        self._slots[index].pack(payload, self._own[index])
        self._rows[index] = payload.rows

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
                integers_of(self._exchange.payloads[owner], len(parts)).copy_(torch.tensor(head, dtype=torch.int32))
        self._exchange.launch()

    def wait(self) -> tuple[list[int], dict[int, list[FactorPayload | None]]]:
        """Wait for what the sites have sent to this one.

        Returns:
            The samples of each site, empty where this site owns nothing; and by part that this site owns and by site,
            the rows, None where the site has no gradient. Valid until the next step.
        """
        samples: list[int] = []
        found: dict[int, list[FactorPayload | None]] = {index: [] for index in self.owned}
        received = self._exchange.wait()
        lacking = self._exchange.missing - self._transport.rounds.absent if self.owned else ()
        self.faults = {rank: f"{self._transport.sites[rank]} has sent nothing to this owner" for rank in lacking}
        for sender, payload in enumerate(received if self.owned else ()):
            count, shares = 0, dict.fromkeys(self.owned)
            try:
                if sender not in self._exchange.missing:
                    count, shares = self._read(sender, payload)
            except MismatchError as error:
                if not self._transport.rounds.elastic:
                    raise
                self.faults[sender] = str(error)
            samples.append(count)
            for index, share in shares.items():
                found[index].append(share)
        return samples, found

    def _read(self, sender: int, payload: Tensor) -> tuple[int, dict[int, FactorPayload | None]]:
        """Return the samples of a site, and its rows of the parts that this site owns.

        Raises:
            MismatchError: if they are invalid.
        """
        site = self._transport.sites[sender]
        count, *rows = integers_of(payload, len(self.owned)).tolist()
        if not 0 <= count <= COUNT:
            check_all("payload", site, (count,), 0, COUNT)
        shares: dict[int, FactorPayload | None] = {}
        for index, number, view in zip(self.owned, rows, self._cut(payload, self._transport.rank), strict=True):
            if not -1 <= number <= view.rows:
                check_all("payload", site, (number,), -1, view.rows)
            part = None if number < 0 else self._slots[index].unpack(view.part(0, number), site)
            shares[index] = None if part is None else part.to(payload.device, self._dtype)
        return count, shares
