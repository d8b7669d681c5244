"""Handlers of hierarchical groups: a machine's processes hand their gradients to one of them, which sends for all.

So a lossy method compresses a machine's gradient once, as that of a single site with all the machine's rows; the work
and the link are shared by taking turns, bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..exchange.hierarchy import HierarchicalTransport
from ..exchange.node_gather import Collected, Collection
from ..exchange.payload import FactorPayload, finite
from ..hooks import Factor
from ..units.base import Unit, add_gradient
from ..units.factor import FactorUnit
from .factors import FactorHandler
from .handler import register_handler
from .step_header import StepHeader

if TYPE_CHECKING:
    from .reducer import Reducer


@register_handler("lowrank", merged=True)
class NodeFactorHandler(FactorHandler):
    """Collects rows inside a machine, compresses what they make, and gathers that between machines.

    Rows are weighed before they are put together, by samples over the reducer's reference: the samples of all sites
    are not known yet.
    """

    resends_as_gradients = True  # what has been discarded is part of a machine's gradient by then

    def __init__(self, units: Sequence[Unit], reducer: Reducer) -> None:
        assert isinstance(reducer.transport, HierarchicalTransport)
        self._machines = reducer.transport.machines
        self._owner = next(reducer.turns) % self._machines.owners
        super().__init__(units, reducer)
        self._collection = Collection(reducer.transport, self._owner, 2 + 2 * len(units), self.dtype)
        self._own: list[FactorPayload | None] = [None] * len(units)
        self._weighed_by = 0
        self._finite = True
        self._missing = 0.0  # share of this site's gradients that its weight at the time has left out

    def _find_senders(self) -> list[int]:
        return [ranks[self._owner] for ranks in self._machines.members]

    @property
    def ready(self) -> bool:
        return not self.missing and self._collection.over

    def fill(self, unit: Unit) -> None:
        assert isinstance(unit, FactorUnit)
        if self.missing == len(self.units):
            self._collection.post()
            self._weighed_by, self._finite = self.reducer.samples(), True
        with self.timing("encode", unit):
            self._own[self._slots[unit.name]] = self._take(unit)
        self._meter(unit)
        unit.sent_gradient = partial(self._sent_gradient, unit)

    def _sent_gradient(self, unit: FactorUnit, name: str) -> list[Tensor]:
        sent = self._own[self._slots[unit.name]]
        if sent is None:
            return []
        return [sent.left.T @ sent.right] if name == unit.name or sent.bias is None else [sent.bias]

    def _take(self, unit: FactorUnit) -> FactorPayload | None:
        """Takes what has arrived as rows, no more of them than the gradient's smaller side has."""
        factor = unit.take()
        if factor is None:
            return None
        self._present.add(unit.name)
        bias = factor.bias_gradient() if self._bias(unit) else None
        if not (finite(factor.deltas) and finite(factor.activations)):
            self._finite = False
            self.reducer.faults.append((2 if finite(factor.inputs) else 1, unit.name))
        if factor.rows > min(unit.shape):
            factor = Factor.formed(factor.gradient())
        return FactorPayload(factor.deltas, factor.activations, bias)

    def filled(self) -> None:
        """Hands everything to the owner."""
        if self._collection.is_owner:
            return
        weight = self._weighed_by / self.reducer.reference
        integers, parts = [self._weighed_by, int(self._finite)], []
        for share in self._own:
            if share is None:
                integers += [-1, 0]
                continue
            integers += [share.rows, int(share.bias is not None)]
            parts += [(share.left * weight).reshape(-1), share.right.reshape(-1)]
            if share.bias is not None:
                parts.append(share.bias * weight)
        empty = self.units[0].lead.new_empty(0)
        numbers = torch.cat([empty, *parts]).to("cpu", self.dtype)
        self._collection.send(integers, numbers)

    def launch(self) -> None:
        samples = 0
        if self._collection.is_owner:
            collected = self._collection.wait()
            samples = self._weighed_by + sum(integers[0] for integers, _ in collected)
            self._merge(collected)
        self.bucket.launch(samples)

    def _merge(self, collected: Sequence[Collected]) -> None:
        weight = self._weighed_by / self.reducer.reference
        all_finite = self._finite and all(integers[1] for integers, _ in collected)
        starts = [0] * len(collected)
        for slot, (unit, own) in enumerate(zip(self.units, self._own, strict=True)):
            assert isinstance(unit, FactorUnit)
            with self.timing("encode", unit):
                shares = []
                if own is not None:
                    shares.append(
                        FactorPayload(own.left * weight, own.right, None if own.bias is None else own.bias * weight)
                    )
                for place, (integers, numbers) in enumerate(collected):
                    rows, with_bias = integers[2 + 2 * slot : 4 + 2 * slot]
                    if rows >= 0:
                        share, starts[place] = self._cut(unit, numbers, starts[place], rows, bool(with_bias))
                        shares.append(share)
                if not shares:
                    self.bucket.clear(slot)
                    continue
                whole = shares[0]
                for share in shares[1:]:
                    whole = whole.plus(share)
                self.bucket.fill(slot, self._compress(unit, whole, all_finite))

    def _cut(
        self, unit: FactorUnit, numbers: torch.Tensor, start: int, rows: int, with_bias: bool
    ) -> tuple[FactorPayload, int]:
        (out, width), bias = unit.shape, self._bias(unit) if with_bias else 0
        left, right, rest = numbers[start : start + rows * (out + width) + bias].split([rows * out, rows * width, bias])
        share = FactorPayload(left.view(rows, out), right.view(rows, width), rest if with_bias else None)
        return share.to(unit.lead.device, self.dtype), start + rows * (out + width) + bias

    def _compress(self, unit: FactorUnit, whole: FactorPayload, all_finite: bool) -> FactorPayload:
        factor = Factor(whole.right, whole.left, bias=whole.bias)
        try:
            return self.reducer.method.encode(unit.name, factor, bool(self._bias(unit)))
        except FloatingPointError:
            if all_finite:
                self.reducer.faults.append((2, unit.name))
            return self._nan(unit)

    def settle_late(self) -> None:
        """Turns what came after the bucket had left, or counts for more than it did then, into dense gradients."""
        samples = self.reducer.samples()
        self._missing = 0.0 if samples in (0, self._weighed_by) else 1 - self._weighed_by / samples
        for slot, unit in enumerate(self.units):
            assert isinstance(unit, FactorUnit)
            if unit.void:
                self._own[slot] = None
                self._present.discard(unit.name)
            if unit.rows:
                unit.form_gradients()
                unit.dense = True
            if self._missing and self._own[slot] is not None:
                self._add_sent(unit, self._missing)
                unit.dense = True
            gradient = unit.lead.grad if unit.dense and self.reducer.checks else None
            if gradient is not None and not finite(gradient):
                self.reducer.faults.append((3, unit.name))

    def _add_sent(self, unit: Unit, factor: float) -> None:
        sent = self._own[self._slots[unit.name]]
        assert isinstance(unit, FactorUnit)
        if sent is None:
            return
        add_gradient(unit.lead, factor * (sent.left.T @ sent.right))
        if unit.bias is not None and sent.bias is not None:
            add_gradient(unit.parameters[unit.bias], factor * sent.bias)

    def form_sent(self, unit: Unit) -> None:
        self._add_sent(unit, 1 - self._missing)

    def _void(self, headers: Sequence[StepHeader]) -> list[list[bool]]:
        return [[False] * len(self.senders) for _ in self.units]

    def _wanted(self, headers: Sequence[StepHeader]) -> list[bool]:
        wanted = zip(self._indices(), super()._wanted(headers), strict=True)
        return [want and not any(header.void[index] for header in headers) for index, want in wanted]

    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        for unit, index in zip(self.units, self._indices(), strict=True):
            if any(header.void[index] for header in headers):
                self.reducer.method.rollback(unit.name)
        super().finish(headers, write, keep)
        self._own = [None] * len(self.units)

    def receive(self) -> None:
        super().receive()
        if not self._collection.is_owner:
            self._collection.wait()

    def _weights(self, samples: Sequence[int]) -> list[float]:
        return [self.reducer.reference / sum(samples)] * len(samples)

    def _counts(self, headers: Sequence[StepHeader]) -> list[int]:
        return [sum(headers[rank].samples for rank in ranks) for ranks in self._machines.members]
