"""Handler of units whose gradients are compressed by PowerSGD, see `dadplug.step.methods.powersgd`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ...exchange.factor_buckets import extent, finite
from ...exchange.summed_buckets import GatheredBucket, summed_bucket
from ..methods import Method, powersgd
from ..methods.base import GradientPath
from ..units.base import Unit
from .handler import HandlerContext, gradient_room, register_handler
from .summed import SummedHandler, gradient_matrix


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
