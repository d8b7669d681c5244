"""Handler of PowerSGD: two sums over sites, of which the second waits for the first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ..exchange.factor_buckets import finite
from ..exchange.summed_buckets import GatheredBucket, summed_bucket
from ..methods import Method
from ..methods.base import GradientPath
from ..methods.powersgd import (
    PowerSGD,
    WeightedGradient,
    add_to_error,
    decode,
    orthonormal_basis,
    project,
    subtract_sent,
)
from ..units.base import Unit
from .handler import HandlerContext, gradient_room, register_handler
from .summed import SummedHandler, gradient_matrix


@register_handler(GradientPath.POWERSGD)
class PowerSGDHandler(SummedHandler):
    """Sums of ``P = M_s Q`` and then of ``Q = M_s^T P``, see `dadplug.methods.powersgd`."""

    bucket_mb = 0.1

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        super().__init__(units, context)
        assert isinstance(context.method, PowerSGD)
        self._method = context.method
        self._method.errors.refer(context.reference)
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
        self._matrices = [WeightedGradient(None, 0.0, None, 1.0)] * len(units)
        self._bases: list[Tensor | None] = []
        self.share_state()

    @classmethod
    def payload_size(cls, unit: Unit, rows: int, method: Method) -> int:
        assert isinstance(method, PowerSGD)
        return method.columns(*unit.shape) * sum(unit.shape)

    @property
    def gathers(self) -> bool:
        return isinstance(self._left, GatheredBucket)

    def share_state(self) -> None:
        for unit in self.units:  # a site may have come with other bases from a checkpoint
            self.context.transport.broadcast(self._method.basis(unit.name, unit.shape, unit.lead))

    def _put(self, unit: Unit, weight: float) -> bool:
        slot, method = self._slots[unit.name], self._method
        method.check_rank(unit.name, self.context.samples())
        error = method.errors.find(unit.name, unit.lead)
        matrix = self._matrices[slot] = WeightedGradient(
            gradient_matrix(unit) if weight else None,
            weight,
            None if error is None else error.view(unit.shape),
            method.loss_scales.of(unit.name),
        )
        basis = method.basis(unit.name, unit.shape, unit.lead)
        self._left.fill(slot, project(matrix, basis, transposed=True), 1.0)
        return self._left.finite(slot)

    def launch(self) -> None:
        self._left.launch()

    def receive(self) -> None:
        with self.timing("wait"):
            lefts = self._left.wait()
        self._bases = []
        for slot, (unit, left) in enumerate(zip(self.units, lefts, strict=True)):
            with self.timing("encode", unit):
                basis = orthonormal_basis(left.to(unit.lead).view(self._ranks[slot], -1))
                self._bases.append(basis)
                self._right.fill(slot, None if basis is None else project(self._matrices[slot], basis), 1.0)
        self._right.launch()

    def repeat(self) -> None:
        self._right.wait()
        super().repeat()

    def _write(self, wanted: Sequence[bool], scale: float, keep: bool) -> None:
        with self.timing("wait"):
            rights = self._right.wait()
        for slot, (unit, want) in enumerate(zip(self.units, wanted, strict=True)):
            if want:
                with self.timing("decode", unit):
                    self._write_unit(slot, rights[slot], scale, keep)

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
            add_to_error(error, matrix)
        agreed = decode(left, right, scale, gradient_room(unit.lead, unit.shape))
        if error is not None:
            share = 1 / self.context.transport.world_size / scale
            subtract_sent(error, agreed, share, matrix.loss_scale)
        if keep:
            self._method.keep(unit.name, right.clone())
