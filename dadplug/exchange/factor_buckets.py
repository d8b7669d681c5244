"""Buckets of factors: the rows of several units in one exchange, which starts as soon as all of them are there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MismatchError
from ..lowrank.dispatch import SCALE_SIZE, NumbaKernels, cpu_kernels
from .codec import MAX_BYTES, MAX_OBJECT_BYTES
from .fields import COUNT, check_all
from .transport import Exchange, Gather, Transport
from .wire import WireFormat, copied, lasting


class FactorPayload(NamedTuple):
    """Rows whose product ``left.T @ right`` is a site's gradient of one weight.

    Attributes:
        left: of shape (k, out); dAD: the deltas.
        right: of shape (k, in); dAD: the activations.
        bias: gradient of the bias, of shape (out,), where it is sent and not the sum of the rows of `left`.
        encoded: the same in the wire format, where the method had to encode it; None otherwise.
    """

    left: Tensor
    right: Tensor
    bias: Tensor | None = None
    encoded: FactorPayload | None = None

    @property
    def rows(self) -> int:
        """Number of rows k."""
        return self.left.shape[0]

    def part(self, start: int, end: int | None = None, *, with_bias: bool = True) -> FactorPayload:
        """Return some of the rows; the payload itself if that is all of it."""
        if start == 0 and end == self.left.shape[0] and with_bias:
            return self
        return FactorPayload(self.left[start:end], self.right[start:end], self.bias if with_bias else None)

    def without_rows(self) -> FactorPayload:
        """Return the payload of a gradient of zeros."""
        return FactorPayload(self.left[:0], self.right[:0], None if self.bias is None else torch.zeros_like(self.bias))

    def plus(self, other: FactorPayload) -> FactorPayload:
        """Return the sum with another payload of the same layer: rows are stacked, bias gradients added."""
        bias = self.bias
        if other.bias is not None:
            bias = other.bias if bias is None else bias + other.bias
        return FactorPayload(torch.cat([self.left, other.left]), torch.cat([self.right, other.right]), bias)

    def to(self, device: torch.device, dtype: torch.dtype) -> FactorPayload:
        """Return the payload on a device, with floating-point tensors in a type."""
        right = self.right.to(device, dtype if self.right.is_floating_point() else None)  # or numbers of rows
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return FactorPayload(self.left.to(device, dtype), right, bias)

    def finite(self) -> bool:
        """Return whether the payload holds neither NaN nor Inf."""
        return all(finite(part) for part in self[:3] if part is not None)

    def bound(self) -> float:
        """Return a bound of the norm of the gradient, in one pass; not finite where that may leave its type's range."""
        if not (self.rows and self.right.is_floating_point()):
            return math.hypot(*(extent(part) for part in self[:3] if part is not None))
        wide = torch.float32 if self.left.dtype == torch.float16 else None
        norms = torch._foreach_norm([part for part in self[:3] if part is not None], 2, wide)
        left, right, *bias = [float(norm) for norm in norms]
        found = math.hypot(left * right, *bias)
        return found if found < torch.finfo(self.left.dtype).max else math.inf


class StackedShares(list[FactorPayload]):
    """Decoded rows of all senders of a slot, as many of each, which lie one behind the other.

    Args:
        left: rows of the left factors of all senders.
        right: rows of the right ones.
        biases: gradients of the bias, of shape (senders, size); None for none.
        rows: number of rows of each sender.

    Attributes:
        left: as the argument.
        right: as the argument.
        scaled: room for the left ones times a factor.
        lefts: rows of the left factors by sender.
        rights: rows of the right ones by sender.
    """

    def __init__(self, left: Tensor, right: Tensor, biases: Tensor | None, rows: int) -> None:
        self.left, self.right = left, right
        self.scaled = lasting(left.shape, left.dtype)
        self.lefts, self.rights = list(left.split(rows)), list(right.split(rows))
        each = [None] * len(self.lefts) if biases is None else biases
        super().__init__(map(FactorPayload, self.lefts, self.rights, each))


