"""Buckets of gradients that are summed over sites: dense ones, and selected elements with their indices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MismatchError
from .factor_buckets import extent, finite, squared_norm
from .fields import check_all
from .transport import Gather, PendingSum, Transport
from .wire import QuantisedFormat, WireFormat, rescale

_SMALL = 4096  # elements of a gradient, about, below which a call takes longer than a pass over memory


class SummedBucket(ABC):
    """Gradients of several parameters, side by side in one flat tensor, that are summed over sites in one exchange.

    Made by `summed_bucket`.

    Args:
        flat: the tensor; what belongs to no gradient is padding.
        sizes: number of elements of each gradient.

    Attributes:
        feedback: whether it keeps what rounding to the wire format takes away, for the next step.
    """

    feedback = False

    def __init__(self, flat: Tensor, sizes: Sequence[int]) -> None:
        self._flat = flat
        self._sizes = list(sizes)
        self._parts = self._split(flat)

    def _split(self, flat: Tensor) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = flat.split(self._sizes)
        return parts

    @property
    def lost(self) -> Sequence[Tensor]:
        """Rounding errors of the wire format that the next step adds, without the loss scale.

        One flat tensor for each gradient; empty for buckets that keep nothing.
        """
        return ()

    def fill(
        self, index: int, gradient: Tensor | None, weight: float, loss_scale: float = 1.0, scale: float = 1.0
    ) -> None:
        """Put a gradient into its place, times the site's weight, plus what was lost of it before.

        Args:
            index: its place.
            gradient: the gradient, of any shape; None counts as zero.
            weight: the site's weight.
            loss_scale: the factor that the gradient contains.
            scale: what the sum is expected to be multiplied by to make the mean.
        """
        part = self._parts[index]
        if gradient is None or weight == 0.0:
            part.zero_()
        elif gradient.is_sparse:
            part.copy_(gradient.to_dense().reshape(-1) * weight)
        elif gradient.dtype == part.dtype and gradient.device == part.device:
            torch.mul(gradient.reshape(-1), weight, out=part)
        else:
            part.copy_(gradient.reshape(-1) * weight)

    def fill_all(self, gradients: Sequence[Tensor | None], weight: float, scale: float = 1.0) -> bool:
        """Put all gradients into their places at once, if they are plain tensors as these; return whether they are.

        Args:
            gradients: the gradients; they contain no loss scale.
            weight: the site's weight.
            scale: as in `fill`.
        """
        kind = torch.strided, self._flat.dtype, self._flat.device
        flat = [
            each if each.dim() == 1 else each.reshape(-1)
            for each in gradients
            if type(each) is Tensor and (each.layout, each.dtype, each.device) == kind
        ]
        if len(flat) < len(gradients):
            return False
        self._fill_flat(flat, weight, scale)
        return True

    def _fill_flat(self, flat: list[Tensor], weight: float, scale: float) -> None:
        """Put all gradients, each a flat tensor, into their places, times the weight."""
        if weight == 1.0 or self._flat.numel() < _SMALL * len(flat):
            torch._foreach_copy_(list(self._parts), flat)
            if weight != 1.0:
                self._flat.mul_(weight)
        else:  # in one pass over memory
            for part, each in zip(self._parts, flat, strict=True):
                torch.mul(each, weight, out=part)

    def finite(self, index: int | None = None) -> bool:
        """Return whether a filled part holds neither NaN nor Inf; None for all parts, which takes one pass."""
        return finite(self._flat if index is None else self._parts[index])

    def extent(self) -> float:
        """Return the size of the sum of all sums; NaN or infinity only where these hold such a value."""
        return extent(self._flat)

    def culprit(self) -> int | None:
        """Return the rank of a site that has sent NaN or Inf, as all sites find; None where the sum does not tell."""
        return None

    @abstractmethod
    def launch(self) -> None:
        """Start the exchange."""

    @abstractmethod
    def wait(self, shares: Sequence[float] = ()) -> Sequence[Tensor]:
        """Wait for the sums, one flat tensor for each gradient; they hold until the next `fill`.

        Args:
            shares: by rank, factors of the payloads, where these are gathered; empty for 1.0.
        """

    def squares(self) -> list[float]:
        """Return the squared norms of the payloads, by rank; empty where they are not gathered."""
        return []

    def commit(self, kept: Sequence[bool], scale: float, expected: float) -> None:  # noqa: B027  (most buckets keep nothing)
        """Replace what was lost before by what this step has lost.

        Args:
            kept: for each gradient, whether the step counts; otherwise its memory stays as it was.
            scale: what the sums are multiplied by to make means.
            expected: what was given to `fill`.
        """


class AllReducedBucket(SummedBucket):
    """Gradients that are summed in one all-reduce.

    Args:
        sizes: number of elements of each gradient.
        transport: the transport.
        dtype: type on the wire.
    """

    def __init__(self, sizes: Sequence[int], transport: Transport, dtype: torch.dtype) -> None:
        super().__init__(torch.zeros(sum(sizes), dtype=dtype, device=transport.device), sizes)
        self._transport = transport
        self._reduction: PendingSum | None = None

    def launch(self) -> None:
        self._reduction = self._transport.all_reduce(self._flat)

    def wait(self, shares: Sequence[float] = ()) -> Sequence[Tensor]:
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            reduction.wait()
        return self._parts


class GatheredBucket(SummedBucket):
    """Gradients that every site gathers, and sums in the order of ranks.

    The sum replaces rank 0's payload; values of a narrow type are summed in single precision, beside it.

    Args:
        sizes: number of elements of each gradient.
        transport: the transport.
        dtype: type on the wire.
        once: whether it takes place once.
    """

    def __init__(self, sizes: Sequence[int], transport: Transport, dtype: torch.dtype, once: bool = False) -> None:
        self._gather = transport.gather([sum(sizes)] * transport.world_size, dtype, once=once)
        super().__init__(self._gather.payload, sizes)
        wide = torch.promote_types(dtype, torch.float32)
        self._total = None if wide == dtype else torch.empty(sum(sizes), dtype=wide, device=transport.device)
        self._summed = self._flat
        self._replaces = False  # whether the sum stands in place of rank 0's payload

    def launch(self) -> None:
        self._replaces = False
        self._gather.launch()

    def wait(self, shares: Sequence[float] = ()) -> Sequence[Tensor]:
        first, *others = self._gather.wait()
        total = first if self._total is None else self._total.copy_(first)
        own, *factors = shares or [1.0] * (1 + len(others))
        if own != 1.0:
            total.mul_(own)
        for payload, factor in zip(others, factors, strict=True):
            total.add_(payload, alpha=factor)
        self._summed, self._replaces = total, self._total is None
        return self._split(total)

    def squares(self) -> list[float]:
        first, *others = self._gather.wait()
        if self._replaces:  # without weights: norms are not asked for after `wait` where it has got some
            first = first.double() - torch.stack([*others]).double().sum(0)
        return [squared_norm(payload) for payload in (first, *others)]

    def extent(self) -> float:
        return extent(self._summed)

    def culprit(self) -> int | None:
        _, *others = self._gather.wait()  # the sum has replaced the first one
        return next((rank for rank, payload in enumerate(others, 1) if not finite(payload)), None)


class _Blocks(NamedTuple):
    """Blocks of one width, of all gradients that are divided into such.

    Attributes:
        width: elements of a block.
        values: their places in the flat tensor.
        coded: their places in a payload.
    """

    width: int
    values: slice
    coded: slice


class QuantisedBucket(SummedBucket):
    """Gradients that every site gathers in a quantised format, and sums in the order of ranks.

    The rounding error is kept, and added to the next step's gradient, once `commit` says that the step counts. A site
    sends (S - 1) bytes for each element, where an all-reduce in single precision sends 8 (S - 1) / S.

    No block belongs to two gradients: beside large ones the elements of a small one would be rounded to zero for many
    steps, and then be sent at once.

    Args:
        sizes: number of elements of each gradient.
        transport: the transport.
        wire: the format.
        feedback: whether the rounding error is kept.
    """

    def __init__(
        self, sizes: Sequence[int], transport: Transport, wire: QuantisedFormat, feedback: bool = True
    ) -> None:
        self._wire = wire
        self.feedback = feedback
        self._starts, length, coded = [0] * len(sizes), 0, 0
        self._blocks: list[_Blocks] = []
        shapes = [wire.blocks(size) for size in sizes]
        for width in sorted({width for _, width in shapes if width}):
            first, before = length, coded
            for index, shape in enumerate(shapes):
                if shape[1] == width:
                    self._starts[index] = length
                    length += shape[0] * width
            coded += (length - first) // width * wire.row_size(width)
            self._blocks.append(_Blocks(width, slice(first, length), slice(before, coded)))
        super().__init__(torch.zeros(length, device=transport.device), sizes)
        ends = [
            (start + size, start + rows * width)
            for start, size, (rows, width) in zip(self._starts, sizes, shapes, strict=True)
        ]
        self._padding = [self._flat[start:end] for start, end in ends if start < end]
        self._lost, self._next = (self._memory() for _ in range(2))
        self._loss_scales = [1.0] * len(self._sizes)
        self._gather: Gather = transport.gather([coded] * transport.world_size, wire.dtype)

    def _split(self, flat: Tensor) -> Sequence[Tensor]:
        return [flat[start : start + size] for start, size in zip(self._starts, self._sizes, strict=True)]

    def _memory(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Return zeros for what rounding takes: of all gradients, and of each."""
        zeros = torch.zeros_like(self._flat) if self.feedback else self._flat[:0]
        return zeros, self._split(zeros) if self.feedback else ()

    @property
    def lost(self) -> Sequence[Tensor]:
        return self._lost[1]

    def fill(
        self, index: int, gradient: Tensor | None, weight: float, loss_scale: float = 1.0, scale: float = 1.0
    ) -> None:
        part = self._parts[index]
        if self.feedback:
            torch.mul(self.lost[index], loss_scale / scale, out=part)
            self._loss_scales[index] = loss_scale
        else:
            part.zero_()
        if gradient is not None and weight != 0.0:
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            part.add_(gradient.reshape(-1).to(part), alpha=weight)

    def _fill_flat(self, flat: list[Tensor], weight: float, scale: float) -> None:
        super()._fill_flat(flat, weight, scale)
        if self.feedback:
            self._flat.add_(self._lost[0], alpha=1.0 / scale)
            self._loss_scales = [1.0] * len(flat)

    def launch(self) -> None:
        for each in self._padding:  # the sums of the last step are there, and may have been NaN
            each.zero_()
        payload, rest = self._gather.payload, self._next[0]
        for width, values, coded in self._blocks:
            rows, place = self._flat[values].view(-1, width), payload[coded].view(-1, self._wire.row_size(width))
            self._wire.encode(rows, place, rest=rest[values].view(-1, width) if self.feedback else None)
        self._gather.launch()

    def _decoded(self, payload: Tensor) -> list[Tensor]:
        """Return the values of a payload, by width of their blocks."""
        size = self._wire.row_size
        return [self._wire.decode(payload[coded].view(-1, size(width))).view(-1) for width, _, coded in self._blocks]

    def wait(self, shares: Sequence[float] = ()) -> Sequence[Tensor]:
        self._flat.zero_()
        payloads = self._gather.wait()
        for payload, share in zip(payloads, shares or [1.0] * len(payloads), strict=True):
            for (_, values, _), decoded in zip(self._blocks, self._decoded(payload), strict=True):
                self._flat[values].add_(decoded, alpha=share)
        return self._parts

    def squares(self) -> list[float]:
        return [sum(map(squared_norm, self._decoded(payload))) for payload in self._gather.wait()]

    def culprit(self) -> int | None:
        payloads = enumerate(self._gather.wait())
        return next((rank for rank, payload in payloads if not all(map(finite, self._decoded(payload)))), None)

    def commit(self, kept: Sequence[bool], scale: float, expected: float) -> None:
        if not self.feedback or not any(kept):
            return
        self._lost, self._next = self._next, self._lost
        if all(kept) and set(self._loss_scales) == {1.0}:
            rescale(self._lost[0], self._next[0], scale, expected)
            return
        for now, before, keep, loss_scale in zip(self.lost, self._next[1], kept, self._loss_scales, strict=True):
            if not keep:
                now.copy_(before)
                continue
            if loss_scale != 1.0:
                now.div_(loss_scale)
            rescale(now, before, scale, expected)


