"""The handler of PowerSGD: two sums over sites, of which the second waits for the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..exchange.payload import finite
from ..exchange.summed_buckets import SummedBucket, summed_bucket
from ..lowrank import orthonormalise
from ..methods import Method
from ..methods.powersgd import PowerSGD
from ..units.base import Unit
from .dense import DenseHandler
from .handler import gradient_to_form, register_handler
from .step_header import StepHeader


class _Matrix(NamedTuple):
    """A site's gradient, its weight and its error memory, whose sum is not formed."""

    gradient: Tensor | None
    weight: float
    error: Tensor | None
    loss_scale: float

    def times(self, rows: Tensor, *, transposed: bool = False) -> Tensor | None:
        """Return the product of rows and the sum, or its transpose; None if there is nothing."""
        product = None
        if self.gradient is not None:
            product = (rows @ (self.gradient.T if transposed else self.gradient)).mul_(self.weight)
        if self.error is None:
            return product
        error = self.error.T if transposed else self.error
        if product is None:
            return (rows @ error).mul_(self.loss_scale)
        return product.addmm_(rows, error, alpha=self.loss_scale)


@register_handler("powersgd")
class PowerSGDHandler(DenseHandler):
    """With ``M_s`` a site's gradient, its weight and its error: sums ``P = M_s Q``, orthonormalises it, and sums
    ``Q = M_s^T P``. The agreed gradient is ``P Q^T``; each site's error is what M_s has beyond its part of it.
    """

    bucket_mb = 0.1

    @classmethod
    def numbers(cls, unit: Unit, rows: int, method: Method) -> int:
        assert isinstance(method, PowerSGD)
        return method.columns(*unit.shape) * sum(unit.shape)

    def _open(self) -> None:
        method = self.reducer.method
        assert isinstance(method, PowerSGD)
        self.method = method
        method.errors.refer(self.reducer.reference)
        self._matrices = [_Matrix(None, 0.0, None, 1.0)] * len(self.units)
        self._bases: list[Tensor | None] = []
        self._ranks = [method.columns(*unit.shape) for unit in self.units]
        self._left, self._right = (
            self._bucket([rank * unit.shape[side] for rank, unit in zip(self._ranks, self.units, strict=True)])
            for side in (0, 1)
        )
        self.bucket = self._left
        self.share_state()

    def share_state(self) -> None:
        for unit in self.units:  # a site may have come with other ones from a checkpoint
            self.reducer.transport.broadcast(self.method.basis(unit.name, unit.shape, unit.lead))

    def _bucket(self, sizes: Sequence[int]) -> SummedBucket:
        return summed_bucket(sizes, self.reducer.transport, self._wire, feedback=False)

    def rounding(self) -> dict[str, Tensor]:
        return {}

    def put(self, unit: Unit, weight: float) -> bool:
        slot = self._slots[unit.name]
        basis = self.method.basis(unit.name, unit.shape, unit.lead)
        error = self.method.errors.find(unit.name, unit.lead)
        self._matrices[slot] = _Matrix(
            self._gradient(unit) if weight else None,
            weight,
            None if error is None else error.view(unit.shape),
            self.method.loss_scales.of(unit.name),
        )
        self._left.fill(slot, self._matrices[slot].times(basis, transposed=True), 1.0)
        return self._left.finite(slot)

    def launch(self) -> None:
        self._left.launch()

    def receive(self) -> None:
        with self.timing("wait"):
            lefts = self._left.wait()
        self._bases = []
        for slot, (unit, flat) in enumerate(zip(self.units, lefts, strict=True)):
            with self.timing("encode", unit):
                left = flat.to(unit.lead).view(self._ranks[slot], -1)
                # The same bits have arrived everywhere, so that all sites find the same.
                basis = orthonormalise(left) if finite(flat) else None
                self._bases.append(basis)
                self._right.fill(slot, None if basis is None else self._matrices[slot].times(basis), 1.0)
        self._right.launch()

    def repeat(self) -> None:
        self._right.wait()
        super().repeat()

    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        total = max(1, sum(header.samples for header in headers))
        with self.timing("wait"):
            rights = self._right.wait()
        for slot, (unit, index) in enumerate(zip(self.units, self._indices(), strict=True)):
            if write and any(header.present[index] for header in headers):
                with self.timing("decode", unit):
                    self._decode(slot, rights[slot], self.reducer.reference / total, 1 / len(headers), keep)
        self._put.clear()

    def _decode(self, slot: int, right: Tensor, scale: float, share: float, keep: bool) -> None:
        """Write the agreed gradient, and what this site has beyond its share of it into the error memory."""
        unit, matrix, left = self.units[slot], self._matrices[slot], self._bases[slot]
        if left is None or not finite(right):
            gradient_to_form(unit.lead, unit.shape).fill_(math.nan)
            return
        right = right.to(unit.lead).view(self._ranks[slot], -1)
        error = None
        if keep and self.method.errors.enabled:
            error = self.method.errors.of(unit.name, unit.lead).view(unit.shape)
            if matrix.gradient is not None:
                error.add_(matrix.gradient, alpha=matrix.weight / matrix.loss_scale)
        agreed = torch.mm((left * scale).T, right, out=gradient_to_form(unit.lead, unit.shape))
        if error is not None:
            error.sub_(agreed, alpha=share / scale / matrix.loss_scale)
        if keep:
            self.method.keep(unit.name, right.clone())
