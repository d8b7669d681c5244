"""Handler of units whose gradients are summed over sites as they are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..exchange import Transport
from ..exchange.summed_buckets import GatheredBucket, summed_bucket
from ..methods.base import GradientPath
from ..units.base import Unit
from .context import HandlerContext
from .handler import register_handler, write_gradient
from .summed import SummedHandler

_SMALL_MB = 0.06


@register_handler(GradientPath.ALLREDUCE)
class DenseHandler(SummedHandler):
    """All-reduce of gradients in one bucket; small buckets and quantised ones are gathered."""

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        super().__init__(units, context)
        self.bucket = summed_bucket([unit.lead.numel() for unit in units], context.transport, self._wire)
        self._sums: Sequence[Tensor] = ()

    @classmethod
    def full_at(cls, transport: Transport) -> float:
        """Return a small size where buckets are gathered: these cost few bytes, and leave during backward."""
        small = min(_SMALL_MB, cls.bucket_mb)
        return small if transport.prefers_gather(int(1e6 * small)) else cls.bucket_mb

    @property
    def gathers(self) -> bool:
        return isinstance(self.bucket, GatheredBucket)

    def _put(self, unit: Unit, weight: float) -> bool:
        slot, gradient = self._slots[unit.name], None if unit.lead.grad is None else unit.lead.grad.detach()
        loss_scale = self.context.method.loss_scales.of(unit.name) if self.bucket.feedback else 1.0
        self.bucket.fill(slot, gradient, weight, loss_scale)
        return not self.context.checks_finite or self.bucket.finite(slot)

    def launch(self) -> None:
        self.bucket.launch()

    def receive(self) -> None:
        with self.timing("wait"):
            self._sums = self.bucket.wait()

    def _write(self, wanted: Sequence[bool], scale: float, keep: bool) -> None:
        for unit, want, value in zip(self.units, wanted, self._sums, strict=True):
            if want:
                with self.timing("decode", unit):
                    write_gradient(unit.lead, value, scale)
        self.bucket.commit([keep and want for want in wanted])

    def rounding(self) -> dict[str, Tensor]:
        return {unit.name: lost for unit, lost in zip(self.units, self.bucket.lost)}  # a bucket may keep nothing
