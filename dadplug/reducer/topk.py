"""Handler of top-k: the largest elements of each site's gradient, gathered with their indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..exchange import Transport
from ..exchange.factor_buckets import finite
from ..exchange.summed_buckets import SparseBucket, element_size
from ..exchange.wire import WireFormat, wire_format
from ..methods import Method
from ..methods.base import GradientPath
from ..methods.topk import TopK, accumulate, decode, encode, subtract_sent
from ..units.base import Unit
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
    """Gather of selected elements, which each site adds up in the order of ranks, see `dadplug.methods.topk`."""

    bucket_mb = 0.25

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        super().__init__(units, context)
        assert isinstance(context.method, TopK)
        self._method = context.method
        self._method.errors.refer(context.reference)
        self._counts = [self._method.elements(unit.lead.numel()) for unit in units]
        self._bucket = SparseBucket(self._counts, context.transport, _value_format(self._wire, units[0]))
        self._sent: dict[str, _Sent] = {}

    @classmethod
    def payload_size(cls, unit: Unit, rows: int, method: Method) -> int:
        assert isinstance(method, TopK)
        return 2 * method.elements(unit.lead.numel())

    @classmethod
    def payload_bytes(
        cls, unit: Unit, method: Method, wire: WireFormat, transport: Transport, gathered: bool = True
    ) -> int:
        assert isinstance(method, TopK)
        return transport.copies * method.elements(unit.lead.numel()) * element_size(_value_format(wire, unit))

    @property
    def gathers(self) -> bool:
        return True

    def _put(self, unit: Unit, weight: float) -> bool:
        slot, gradient = self._slots[unit.name], gradient_matrix(unit) if weight else None
        errors, loss_scale = self._method.errors, self._method.loss_scales.of(unit.name)
        error, whole = errors.find(unit.name, unit.lead), errors.prepare(unit.name, unit.lead).view(-1)
        flat_gradient = None if gradient is None else gradient.reshape(-1)
        accumulate(flat_gradient, weight, None if error is None else error.view(-1), loss_scale, whole)
        indices, values = self._bucket.fill(slot, *encode(whole, self._counts[slot], loss_scale))
        self._sent[unit.name] = _Sent(whole, indices, values, loss_scale)
        return finite(values)

    def launch(self) -> None:
        self._bucket.launch()

    def receive(self) -> None:
        with self.timing("wait"):
            self._bucket.wait()

    def _write(self, wanted: Sequence[bool], scale: float, keep: bool) -> None:
        for slot, (unit, want) in enumerate(zip(self.units, wanted, strict=True)):
            if want:
                with self.timing("decode", unit):
                    decode(self._bucket.received(slot), scale, gradient_room(unit.lead, (-1,)))
            if keep and want:
                subtract_sent(*self._sent[unit.name])
                self._method.commit(unit.name)
            else:
                self._method.rollback(unit.name)
        self._sent.clear()


def _value_format(wire: WireFormat, unit: Unit) -> WireFormat:
    """Return the format of the values: bf16 for a quantised one, since values of one magnitude need no scale."""
    return wire_format("bf16", unit.lead.dtype) if wire.quantised else wire
