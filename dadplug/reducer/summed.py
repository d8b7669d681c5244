"""Handlers of units whose gradients autograd forms, and which are summed over sites: as they are or compressed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..exchange import Transport
from ..exchange.summed_buckets import GatheredBucket, summed_bucket
from ..exchange.wire import WireFormat
from ..methods import Method
from ..methods.base import GradientPath
from ..units.base import Unit
from .handler import BucketHandler, HandlerContext, register_handler, write_gradient
from .step_header import Fault, StepHeader


class _Filled(NamedTuple):
    """State of a unit when it was filled; the reference keeps the gradient's identity from being reused."""

    gradient: Tensor | None
    version: int
    arrivals: int

    @classmethod
    def of(cls, unit: Unit) -> _Filled:
        gradient = unit.lead.grad
        return cls(gradient, _version(gradient), unit.arrivals)

    def still_of(self, unit: Unit) -> bool:
        """Return whether the unit has the same gradient, unchanged, and no other has arrived."""
        gradient = unit.lead.grad
        if gradient is not self.gradient or unit.arrivals != self.arrivals:
            return False
        return _version(gradient) == self.version


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None or gradient.is_inference() else gradient._version


class SummedHandler(BucketHandler):
    """Base of handlers that sum gradients times samples over sites.

    A subclass says how a gradient is put into its bucket and how the agreed one is written. If a gradient has come,
    changed or gone since it was filled, or the samples have, all sites repeat the exchange of the bucket.

    Args:
        units: the units that share the bucket.
        context: what the handlers of a reducer share.
    """

    repeats = True

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        super().__init__(units, context)
        self._wire = context.wire(units[0])
        self._samples = 0  # at the first unit that was filled
        self._filled: dict[str, _Filled] = {}
        self._sent_bytes: dict[str, int] = {}

    @classmethod
    def payload_bytes(
        cls, unit: Unit, method: Method, wire: WireFormat, transport: Transport, gathered: bool = False
    ) -> int:
        return super().payload_bytes(unit, method, wire, transport, gathered or wire.quantised)

    @property
    @abstractmethod
    def gathers(self) -> bool:
        """Whether payloads are gathered, and summed by each site."""

    def sent_bytes(self, unit: Unit) -> int:
        nbytes = self._sent_bytes.get(unit.name)
        if nbytes is None:
            method, transport = self.context.method, self.context.transport
            nbytes = self.payload_bytes(unit, method, self._wire, transport, self.gathers)
            self._sent_bytes[unit.name] = nbytes
        return nbytes

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

    def fill(self, unit: Unit) -> None:
        if not self._filled:
            self._samples = self.context.samples()
        if not self._put_metered(unit):
            self.context.faults.record(Fault.GRADIENT, unit)
        self._filled[unit.name] = _Filled.of(unit)

    def _put_metered(self, unit: Unit) -> bool:
        self.context.transport.traffic.of(unit.name).bytes += self.sent_bytes(unit)
        with self.timing("encode", unit):
            return self._put(unit, self._samples / self.context.reference)

    def add_late(self) -> None:
        context = self.context
        other_samples = context.samples() != self._samples
        for unit in self.units:
            unit.dense = other_samples or not self._filled[unit.name].still_of(unit)
            if unit.dense:
                context.faults.drop(unit)
                if context.checks_finite:
                    context.faults.check_gradient(unit)

    def repeat(self) -> None:
        self._samples = self.context.samples()
        for unit in self.units:
            self.context.method.rollback(unit.name)
            self._put_metered(unit)
        self.launch()
        self.receive()

    def present(self, unit: Unit) -> bool:
        return unit.lead.grad is not None

    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        scale = self.context.reference / max(1, sum(header.samples for header in headers))
        wanted = [write and any(header.present[position] for header in headers) for position in self._positions]
        self._write(wanted, scale, keep)
        self._filled.clear()


def gradient_matrix(unit: Unit) -> Tensor | None:
    """Return a unit's gradient as a matrix of shape `unit.shape`; None where there is none."""
    if unit.lead.grad is None:
        return None
    gradient = unit.lead.grad.detach()  # `backward(create_graph=True)` leaves one that requires a gradient
    return (gradient.to_dense() if gradient.is_sparse else gradient).reshape(unit.shape)


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