class StackedSlots:
    """Slots of a bucket that have as many rows of each sender, which are decoded together, into memory that is kept.

    Args:
        slots: by index, the rows of each sender in its payload, int8.
        payloads: the payloads.

    Attributes:
        shares: by index of the slot, the decoded rows.
    """

    def __init__(self, slots: Mapping[int, Sequence[FactorPayload]], payloads: Sequence[Tensor]) -> None:
        senders, parts, end = len(payloads), [], 0
        for views in slots.values():
            for part in zip(*[view[:3] for view in views], strict=True):
                rows = 0 if part[0] is None else torch.atleast_2d(part[0]).shape[0]
                width = part[0].shape[-1] - SCALE_SIZE if rows else 0
                parts.append((part, end, rows, width))
                end += aligned(senders * rows * width)
        values, self.shares = lasting(end, torch.float32), {}
        for place, (index, views) in enumerate(slots.items()):
            left, right, biases = (
                values[start : start + senders * rows * width].view(senders * rows, width)
                for _, start, rows, width in parts[3 * place : 3 * place + 3]
            )
            self.shares[index] = StackedShares(left, right, biases if len(biases) else None, views[0].rows)
        self._values, self._parts = values.numpy(), []
        for sender, payload in enumerate(payloads):
            first, own = payload.data_ptr(), []
            for part, start, rows, width in parts:
                source = part[sender].data_ptr() - first if rows else 0
                own.append([source, start + sender * rows * width, rows, width])
            self._parts.append(torch.tensor(own).numpy())

    def decode(self, payloads: Sequence[Tensor]) -> float:
        """Decode the rows of all senders in their payloads; return the sum of the sizes of their scales."""
        kernel = cpu_kernels().compiled.dequantise_parts
        total = 0.0
        for payload, parts in zip(payloads, self._parts, strict=True):
            total += kernel(payload.numpy(), parts, self._values)
        return total


def extent(tensor: Tensor) -> float:
    """Return the size of a tensor's sum, in one pass; NaN or infinity only where the tensor holds such a value."""
    tensor = tensor._values() if tensor.is_sparse else tensor
    total: float = abs(tensor.sum().item())
    return total if math.isfinite(total) or not bool(torch.isfinite(tensor).all()) else _HUGE  # sums may overflow


def finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor Inf."""
    return math.isfinite(extent(tensor))


def squared_norm(tensor: Tensor) -> float:
    """Return the squared norm of a tensor, in double precision."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float(torch.linalg.vector_norm(real, dtype=torch.float64).square())  # "**" of floats may overflow


