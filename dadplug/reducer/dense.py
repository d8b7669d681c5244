"""The handler of units whose gradients are summed over sites as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from ..exchange import Transport
from ..exchange.payload import finite
from ..exchange.summed_buckets import GatheredBucket, summed_bucket
from ..exchange.wire import WireFormat
from ..methods import Method
from ..units.base import Unit
from .handler import BucketHandler, register_handler, write_gradient
from .step_header import StepHeader

if TYPE_CHECKING:
    from .reducer import Reducer

_SMALL_MB = 0.06


class _Put(NamedTuple):
    """The gradient of a unit when it was put into the bucket; the reference keeps its identity from being reused."""

    gradient: Tensor | None
    version: int
    arrivals: int

    @classmethod
    def of(cls, unit: Unit) -> _Put:
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


@register_handler("allreduce")
class DenseHandler(BucketHandler):
    """All-reduces gradients in a bucket, or gathers them quantised."""

    repeats = True

    def __init__(self, units: Sequence[Unit], reducer: Reducer) -> None:
        super().__init__(units, reducer)
        self._wire = reducer.wire(self.dtype)
        self._samples = 0
        self._put: dict[str, _Put] = {}
        self._open()

    def _open(self) -> None:
        """Makes the bucket."""
        sizes = [unit.lead.numel() for unit in self.units]
        self.bucket = summed_bucket(sizes, self.reducer.transport, self._wire)
        self._sums: Sequence[Tensor] = ()

    gathers: ClassVar[bool] = False
    """Whether payloads are gathered on any wire, and never summed on their way."""

    @classmethod
    def full_at(cls, transport: Transport) -> float:
        """A bucket that is gathered costs little beside its bytes, and may leave while backward goes on."""
        small = min(_SMALL_MB, cls.bucket_mb)
        return small if transport.prefers_gather(int(1e6 * small)) else cls.bucket_mb

    @classmethod
    def payload_bytes(
        cls, unit: Unit, method: Method, wire: WireFormat, transport: Transport, gathered: bool = False
    ) -> int:
        """Tells how many bytes a site hands to the transport for a unit in a step.

        Args:
            unit: the unit.
            method: the method.
            wire: format of the payload.
            transport: the transport.
            gathered: whether the unit's bucket is gathered though it might be summed on its way.
        """
        rate = transport.copies if gathered or cls.gathers or wire.quantised else transport.ring
        return int(rate * cls.numbers(unit, 0, method) * wire.itemsize)

    def sent_bytes(self, unit: Unit) -> int:
        """Tells how many bytes this site hands to the transport for a unit in a step."""
        gathered = not self.gathers and isinstance(self.bucket, GatheredBucket)
        return self.payload_bytes(unit, self.reducer.method, self._wire, self.reducer.transport, gathered)

    def rounding(self) -> dict[str, Tensor]:
        return {unit.name: lost for unit, lost in zip(self.units, self.bucket.lost)}  # a bucket may keep nothing

    def put(self, unit: Unit, weight: float) -> bool:
        """Puts a unit's gradient into the bucket, times the site's weight; says whether it is finite."""
        slot, gradient = self._slots[unit.name], None if unit.lead.grad is None else unit.lead.grad.detach()
        loss_scale = self.reducer.method.loss_scales.of(unit.name) if self.bucket.feedback else 1.0
        self.bucket.fill(slot, gradient, weight, loss_scale)
        return not self.reducer.checks or self.bucket.finite(slot)

    def fill(self, unit: Unit) -> None:
        if not self._put:
            self._samples = self.reducer.samples()
        if not self._put_metered(unit):
            self.reducer.faults.append((3, unit.name))
        self._put[unit.name] = _Put.of(unit)

    def _put_metered(self, unit: Unit) -> bool:
        self.reducer.transport.traffic.of(unit.name).bytes += self.sent_bytes(unit)
        with self.timing("encode", unit):
            return self.put(unit, self._samples / self.reducer.reference)

    def launch(self) -> None:
        self.bucket.launch()

    def settle_late(self) -> None:
        """Find the units whose payload is void: a gradient has come, changed or gone since, or the samples have."""
        other_samples = self.reducer.samples() != self._samples
        for unit in self.units:
            unit.dense = other_samples or not self._put[unit.name].still_of(unit)
            if unit.dense:
                faults, gradient = self.reducer.faults, unit.lead.grad
                faults[:] = [fault for fault in faults if fault[1] != unit.name]
                if self.reducer.checks and gradient is not None and not finite(gradient):
                    faults.append((3, unit.name))

    def repeat(self) -> None:
        self._samples = self.reducer.samples()
        for unit in self.units:
            self.reducer.method.rollback(unit.name)
            self._put_metered(unit)
        self.launch()
        self.receive()

    def present(self, unit: Unit) -> bool:
        return unit.lead.grad is not None

    def receive(self) -> None:
        with self.timing("wait"):
            self._sums = self.bucket.wait()

    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        scale = self.reducer.reference / max(1, sum(header.samples for header in headers))
        wanted = [write and any(header.present[index] for header in headers) for index in self._indices()]
        for unit, want, value in zip(self.units, wanted, self._sums, strict=True):
            if want:
                with self.timing("decode", unit):
                    write_gradient(unit.lead, value, scale)
        self.bucket.commit([keep and want for want in wanted])
        self._put.clear()

    def _gradient(self, unit: Unit) -> Tensor | None:
        """Return a unit's gradient as a matrix."""
        if unit.lead.grad is None:
            return None
        gradient = unit.lead.grad.detach()  # `backward(create_graph=True)` leaves one that requires a gradient
        return (gradient.to_dense() if gradient.is_sparse else gradient).reshape(unit.shape)
