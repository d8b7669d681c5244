"""The stage of PowerSGD: two sums over sites, of which the second waits for the first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..exchange.buckets import DenseBucket, dense_bucket
from ..exchange.codes import CodedBucket
from ..lowrank import orthonormalise
from ..methods import Method
from ..methods.powersgd import PowerSGD
from ..notes import Note
from ..units import Unit
from .base import register_stage, write_gradient
from .dense import DenseStage


@register_stage("powersgd")
class PowerStage(DenseStage):
    """With ``M_s`` a site's gradient, its weight and its error: sums ``P = M_s Q``, orthonormalises it, and sums
    ``Q = M_s^T P``. The agreed gradient is ``P Q^T``; each site's error is what M_s has beyond its part of it.
    """

    bucket_mb = 0.1

    @classmethod
    def numbers(cls, unit: Unit, rows: int, method: Method) -> int:
        assert isinstance(method, PowerSGD)
        return method.columns(*unit.shape) * sum(unit.shape)

    def _open(self) -> None:
        method = self.pipeline.method
        assert isinstance(method, PowerSGD)
        self.method = method
        method.errors.refer(self.pipeline.reference)
        self._matrices = [torch.empty(0)] * len(self.units)
        self._ranks = [method.columns(*unit.shape) for unit in self.units]
        self._left, self._right = (
            self._bucket([rank * unit.shape[side] for rank, unit in zip(self._ranks, self.units, strict=True)])
            for side in (0, 1)
        )
        self.bucket = self._left
        self.share_state()

    def share_state(self) -> None:
        for unit in self.units:  # a site may have come with other ones from a checkpoint
            self.pipeline.transport.broadcast(self.method.basis(unit.name, unit.shape, unit.lead))

    def _bucket(self, sizes: Sequence[int]) -> DenseBucket | CodedBucket:
        wire, transport = self.pipeline.wire(self.dtype), self.pipeline.transport
        if wire == torch.int8:
            return CodedBucket(sizes, transport, feedback=False)
        return dense_bucket(sizes, transport, wire)

    def rounding(self) -> dict[str, Tensor]:
        return {}

    def put(self, unit: Unit, weight: float) -> bool:
        slot, gradient = self._slots[unit.name], unit.lead.grad
        matrix = self.method.errors.of(unit.name, unit.lead).view(unit.shape)
        if gradient is not None:
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            matrix.add_(gradient.reshape(unit.shape), alpha=weight)
        self._matrices[slot] = matrix
        basis = self.method.basis(unit.name, unit.shape, unit.lead)
        self._left.fill(slot, basis @ matrix.T, 1.0)
        return self._left.finite(slot)

    def launch(self) -> None:
        self._left.launch()

    def receive(self) -> None:
        with self.timing("wait"):
            lefts = self._left.wait()
        self._bases = []
        for slot, (unit, flat, matrix) in enumerate(zip(self.units, lefts, self._matrices, strict=True)):
            with self.timing("encode", unit):
                basis = orthonormalise(flat.to(matrix.dtype).view(self._ranks[slot], -1))
                self._bases.append(basis)
                self._right.fill(slot, basis @ matrix, 1.0)
        self._right.launch()

    def finish(self, notes: Sequence[Note], write: bool) -> None:
        total = max(1, sum(note.samples for note in notes))
        scale, share = self.pipeline.reference / total, 1 / len(notes)
        with self.timing("wait"):
            rights = self._right.wait()
        for slot, (unit, index) in enumerate(zip(self.units, self._indices(), strict=True)):
            matrix, left = self._matrices[slot], self._bases[slot]
            reduced_already = any(note.dense[index] for note in notes)
            if any(note.fault for note in notes) or reduced_already:
                self.method.errors.forget(unit.name)  # it holds gradients that are lost, or that have been agreed on
            elif write and any(note.present[index] for note in notes):
                with self.timing("decode", unit):
                    right = rights[slot].to(matrix.dtype).view(self._ranks[slot], -1).clone()
                    agreed = left.T @ right
                    write_gradient(unit.lead, agreed, scale)
                    matrix.sub_(agreed, alpha=share)
                    self.method.keep(unit.name, right)
        self._arrivals.clear()
