"""Handlers of units whose gradients autograd forms, and which are summed over sites.

They are summed as they are, or compressed by PowerSGD or top-k.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter, eq, is_
from typing import NamedTuple

import torch
from torch import Tensor

from ...exchange import Transport
from ...exchange.factor_buckets import extent, finite, squared_norm
from ...exchange.summed_buckets import AllReducedBucket, GatheredBucket, SparseBucket, element_size, summed_bucket
from ...exchange.wire import WireFormat, wire_format
from ..methods import Method, powersgd, topk
from ..methods.base import GradientPath
from ..methods.feedback import LossScales
from ..units.base import Unit, versions_of
from .clipping import sum_of_squares
from .faults import Fault
from .handler import BucketHandler, HandlerContext, StepHeader, gradient_room, register_handler, write_gradients

_GRADIENT, _ARRIVALS = attrgetter("lead.grad"), attrgetter("arrivals")


class SummedHandler(BucketHandler):
    """Base of handlers that sum gradients times samples over sites.

    A subclass says how a gradient is put into its bucket and how the agreed one is written. If a gradient has come,
    changed or gone since it was filled, or the samples have, all sites repeat the exchange of the bucket.

    Args:
        units: the units that share the bucket.
        context: what the handlers of a reducer share.
    """

    fills = False
    repeats = True
    blind = True
    gathers: bool
    """Whether payloads are gathered, and summed by each site."""

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        super().__init__(units, context)
        self._wire = context.wire(units[0])
        self._samples = 0  # at the first unit that was filled
        # Gradient of each unit, its version, and arrivals when it was filled; references keep identities from reuse.
        self._filled: list[Tensor | None] = []
        self._versions: list[tuple[int, int]] = []
        self._arrivals: list[int] = []

    @classmethod
    def payload_bytes(
        cls, unit: Unit, method: Method, wire: WireFormat, transport: Transport, gathered: bool = False
    ) -> int:
        return super().payload_bytes(unit, method, wire, transport, gathered or wire.quantised)

    @cached_property
    def _sent_bytes(self) -> dict[str, int]:
        given = self.context.method, self._wire, self.context.transport, self.gathers
        return {unit.name: self.payload_bytes(unit, *given) for unit in self.units}

    def sent_bytes(self, unit: Unit) -> int:
        return self._sent_bytes[unit.name]

    @abstractmethod
    def _put(self, unit: Unit, weight: float) -> bool:
        """Put a unit's gradient into the bucket.

        Args:
            unit: the unit; its gradient may be absent.
            weight: samples of the site over the reference; 0.0 for a site that does not count.

        Returns:
            Whether what was put is known to be finite, or need not be.
        """

    @abstractmethod
    def _write(self, wanted: Sequence[bool], scale: float, keep: bool) -> None:
        """Write the agreed gradients.

        Args:
            wanted: by unit, whether any site has a gradient and the gradients are to be written.
            scale: what the sum is multiplied by to make the mean over samples.
            keep: whether the step counts for state.
        """

    def on_filled(self) -> None:
        self._samples = self.context.samples()
        for unit in self._put_all(self._samples / self.context.reference):
            self.context.faults.record(Fault.GRADIENT, unit)
        self._filled, self._arrivals = [*map(_GRADIENT, self.units)], [*map(_ARRIVALS, self.units)]
        self._versions = versions_of(self._filled)
        self.context.transport.traffic.shared.append(("bytes", self._sent_bytes, 1))

    def _put_all(self, weight: float) -> list[Unit]:
        """Put all gradients into their buckets; return the units whose gradients are not finite, if that is checked."""
        return self.timed("encode", None, self._put_every, weight)

    def _put_every(self, weight: float) -> list[Unit]:
        return [unit for unit in self.units if not self._put(unit, weight)]

    def add_late(self) -> None:
        context = self.context
        other_samples = context.samples() != self._samples
        same = [*map(is_, map(_GRADIENT, self.units), self._filled)]
        versions = [*map(eq, versions_of(self._filled), self._versions)]
        arrivals = [*map(eq, map(_ARRIVALS, self.units), self._arrivals)]
        for unit in self.units:
            unit.dense = other_samples
        if not other_samples and all(same) and all(versions) and all(arrivals):  # as in most steps
            return
        for unit, *kept in zip(self.units, same, versions, arrivals, strict=True):
            unit.dense |= not all(kept)
            if unit.dense:
                context.faults.drop(unit)
                if context.checks_finite:
                    context.faults.check_gradient(unit)

    def repeat(self) -> None:
        self._samples = self.context.samples()
        for unit in self.units:
            self.context.method.rollback(unit.name)
        share = self.context.factor(self.context.transport.rank) if self.blind else 1.0
        self._put_all(share * self._samples / self.context.reference)
        self.launch()
        self.receive()

    def present(self) -> list[bool]:
        return [gradient is not None for gradient in map(_GRADIENT, self.units)]

    def own_squares(self) -> Sequence[Tensor]:
        return [sum_of_squares([unit.lead.grad for unit in self.units], self.context.precise)]

    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        scale = self.context.reference / max(1, self.context.total)
        wanted = [*map(self.context.present.__getitem__, self.positions)] if write else [False] * len(self.units)
        self._write(wanted, scale, keep)
        self._filled.clear()


def gradient_matrix(unit: Unit) -> Tensor | None:
    """Return a unit's gradient as a matrix of shape `unit.shape`; None where there is none."""
    if unit.lead.grad is None:
        return None
    gradient = unit.lead.grad.detach()  # `backward(create_graph=True)` leaves one that requires a gradient
    return (gradient.to_dense() if gradient.is_sparse else gradient).reshape(unit.shape)