def multiplies(tensor: Tensor) -> bool:
    """Return whether values are finite, and products of two of them, too."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return float(torch.linalg.vector_norm(tensor, dtype=dtype)) < math.sqrt(torch.finfo(dtype).max)


_HUGE = 1e300
_ALIGNMENT = 16  # elements; every part of a payload begins on a cache line
_CAPACITY = attrgetter("capacity")
_STACKS = 4  # selections of the slots of a bucket for which memory is kept
_SHRINK_AFTER = 16  # steps with fewer rows before a slot gives room back
_ANYWAY, _TIMES = MAX_OBJECT_BYTES, 64  # bytes that a second round may have, and times what another site sends


class Slot:
    """Space for one layer's rows in a bucket.

    The number of rows may differ between sites and steps, but both ends must know the size of a message before it
    starts. So each slot has a capacity for each site, which all sites derive from the rows that the site has sent
    before. Rows beyond the capacity are sent in a second round; fewer rows are padded.

    Args:
        out: width of the rows of `left`.
        width: width of the rows of `right`.
        bias: number of elements of the bias gradient that is sent beside the rows, 0 for none.
        world_size: number of sites.
        wire: format of the payload.

    Attributes:
        out: payload elements of a row of `left`.
        width: payload elements of a row of `right`.
        bias: payload elements of the bias gradient.
    """

    def __init__(self, out: int, width: int, bias: int, world_size: int, wire: WireFormat) -> None:
        self.out = wire.row_size(out)
        self.width = wire.row_size(width)
        self.bias = wire.row_size(bias)
        self.wire = wire
        self.capacity = [0] * world_size
        self._fewer = [(0, 0)] * world_size  # steps with fewer rows in a row, and the most rows among them

    def sizes(self, rows: int) -> tuple[int, int, int]:
        """Return the number of elements of the three parts (left, right, bias) for this many rows."""
        return aligned(rows * self.out), aligned(rows * self.width), aligned(self.bias)

    def learn(self, rows: Sequence[int]) -> bool:
        """Update the capacities.

        Args:
            rows: rows that each site had in a step.

        Returns:
            Whether a capacity has changed.
        """
        changed = False
        for site, count in enumerate(rows):
            if count > self.capacity[site]:
                self.capacity[site], self._fewer[site], changed = count, (0, 0), True
            elif count == self.capacity[site]:
                self._fewer[site] = (0, 0)
            else:
                steps, most = self._fewer[site]
                self._fewer[site] = (steps + 1, max(most, count))
                if steps + 1 >= _SHRINK_AFTER:
                    self.capacity[site], self._fewer[site], changed = max(most, count), (0, 0), True
        return changed

    def layout(self) -> list[int]:
        """Return the state that capacities depend on, as integers; all sites have the same."""
        return [*self.capacity, *(number for pair in self._fewer for number in pair)]

    def restore(self, layout: Sequence[int]) -> None:
        """Restore what `layout` returned at another site, which may have been for the first sites alone.

        Raises:
            MismatchError: if it is of more sites, or of more rows than can be sent.
        """
        known, rest = divmod(len(layout), 3)
        new = len(self.capacity) - known
        if rest or new < 0 or min(layout, default=-1) < 0:
            raise MismatchError("the other sites have laid out their payloads for another number of sites")
        if sum(self.sizes(max(layout))) * self.wire.itemsize > MAX_BYTES:
            raise MismatchError(
                f"the other sites have laid out {max(layout)} rows of a layer: do all run the same model?"
            )
        self.capacity = [*layout[:known], *[0] * new]
        self._fewer = [*zip(layout[known::2], layout[known + 1 :: 2], strict=True), *[(0, 0)] * new]

    def cut(self, payload: Tensor, start: int, rows: int) -> tuple[FactorPayload, int]:
        """Return views of this slot's parts in a payload.

        Args:
            payload: a flat tensor.
            start: index of the slot's first element.
            rows: number of rows.

        Returns:
            The parts, and the index at which the next slot starts.
        """
        left_size, right_size, bias_size = self.sizes(rows)
        left = payload[start : start + rows * self.out].view(rows, self.out)
        start += left_size
        right = payload[start : start + rows * self.width].view(rows, self.width)
        start += right_size
        bias = payload[start : start + self.bias] if self.bias else None
        return FactorPayload(left, right, bias), start + bias_size

    def pack(self, share: FactorPayload, room: FactorPayload) -> None:
        """Encode rows into their place in a payload, and zeros into the rest of it."""
        rows, encoded = share.left.shape[0], share.encoded
        if rows < room.left.shape[0]:
            room.left[rows:], room.right[rows:] = 0, 0
            room = room.part(0, rows)
        parts = share if encoded is None or encoded.left.dtype != self.wire.dtype else encoded
        for place, part in zip(room[:3], parts[:3], strict=True):
            if place is None or part is None:
                continue
            if self.wire.quantised and part.is_floating_point():
                self.wire.encode(torch.atleast_2d(part), torch.atleast_2d(place))
            else:
                place.copy_(part)

    def check(self, share: FactorPayload, sender: str) -> None:
        """Check encoded rows of a payload.

        Args:
            share: the encoded rows.
            sender: name of the site that has sent them.

        Raises:
            MismatchError: if they are rows that a table does not have.
        """

    def unpack(self, share: FactorPayload, sender: str) -> FactorPayload:
        """Check and decode rows of a payload; arguments and errors as of `check`."""
        self.check(share, sender)
        if not self.wire.quantised:
            return share
        left, right = self.wire.decode(share.left), self.wire.decode(share.right)
        return FactorPayload(left, right, None if share.bias is None else self.wire.decode(share.bias[None])[0])


def aligned(size: int) -> int:
    """Return a number of elements, rounded up to that of whole cache lines."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def head_size(count: int, wire: WireFormat) -> int:
    """Return the payload elements of a header of integers: the samples, and one for each of `count` slots."""
    return aligned(-(-4 * (1 + count) // wire.itemsize))


def integers_of(payload: Tensor, count: int) -> Tensor:
    """Return a view of the integers of a payload's header."""
    return payload[: 4 * (1 + count)].view(torch.uint8)[: 4 * (1 + count)].view(torch.int32)


def cut_slots(payload: Tensor, start: int, layout: Iterable[tuple[Slot, int]]) -> list[FactorPayload]:
    """Return views of the parts of slots with their numbers of rows, which lie one behind the other in a payload."""
    shares = []
    for slot, rows in layout:
        share, start = slot.cut(payload, start, rows)
        shares.append(share)
    return shares


class FactorBucket:
    """Slots of several layers that are sent in one all-gather.

    A payload begins with a header of integers: the samples that the site's gradients stand for, and the rows in each
    slot. So a payload can be decoded while later buckets are still in progress.

    Args:
        slots: the slots, in the order in which backward fills them.
        transport: the transport.
        dtype: type of the gradients.
        wire: format of the payloads.
        senders: ranks of the sites that send; all where None. Lists by site are by sender.
        once: whether it is for one step.
        relayed: whether the sites pass parts of the payloads on, see `dadplug.exchange.Transport.relayed_gather`.

    Attributes:
        extra_rows: by slot, number of this site's rows that go in a second round.
        received_rows: by slot and site, number of rows that `receive` has found.
        extent: sum of the sizes of the scales of rows that are decoded together, as `receive` has found.
        apart: slots of which `receive` has not read the scales; all of them before it.
        stacked: slots that are decoded together; None for none.
        slot_bytes: by slot, bytes in this site's payload.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        transport: Transport,
        dtype: torch.dtype,
        wire: WireFormat,
        senders: Sequence[int] | None = None,
        once: bool = False,
        relayed: bool = False,
    ) -> None:
        self.slots = list(slots)
        self._senders = list(range(transport.world_size) if senders is None else senders)
        self.place = self._senders.index(transport.rank) if transport.rank in self._senders else None
        self._transport = transport
        self._dtype = dtype
        self._wire = wire
        self._head = head_size(len(self.slots), wire)
        on_cpu = transport.device.type == "cpu" and isinstance(cpu_kernels(), NumbaKernels)
        plain = all(type(slot) is Slot for slot in self.slots)
        self._keeps = wire.quantised and dtype == torch.float32 and on_cpu and plain  # memory for decoded rows
        self._rows = [0] * len(self.slots)
        self._overflow: dict[int, FactorPayload] = {}
        self.extent, self.apart = 0.0, list(range(len(self.slots)))
        self.extra_rows = [0] * len(self.slots)
        self.received_rows: list[tuple[int, ...]] = []
        self._learnt: Sequence[Sequence[int]] = ()  # rows of the last step
        self._prepare = transport.relayed_gather if relayed else transport.gather
        self._gather: Gather = self._prepare(self._sizes(), wire.dtype, once=once)
        self._make_views()

    def lay_out(self) -> None:
        """Make payloads of the slots' capacities, at the end of a step.

        Not when they are first needed: sites that use other layers need buckets in another order, but messages are
        matched by the order in which gathers were made.
        """
        self._gather = self._prepare(self._sizes(), self._wire.dtype, replaced=self._gather)
        self._make_views()
        self._rows = [0] * len(self.slots)

    def _sizes(self) -> list[int]:
        """Return the number of elements of each site's payload, by rank."""
        places = range(len(self._senders))
        return self._by_rank(
            [self._head + sum(sum(slot.sizes(slot.capacity[place])) for slot in self.slots) for place in places]
        )

    def _make_views(self) -> None:
        self._posts = type(self._gather).post is not Exchange.post  # whether to receive has to be prepared
        self._own = [] if self.place is None else self._cut(self._gather.payload, self.place)
        self._own_head = integers_of(self._gather.payload, len(self.slots))
        self._received: dict[int, tuple[Tensor, Tensor, list[FactorPayload]]] = {}
        self.stacked: StackedSlots | None = None
        self._stacks: dict[tuple[int, ...], StackedSlots] = {}  # by their slots
        self._stacked_rows: list[tuple[int, ...]] = []  # by slot and sender, where `stacked` is for them
        self.slot_bytes = [
            0 if self.place is None else sum(slot.sizes(slot.capacity[self.place])) * self._wire.itemsize
            for slot in self.slots
        ]

    def layout(self) -> list[list[int]]:
        """Return the room in the payloads, by slot, for `restore` at a site that joins."""
        return [slot.layout() for slot in self.slots]

    def restore(self, layout: Sequence[Sequence[int]]) -> None:
        """Restore what `layout` returned at another site.

        Raises:
            MismatchError: if it is of other slots or sites.
        """
        if len(layout) != len(self.slots):
            raise MismatchError(f"the other sites have {len(layout)} layers where this one has {len(self.slots)}")
        for slot, numbers in zip(self.slots, layout, strict=True):
            slot.restore(numbers)
        self._learnt = ()
        self.lay_out()

    def post(self) -> None:
        """Prepare to receive."""
        self._gather.post()

    def _by_rank(self, sizes: Sequence[int]) -> list[int]:
        """Return the payload sizes of all sites, by rank, from those of the senders."""
        found = dict(zip(self._senders, sizes, strict=True))
        return [found.get(rank, 0) for rank in range(self._transport.world_size)]

    def _arrived(self, gather: Gather) -> list[Tensor]:
        """Wait for the payloads; return those of the senders, by place."""
        payloads = gather.wait()
        return [*map(payloads.__getitem__, self._senders)]

    def _sender(self, site: int) -> str:
        """Return the name of a sender, by place."""
        return self._transport.sites[self._senders[site]]

    def _cut(self, payload: Tensor, site: int) -> list[FactorPayload]:
        return cut_slots(payload, self._head, ((slot, slot.capacity[site]) for slot in self.slots))

    def _views(self, payload: Tensor, site: int) -> tuple[Tensor, list[FactorPayload]]:
        """Return views of a payload's header and slots, made once for a payload at the same address in every step.

        Args:
            payload: the payload of a sender, by place.
            site: the place.
        """
        known = self._received.get(site)
        if known is None or known[0] is not payload:
            known = self._received[site] = payload, integers_of(payload, len(self.slots)), self._cut(payload, site)
        return known[1:]

    def fill(self, index: int, share: FactorPayload) -> None:
        """Copy a layer's rows into its slot; keep rows beyond its capacity for the second round."""
        if self._posts:
            self._gather.post()
        own, rows = self._own[index], share.left.shape[0]
        fit = self._rows[index] = min(rows, own.left.shape[0])
        if rows > fit:
            self.add_late(index, share.part(fit, with_bias=False))
            share = share.part(0, fit)
        self.slots[index].pack(share, own)

    def clear(self, index: int) -> None:
        """Send no rows in a slot."""
        self.post()
        self._rows[index] = 0
        for part in self._own[index][:3]:
            if part is not None:
                part.zero_()

    def add_late(self, index: int, share: FactorPayload) -> None:
        """Keep rows for the second round, since the payload is full or has been sent."""
        if index in self._overflow:
            share = self._overflow[index].plus(share)
        if not share.rows:  # a bias gradient may come without rows; the second round goes by rows
            left, right = (part.new_zeros(1, part.shape[1]) for part in share[:2])
            share = FactorPayload(left, right, share.bias)
        bias = None if share.bias is None else copied(share.bias)
        self._overflow[index] = FactorPayload(copied(share.left), copied(share.right), bias)
        self.extra_rows[index] = share.rows

    def own_share(self, index: int) -> FactorPayload:
        """Return what this site sends from a slot in this step, the rows of the second round included."""
        own, site = self._own[index].part(0, self._rows[index]), self._transport.sites[self._transport.rank]
        share = self.slots[index].unpack(own, site)
        return share.plus(self._overflow[index]) if index in self._overflow else share

    def drop_late(self, index: int) -> None:
        """Forget a slot's rows for the second round."""
        self._overflow.pop(index, None)
        self.extra_rows[index] = 0

    def launch(self, samples: int) -> None:
        """Send the payload.

        Args:
            samples: samples that this site's gradients stand for.
        """
        self.post()
        if self.place is not None:
            self._own_head.copy_(torch.tensor([samples, *self._rows], dtype=torch.int32))
        self._gather.launch()

    def room(self, index: int) -> int:
        """Return this site's capacity of a slot, in rows."""
        return 0 if self.place is None else self.slots[index].capacity[self.place]

    def wait(self) -> None:
        """Wait until every site's payload is there."""
        self._gather.wait()

    def _read(self, payload: Tensor, site: int) -> tuple[int, list[int], list[FactorPayload]]:
        """Return the samples of a sender, the rows in each slot, and the slots' places in its payload."""
        head, views = self._views(payload, site)
        count, *rows = head.tolist()
        if not 0 <= count <= COUNT:
            check_all("payload", self._sender(site), (count,), 0, COUNT)
        for slot, number in zip(self.slots, rows, strict=True):
            if not 0 <= number <= slot.capacity[site]:
                check_all("payload", self._sender(site), (number,), 0, slot.capacity[site])
        return count, rows, views

    def inspect(self) -> None:
        """Leave out the senders whose payloads are invalid, see `Rounds.leave_out`."""
        for site, payload in enumerate(self._arrived(self._gather)):
            try:
                _, rows, views = self._read(payload, site)
                for slot, number, view in zip(self.slots, rows, views, strict=True):
                    slot.check(view.part(0, number), self._sender(site))
            except MismatchError as error:
                self._transport.rounds.leave_out(self._senders[site], error)

    def receive(self) -> tuple[list[int], list[list[FactorPayload]]]:
        """Wait for every site's payload, if that has not been done, and read them.

        Returns:
            The samples of each site, and by slot and site what was sent; valid until the next step's `post`.
        """
        payloads = self._arrived(self._gather)
        samples, numbers, views = zip(*map(self._read, payloads, range(len(payloads))), strict=True)
        self.received_rows = [*zip(*numbers, strict=True)]
        shares = [*zip(*views, strict=True)]
        if self.received_rows != self._stacked_rows:
            self._stack(shares, payloads)
        known: Mapping[int, StackedShares] = {} if self.stacked is None else self.stacked.shares
        self.extent = 0.0 if self.stacked is None else self.stacked.decode(payloads)
        self.apart = [index for index in range(len(shares)) if index not in known]
        found = [known[index] if index in known else self._decoded(index, each) for index, each in enumerate(shares)]
        return list(samples), found

    def _stack(self, shares: Sequence[Sequence[FactorPayload]], payloads: Sequence[Tensor]) -> None:
        """Choose the slots that are decoded together, by the rows that have been received."""
        self._stacked_rows, full = self.received_rows, {}
        for index, (slot, rows) in enumerate(zip(self.slots, self.received_rows, strict=True)):
            same = [*rows] == slot.capacity == [rows[0]] * len(rows)
            if self._keeps and same and rows[0] and slot.out and slot.width:
                full[index] = shares[index]
        if full and tuple(full) not in self._stacks:
            if len(self._stacks) == _STACKS:
                self._stacks.clear()
            self._stacks[tuple(full)] = StackedSlots(full, payloads)
        self.stacked = self._stacks.get(tuple(full))

    def _decoded(self, index: int, views: Sequence[FactorPayload]) -> list[FactorPayload]:
        """Return the decoded rows of a slot, by site.

        Args:
            index: the slot.
            views: the slot's place in each payload.
        """
        found = []
        for site, (view, number) in enumerate(zip(views, self.received_rows[index], strict=True)):
            share = self.slots[index].unpack(view.part(0, number), self._sender(site))
            found.append(share if share.left.dtype == self._dtype else share.to(view.left.device, self._dtype))
        return found

    def second_round(self, extra: Sequence[Sequence[int]]) -> dict[tuple[int, int], FactorPayload]:
        """Exchange the rows beyond the slots' capacities, and those that arrived after the payload had been sent.

        Args:
            extra: by slot and site, number of such rows.

        Returns:
            What was sent, by slot and site; nothing where there were none.
        """
        if not any(map(any, extra)):
            return {}
        sites = range(len(self._senders))
        late = [[index for index in range(len(self.slots)) if extra[index][site]] for site in sites]
        sizes = [sum(sum(self.slots[index].sizes(extra[index][site])) for index in late[site]) for site in sites]
        whole = [self._sizes()[rank] + size for rank, size in zip(self._senders, sizes, strict=True)]
        for site, size in enumerate(sizes):  # as the step headers announce, before memory is allocated by them
            most = max(_ANYWAY, _TIMES * self._wire.itemsize * max(whole[:site] + whole[site + 1 :], default=MAX_BYTES))
            most = min(most, MAX_BYTES) // self._wire.itemsize
            if min(counts[site] for counts in extra) < 0 or size > most:
                error = MismatchError(
                    f"{self._sender(site)} announces {size} more values than its payload had "
                    f"room for: there may be 0 to {most}. Do all sites run the same model?"
                )
                self._transport.rounds.leave_out(self._senders[site], error)
                late[site], sizes[site] = [], 0
        gather = self._transport.gather(self._by_rank(sizes), self._wire.dtype, first=self._gather)

        def cut(payload: Tensor, site: int) -> Iterator[tuple[int, FactorPayload]]:
            layout = [(self.slots[index], extra[index][site]) for index in late[site]]
            return zip(late[site], cut_slots(payload, 0, layout), strict=True)

        if self.place is not None:
            for index, room in cut(gather.payload, self.place):
                self.slots[index].pack(self._overflow[index], room)
        gather.launch()
        shares: dict[tuple[int, int], FactorPayload] = {}
        for site, payload in enumerate(self._arrived(gather)):
            try:
                for index, share in cut(payload, site):
                    found = self.slots[index].unpack(share, self._sender(site))
                    shares[index, site] = found.to(payload.device, self._dtype)
            except MismatchError as error:
                self._transport.rounds.leave_out(self._senders[site], error)
        return shares

    def end_step(self, rows: Sequence[Sequence[int]]) -> None:
        """Update the capacities, and end the step.

        Args:
            rows: rows of every site, by slot and site.
        """
        # The same rows again, as many as there is room for, change nothing.
        if rows != self._learnt or rows != [*map(_CAPACITY, self.slots)]:
            changed = [slot.learn(counts) for slot, counts in zip(self.slots, rows, strict=True)]
            if any(changed):
                self.lay_out()
        self._learnt = rows
        self._overflow.clear()
        self._rows = [0] * len(self.slots)
        self.extra_rows = [0] * len(self.slots)


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
        self._table_rows = table_rows

    def learn(self, rows: Sequence[int]) -> bool:
        # Every batch looks up another number of rows; without some room to spare each record would take a second round.
        return super().learn([count + count // _SPARE for count in rows])

    def cut(self, payload: Tensor, start: int, rows: int) -> tuple[FactorPayload, int]:
        share, end = super().cut(payload, start, rows)
        return share._replace(right=share.right.view(self._integers)), end

    def check(self, share: FactorPayload, sender: str) -> None:
        if share.right.numel():
            check_all("payload", sender, map(int, share.right.aminmax()), 0, self._table_rows - 1)

    def unpack(self, share: FactorPayload, sender: str) -> FactorPayload:
        self.check(share, sender)
        return share._replace(left=self.wire.decode(share.left))
