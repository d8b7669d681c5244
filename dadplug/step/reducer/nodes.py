"""Handler of hierarchical groups, whose processes hand their gradients to one of their node, which sends for all.

A lossy method then compresses a node's gradient once, as that of a single site with all the node's rows. The processes
share work and link: each bucket has another owner among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...exchange.factor_buckets import FactorPayload, finite
from ...exchange.hierarchy import NodeGather, NodeMessage, NodeMessages
from ...hooks import Factor
from ..methods.base import GradientPath
from ..units.base import Unit
from ..units.factor import FactorUnit
from .factors import KeptPayloadsHandler, factored
from .faults import Fault
from .handler import HandlerContext, StepHeader, register_handler


@register_handler(GradientPath.LOWRANK, variant="nodes")
class NodeFactorHandler(KeptPayloadsHandler):
    """Gather of rows inside a node, compression of what they make, and gather of that between nodes.

    Rows are weighted before they are put together, by samples over the reference: the samples of all sites are not
    known yet.

    Args:
        units: the units that share the bucket.
        context: what the handlers of a reducer share.
    """

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        transport = context.transport
        assert isinstance(transport, NodeMessages)
        self._nodes = transport.nodes
        owner = next(context.rotation) % self._nodes.owners
        super().__init__(units, context, [ranks[owner] for ranks in self._nodes.members])
        values = partial(_number_of_values, [(*unit.shape, self._bias_size(unit)) for unit in self.units])
        self._node_gather = NodeGather(transport, owner, 2 + 2 * len(units), self.dtype, values)
        self._finite = True

    @property
    def ready(self) -> bool:
        return not self.missing and self._node_gather.over

    def fill(self, unit: Unit) -> int:
        if self.missing == len(self.units):
            self._node_gather.post()
            self._weighted_by, self._finite = self.context.samples(), True
        self._own[self._slots[unit.name]] = self._take(factored(unit))
        return self.sent_bytes(unit)

    def _take(self, unit: FactorUnit) -> FactorPayload | None:
        """Return what has arrived as rows, no more of them than the gradient's smaller side has."""
        factor = unit.take()
        if factor is None:
            return None
        self._present.add(unit.name)
        bias = factor.bias_gradient() if self._bias_size(unit) else None
        if not (finite(factor.deltas) and finite(factor.activations)):
            self._finite = False
            self.context.faults.record(Fault.DELTAS if finite(factor.inputs) else Fault.ACTIVATIONS, unit)
        if factor.rows > min(unit.shape):
            factor = Factor.formed(factor.gradient())
        return FactorPayload(factor.deltas, factor.activations, bias)

    def on_filled(self) -> None:
        """Hand this process's rows to the owner."""
        if self._node_gather.is_owner:
            return
        weight = self._weighted_by / self.context.reference
        integers, parts = [self._weighted_by, int(self._finite)], []
        for payload in self._own:
            if payload is None:
                integers += [-1, 0]
                continue
            integers += [payload.rows, int(payload.bias is not None)]
            parts += [(payload.left * weight).reshape(-1), payload.right.reshape(-1)]
            if payload.bias is not None:
                parts.append(payload.bias * weight)
        empty = self.units[0].lead.new_empty(0)
        values = torch.cat([empty, *parts]).to("cpu", self.dtype)
        self._node_gather.send(integers, values)

    def launch(self) -> None:
        samples = 0
        if self._node_gather.is_owner:
            collected = self._node_gather.wait()
            samples = self._weighted_by + sum(integers[0] for integers, _ in collected)
            self.context.method.weight = self.context.scale if samples else 0.0
            self._merge(collected)
        self.bucket.launch(samples)

    def _merge(self, collected: Sequence[NodeMessage]) -> None:
        """Put the compressed rows of all processes of the node into the bucket.

        Args:
            collected: messages of the other processes.
        """
        all_finite = self._finite and all(integers[1] for integers, _ in collected)
        starts = [0] * len(collected)
        for slot, unit in enumerate(self.units):
            with self.timing("encode", unit):
                payloads = self._weighted_own(slot)
                for place, (integers, values) in enumerate(collected):
                    rows, with_bias = integers[2 + 2 * slot : 4 + 2 * slot]
                    if rows >= 0:
                        payload, starts[place] = self._cut(unit, values, starts[place], rows, bool(with_bias))
                        payloads.append(payload)
                if not payloads:
                    self.bucket.clear(slot)
                    continue
                whole = payloads[0]
                for payload in payloads[1:]:
                    whole = whole.plus(payload)
                self.bucket.fill(slot, self._compress(unit, whole, all_finite))

    def _weighted_own(self, slot: int) -> list[FactorPayload]:
        """Return this process's rows of a unit, weighted; an empty list where there are none."""
        own, weight = self._own[slot], self._weighted_by / self.context.reference
        if own is None:
            return []
        return [FactorPayload(own.left * weight, own.right, None if own.bias is None else own.bias * weight)]

    def _cut(
        self, unit: FactorUnit, values: Tensor, start: int, rows: int, with_bias: bool
    ) -> tuple[FactorPayload, int]:
        """Return the rows of a unit in a message, and where those of the next unit start."""
        (out, width), bias = unit.shape, self._bias_size(unit) if with_bias else 0
        end = start + rows * (out + width) + bias
        left, right, rest = values[start:end].split([rows * out, rows * width, bias])
        payload = FactorPayload(left.view(rows, out), right.view(rows, width), rest if with_bias else None)
        return payload.to(unit.lead.device, self.dtype), end

    def _compress(self, unit: FactorUnit, whole: FactorPayload, all_finite: bool) -> FactorPayload:
        factor = Factor(whole.right, whole.left, bias=whole.bias)
        self.context.method.check_rank(unit.name, factor.rows)
        try:
            return self.context.method.encode(unit.name, factor, bool(self._bias_size(unit)))
        except FloatingPointError:
            if all_finite:
                self.context.faults.record(Fault.DELTAS, unit)
            return self._not_finite(unit)

    def receive(self) -> None:
        super().receive()
        if not self._node_gather.is_owner:
            self._node_gather.wait()

    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        for unit, position in zip(self.units, self.positions, strict=True):
            if any(header.void[position] for header in headers):
                self.context.method.rollback(unit.name)
        super().finish(headers, write, keep)
        self._own = [None] * len(self.units)

    def _weights(self, samples: Sequence[int]) -> list[float]:
        return [self._own_weight(samples)] * len(samples)

    def _own_weight(self, samples: Sequence[int]) -> float:
        return self.context.reference / sum(samples)

    def _samples_of(self, headers: Sequence[StepHeader]) -> list[int]:
        return [sum(headers[rank].samples for rank in ranks) for ranks in self._nodes.members]

    def _void(self, headers: Sequence[StepHeader]) -> list[list[bool]]:
        """Return that nothing is left out by itself: a gradient that is void anywhere is sent anew by all."""
        return [[False] * len(self.senders) for _ in self.units]


def _number_of_values(units: Sequence[tuple[int, int, int]], integers: Sequence[int]) -> int | None:
    """Return the number of values of a process's message to the owner, or None for integers that no message has.

    Args:
        units: height and width of each unit's gradient, and number of elements of its bias gradient.
        integers: samples, whether all is finite, and for each unit the rows, -1 for none, and whether it has a bias.
    """
    total = 0
    for (out, width, bias), rows, with_bias in zip(units, integers[2::2], integers[3::2], strict=True):
        if not -1 <= rows <= min(out, width) or with_bias not in (0, 1):
            return None
        total += max(0, rows) * (out + width) + bias * with_bias
    return total