_SMALL_MB = 0.25  # with fewer bytes, the calls of a bucket take longer than its passes over memory
_BUCKETS = 32  # at most, about; with more, calls take longer, and no more of the exchange runs during backward


@register_handler(GradientPath.ALLREDUCE)
class DenseHandler(SummedHandler):
    """All-reduce of gradients in one bucket; small buckets and quantised ones are gathered."""

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        super().__init__(units, context)
        self.bucket = summed_bucket([unit.lead.numel() for unit in units], context.transport, self._wire)
        self.gathers = isinstance(self.bucket, GatheredBucket)
        self.blind = isinstance(self.bucket, AllReducedBucket)
        self._sums: Sequence[Tensor] = ()

    @classmethod
    def payload_bytes(
        cls, unit: Unit, method: Method, wire: WireFormat, transport: Transport, gathered: bool = False
    ) -> int:
        rate = transport.copies if gathered or wire.quantised else transport.ring
        return int(rate * wire.flat_size(unit.lead.numel()) * wire.itemsize)

    @classmethod
    def full_at(cls, transport: Transport, whole: float) -> float:
        """Return a small size where buckets are gathered: these cost few bytes, and leave during backward."""
        small = min(max(_SMALL_MB, whole / _BUCKETS), cls.bucket_mb)
        return small if transport.prefers_gather(int(1e6 * small)) else cls.bucket_mb

    def _put(self, unit: Unit, weight: float) -> bool:
        slot, gradient = self._slots[unit.name], None if unit.lead.grad is None else unit.lead.grad.detach()
        loss_scale = self.context.method.loss_scales.of(unit.name) if self.bucket.feedback else 1.0
        self.bucket.fill(slot, gradient, weight, loss_scale, self.context.scale)
        return True

    def _put_every(self, weight: float) -> list[Unit]:
        gradients = [each if each is None else each.detach() for each in map(_GRADIENT, self.units)]
        scaled = self.bucket.feedback and LossScales.scaled
        if scaled or not weight or not self.bucket.fill_all(gradients, weight, self.context.scale):
            super()._put_every(weight)
        if not self.context.checks_finite or self.bucket.finite():  # of all in one pass
            return []
        return [unit for slot, unit in enumerate(self.units) if not self.bucket.finite(slot)]

    def launch(self) -> None:
        self.bucket.launch()

    def receive(self) -> None:
        self._sums = ()
        if self.blind or self.context.options.clip_sites is None:
            self._receive_sums()

    def repeat(self) -> None:
        self._receive_sums()  # otherwise what has been sent first would arrive in place of what follows
        super().repeat()

    def _receive_sums(self) -> Sequence[Tensor]:
        if not self._sums:
            self._sums = self.timed("wait", None, self.bucket.wait, self._shares)
        return self._sums

    @property
    def _shares(self) -> Sequence[float]:
        """Factors that clip the sites' gradients, by rank; empty without clipping, and where only sums arrive."""
        return self.context.shares if self.context.norms and not self.blind else ()

    def squares(self) -> Sequence[float]:
        return self.context.without_weights(self.bucket.squares(), self.context.reference)

    def not_finite(self) -> list[tuple[int | None, str]]:
        sums = self._receive_sums()
        self.extent = self.bucket.extent()
        if math.isfinite(self.extent):  # of all in one pass
            return []
        culprit = self.bucket.culprit()
        return [(culprit, unit.name) for unit, value in zip(self.units, sums, strict=True) if not finite(value)]

    def _write(self, wanted: Sequence[bool], scale: float, keep: bool) -> None:
        sums = self._receive_sums()
        found = [(unit.lead, value) for unit, want, value in zip(self.units, wanted, sums, strict=True) if want]
        self.timed("decode", None, write_gradients, found, scale)
        shares = self._shares
        own = shares[self.context.transport.rank] if shares else 1.0
        self.bucket.commit([keep and want for want in wanted], own * scale, self.context.scale)

    def rounding(self) -> dict[str, Tensor]:
        return {unit.name: lost for unit, lost in zip(self.units, self.bucket.lost)}  # a bucket may keep nothing


