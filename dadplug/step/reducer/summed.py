"""Handlers of units whose gradients autograd forms, and which are summed over sites: base, and sums as they are."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter, eq, is_

from torch import Tensor

from ...exchange import Transport
from ...exchange.factor_buckets import finite
from ...exchange.summed_buckets import AllReducedBucket, GatheredBucket, summed_bucket
from ...exchange.wire import WireFormat
from ..methods import Method
from ..methods.base import GradientPath
from ..methods.feedback import LossScales
from ..units.base import Unit, versions_of
from .clipping import sum_of_squares
from .faults import Fault
from .handler import BucketHandler, HandlerContext, StepHeader, register_handler, write_gradients

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