def summed_bucket(sizes: Sequence[int], transport: Transport, wire: WireFormat, feedback: bool = True) -> SummedBucket:
    """Make the kind of bucket that sums gradients soonest.

    Args:
        sizes: number of elements of each gradient.
        transport: the transport.
        wire: format of the payload.
        feedback: whether the rounding error of a quantised format is kept for the next step.
    """
    if isinstance(wire, QuantisedFormat):
        return QuantisedBucket(sizes, transport, wire, feedback)
    if transport.prefers_gather(sum(sizes) * wire.itemsize):
        return GatheredBucket(sizes, transport, wire.dtype)
    return AllReducedBucket(sizes, transport, wire.dtype)


_ALIGNMENT = 16  # bytes
_INDEX = torch.int32


def element_size(wire: WireFormat) -> int:
    """Return the bytes of one element and its index in a payload.

    Args:
        wire: format of the values.
    """
    return _INDEX.itemsize + wire.itemsize


class SparseBucket:
    """Indices and values of several gradients in one all-gather.

    A payload holds, gradient by gradient, the indices as int32 and then the values in the wire format.

    Args:
        counts: number of elements that each site sends of each gradient.
        transport: the transport.
        wire: format of the values; not a quantised one.
    """

    def __init__(self, counts: Sequence[int], transport: Transport, wire: WireFormat) -> None:
        self._wire = wire
        self._counts = list(counts)
        self._starts = [0]
        for count in counts:
            for size in (count * _INDEX.itemsize, count * wire.itemsize):
                self._starts.append(self._starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self._transport = transport
        self._gather: Gather = transport.gather([self._starts[-1]] * transport.world_size, torch.uint8)
        self._payloads: Sequence[Tensor] = ()

    def _views(self, payload: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return views of a gradient's indices and values in a payload."""
        count, (first, second) = self._counts[index], self._starts[2 * index : 2 * index + 2]
        indices = payload[first : first + count * _INDEX.itemsize].view(_INDEX)
        return indices, payload[second : second + count * self._wire.itemsize].view(self._wire.dtype)

    def fill(self, index: int, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the selected elements of a gradient into its place.

        Args:
            index: its place.
            indices: of shape (k,), any integer type.
            values: of shape (k,), any floating-point type.

        Returns:
            Views of the indices and of the values in the payload, rounded to the wire format.
        """
        places = self._views(self._gather.payload, index)
        places[0].copy_(indices)
        places[1].copy_(values)
        return places

    def launch(self) -> None:
        """Start the exchange."""
        self._gather.launch()

    def wait(self) -> None:
        """Wait for the payloads of all sites."""
        self._payloads = self._gather.wait()

    def received(self, index: int, numel: int) -> list[tuple[Tensor, Tensor]]:
        """Return the indices and values of a gradient, by rank; they hold until the next `fill`.

        Args:
            index: its place.
            numel: number of its elements.

        Raises:
            MismatchError: if an index is out of range.
        """
        found = [self._views(payload, index) for payload in self._payloads]
        for rank, (indices, _) in enumerate(found):
            self._check(rank, indices, numel)
        return found

    def inspect(self, numels: Sequence[int]) -> None:
        """Leave out the sites whose indices are out of range, see `Rounds.leave_out`.

        Args:
            numels: number of elements of each gradient.
        """
        for rank, payload in enumerate(self._gather.wait()):
            try:
                for index, numel in enumerate(numels):
                    self._check(rank, self._views(payload, index)[0], numel)
            except MismatchError as error:
                self._transport.rounds.leave_out(rank, error)

    def _check(self, rank: int, indices: Tensor, numel: int) -> None:
        check_all("payload", self._transport.sites[rank], map(int, indices.aminmax()), 0, numel - 1)