@register_handler(GradientPath.POWERSGD)
class PowerSGDHandler(SummedHandler):
    """Sums of ``P = M_s Q`` and then of ``Q = M_s^T P``, see `dadplug.step.methods.powersgd`."""

    bucket_mb = 0.1

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        super().__init__(units, context)
        assert isinstance(context.method, powersgd.PowerSGD)
        self._method = context.method
        self._ranks = [self._method.columns(*unit.shape) for unit in units]
        self._left, self._right = (
            summed_bucket(
                [rank * unit.shape[side] for rank, unit in zip(self._ranks, units, strict=True)],
                context.transport,
                self._wire,
                feedback=False,
            )
            for side in (0, 1)
        )
        self.gathers = isinstance(self._left, GatheredBucket)
        self._matrices = [powersgd.WeightedGradient(None, 0.0, None, 1.0, 1.0)] * len(units)
        self._bases: list[Tensor | None] = []
        self._rights: Sequence[Tensor] = ()  # the second sums of this step, once they have arrived
        self.share_state()

    @classmethod
    def payload_size(cls, unit: Unit, rows: int, method: Method) -> int:
        assert isinstance(method, powersgd.PowerSGD)
        return method.columns(*unit.shape) * sum(unit.shape)

    def share_state(self) -> None:
        for unit in self.units:  # a site may have come with other bases from a checkpoint
            self.context.transport.broadcast(self._method.basis(unit.name, unit.shape, unit.lead))

    def _put(self, unit: Unit, weight: float) -> bool:
        slot, method = self._slots[unit.name], self._method
        method.check_rank(unit.name, max(self.context.samples(), method.batch()))
        error = method.errors.find(unit.name, unit.lead)
        matrix = self._matrices[slot] = powersgd.WeightedGradient(
            gradient_matrix(unit) if weight else None,
            weight,
            None if error is None else error.view(unit.shape),
            method.loss_scales.of(unit.name),
            self.context.scale,
        )
        basis = method.basis(unit.name, unit.shape, unit.lead)
        self._left.fill(slot, powersgd.project(matrix, basis, transposed=True), 1.0)
        return self._left.finite(slot)

    def launch(self) -> None:
        self._left.launch()

    def receive(self) -> None:
        lefts = self.timed("wait", None, self._left.wait)
        self._bases = []
        for slot, (unit, left) in enumerate(zip(self.units, lefts, strict=True)):
            with self.timing("encode", unit):
                basis = powersgd.orthonormal_basis(left.to(unit.lead).view(self._ranks[slot], -1))
                self._bases.append(basis)
                self._right.fill(slot, None if basis is None else powersgd.project(self._matrices[slot], basis), 1.0)
        self._right.launch()

    def repeat(self) -> None:
        self._receive_right()
        self._rights = ()
        super().repeat()

    def not_finite(self) -> list[tuple[int | None, str]]:
        found = zip(self._bases, self._receive_right(), strict=True)
        extents = [math.nan if basis is None else extent(right) for basis, right in found]
        self.extent = sum(extents)
        return [(None, unit.name) for unit, each in zip(self.units, extents, strict=True) if not math.isfinite(each)]

    def measured(self) -> Sequence[float]:
        squares = self._right.squares()  # each is of P_s^T M_s, with the same P at all sites
        return self.context.without_weights(squares, self.context.reference)

    def _receive_right(self) -> Sequence[Tensor]:
        if not self._rights:
            with self.timing("wait"):
                self._rights = self._right.wait()
        return self._rights

    def _write(self, wanted: Sequence[bool], scale: float, keep: bool) -> None:
        rights, self._rights = self._receive_right(), ()
        for slot, (unit, want) in enumerate(zip(self.units, wanted, strict=True)):
            if want:
                self.timed("decode", unit, self._write_unit, slot, rights[slot], scale, keep)

    def _write_unit(self, slot: int, right: Tensor, scale: float, keep: bool) -> None:
        """Write the agreed gradient, and what this site has beyond its part of it into the error memory."""
        unit, matrix, left = self.units[slot], self._matrices[slot], self._bases[slot]
        if left is None or not finite(right):
            gradient_room(unit.lead, unit.shape).fill_(math.nan)
            return
        right = right.to(unit.lead).view(self._ranks[slot], -1)
        error = None
        if keep and self._method.errors.enabled:
            error = self._method.errors.of(unit.name, unit.lead).view(unit.shape)
            powersgd.add_to_error(error, matrix, scale)
        agreed = powersgd.decode(left, right, scale, gradient_room(unit.lead, unit.shape))
        if error is not None:
            powersgd.subtract_sent(error, agreed, 1 / len(self.context.transport.rounds.present), matrix.loss_scale)
        if keep:
            self._method.keep(unit.name, right.clone())


