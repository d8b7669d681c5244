"""Handler of units of whose gradients each site sends the largest elements, see `dadplug.step.methods.topk`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...exchange import Transport
from ...exchange.factor_buckets import extent, finite, squared_norm
from ...exchange.summed_buckets import SparseBucket, element_size
from ...exchange.wire import WireFormat, wire_format
from ..methods import Method, topk
from ..methods.base import GradientPath
from ..units.base import Unit
from .clipping import sum_of_squares
from .handler import HandlerContext, gradient_room, register_handler
from .summed import SummedHandler, gradient_matrix


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