class _Sent(NamedTuple):
    """Selection of a unit's elements that has been sent.

    Attributes:
        whole: weighted gradient plus error memory, of shape (n,), without the loss scale.
        indices: of shape (k,).
        values: of shape (k,), as rounded to the wire format, with the loss scale.
        loss_scale: the factor that the values contain.
    """

    whole: Tensor
    indices: Tensor
    values: Tensor
    loss_scale: float


@register_handler(GradientPath.TOPK)
class TopKHandler(SummedHandler):
    """Gather of selected elements, which each site adds up in the order of ranks, see `dadplug.step.methods.topk`."""

    bucket_mb = 0.25
    gathers = True
    blind = False

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        super().__init__(units, context)
        assert isinstance(context.method, topk.TopK)
        self._method = context.method
        self._counts = [self._method.elements(unit.lead.numel()) for unit in units]
        self._bucket = SparseBucket(self._counts, context.transport, _value_format(self._wire, units[0]))
        self._sent: dict[str, _Sent] = {}

    @classmethod
    def payload_size(cls, unit: Unit, rows: int, method: Method) -> int:
        assert isinstance(method, topk.TopK)
        return 2 * method.elements(unit.lead.numel())

    @classmethod
    def payload_bytes(
        cls, unit: Unit, method: Method, wire: WireFormat, transport: Transport, gathered: bool = True
    ) -> int:
        assert isinstance(method, topk.TopK)
        return transport.copies * method.elements(unit.lead.numel()) * element_size(_value_format(wire, unit))

    def _put(self, unit: Unit, weight: float) -> bool:
        slot, gradient = self._slots[unit.name], gradient_matrix(unit) if weight else None
        errors, loss_scale = self._method.errors, self._method.loss_scales.of(unit.name)
        error, whole = errors.prepare(unit.name, unit.lead)
        whole = whole.view(-1)
        flat_gradient = None if gradient is None else gradient.reshape(-1)
        flat_error = None if error is None else error.view(-1)
        if flat_error is not None and self.context.scale != 1.0:
            flat_error = flat_error / self.context.scale
        topk.accumulate(flat_gradient, weight, flat_error, loss_scale, whole)
        indices, values = self._bucket.fill(slot, *topk.encode(whole, self._counts[slot], loss_scale))
        self._sent[unit.name] = _Sent(whole, indices, values, loss_scale)
        return finite(values)

    def launch(self) -> None:
        self._bucket.launch()

    def inspect(self) -> None:
        self._bucket.inspect([unit.lead.numel() for unit in self.units])

    def receive(self) -> None:
        self.timed("wait", None, self._bucket.wait)

    def own_squares(self) -> Sequence[Tensor]:
        weight = self._samples / self.context.reference or math.inf
        return [sum_of_squares([sent.values for sent in self._sent.values()]) / weight**2]

    def squares(self) -> Sequence[float]:
        totals = [0.0] * self.context.transport.world_size
        for slot, unit in enumerate(self.units):
            for rank, (indices, values) in enumerate(self._bucket.received(slot, unit.lead.numel())):
                values = values.to(torch.promote_types(values.dtype, torch.float64))
                whole = values.new_zeros(unit.lead.numel())  # an index may be there several times
                totals[rank] += squared_norm(whole.index_add_(0, indices, values))
        return self.context.without_weights(totals, self.context.reference)

    def not_finite(self) -> list[tuple[int | None, str]]:
        found: list[tuple[int | None, str]] = []
        self.extent = 0.0
        for slot, unit in enumerate(self.units):
            extents = [extent(values) for _, values in self._bucket.received(slot, unit.lead.numel())]
            found += [(rank, unit.name) for rank, each in enumerate(extents) if not math.isfinite(each)]
            if not sum(extents) < torch.finfo(self.dtype).max and not found:
                found.append((None, unit.name))  # their sum may leave the range
            self.extent += sum(extents)
        return found

    def _write(self, wanted: Sequence[bool], scale: float, keep: bool) -> None:
        shares = self.context.shares
        for slot, (unit, want) in enumerate(zip(self.units, wanted, strict=True)):
            if want:
                with self.timing("decode", unit):
                    found = zip(self._bucket.received(slot, unit.lead.numel()), shares, strict=True)
                    clipped = (
                        (at, each if share == 1.0 else share * each.to(self.dtype)) for (at, each), share in found
                    )
                    topk.decode(clipped, scale, gradient_room(unit.lead, (-1,)))
            if keep and want:
                topk.subtract_sent(*self._sent[unit.name])
                self._method.errors.commit(unit.name, shares[self.context.transport.rank] * scale, self.context.scale)
            else:
                self._method.rollback(unit.name)
        self._sent.clear()


def _value_format(wire: WireFormat, unit: Unit) -> WireFormat:
    """Return the format of the values: bf16 for a quantised one, since values of one magnitude need no scale."""
    return wire_format("bf16", unit.lead.dtype) if wire.quantised else wire
