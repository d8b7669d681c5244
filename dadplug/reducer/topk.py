"""The handler of top-k: the largest elements of each site's gradient, gathered with their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..exchange.payload import finite
from ..exchange.transport import Gather
from ..exchange.wire import wire_format
from ..lowrank import top_k
from ..methods import Method
from ..methods.topk import TopK
from ..units.base import Unit
from .dense import DenseHandler
from .handler import gradient_to_form, register_handler
from .step_header import StepHeader

_ALIGNMENT = 16  # bytes
_INDEX = torch.int32


class _Sent(NamedTuple):
    """What was sent of a matrix: the matrix, indices, numbers as they travel, and the loss scale that they contain."""

    whole: Tensor
    indices: Tensor
    numbers: Tensor
    loss_scale: float


@register_handler("topk")
class TopKHandler(DenseHandler):
    """A payload holds, unit by unit, indices as int32 and then numbers; all sites add them up by rank."""

    bucket_mb = 0.25
    gathers = True

    @classmethod
    def numbers(cls, unit: Unit, rows: int, method: Method) -> int:
        assert isinstance(method, TopK)
        return 2 * method.elements(unit.lead.numel())

    def _open(self) -> None:
        method, transport = self.reducer.method, self.reducer.transport
        assert isinstance(method, TopK)
        self.method = method
        method.errors.refer(self.reducer.reference)
        # Values of one sign and size gain little from a scale.
        self._values = wire_format("bf16", self.dtype) if self._wire.quantised else self._wire
        self._counts = [method.elements(unit.lead.numel()) for unit in self.units]
        self._starts = [0]
        for count in self._counts:
            for size in (count * _INDEX.itemsize, count * self._values.itemsize):
                self._starts.append(self._starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self._gather: Gather = transport.gather([self._starts[-1]] * transport.world_size, torch.uint8)
        self._sent: dict[str, _Sent] = {}

    def _places(self, payload: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Cuts a unit's indices and numbers out of a payload."""
        count, (first, second) = self._counts[slot], self._starts[2 * slot : 2 * slot + 2]
        indices = payload[first : first + count * _INDEX.itemsize].view(_INDEX)
        return indices, payload[second : second + count * self._values.itemsize].view(self._values.dtype)

    def rounding(self) -> dict[str, Tensor]:
        return {}

    def put(self, unit: Unit, weight: float) -> bool:
        slot, gradient = self._slots[unit.name], self._gradient(unit) if weight else None
        errors, loss_scale = self.method.errors, self.method.loss_scales.of(unit.name)
        error, whole = errors.find(unit.name, unit.lead), errors.stage(unit.name, unit.lead).view(-1)
        if gradient is None:
            whole.zero_() if error is None else whole.copy_(error.view(-1))
        elif error is None:
            torch.mul(gradient.view(-1), weight / loss_scale, out=whole)
        else:
            torch.add(error.view(-1), gradient.view(-1), alpha=weight / loss_scale, out=whole)
        indices, values = top_k(whole, self._counts[slot])
        place, numbers = self._places(self._gather.payload, slot)
        place.copy_(indices)
        numbers.copy_(values.mul_(loss_scale))
        self._sent[unit.name] = _Sent(whole, indices, numbers, loss_scale)
        return finite(numbers)

    def launch(self) -> None:
        self._gather.launch()

    def receive(self) -> None:
        with self.timing("wait"):
            self._payloads = self._gather.wait()

    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        scale = self.reducer.reference / max(1, sum(header.samples for header in headers))
        for slot, (unit, index) in enumerate(zip(self.units, self._indices(), strict=True)):
            want = write and any(header.present[index] for header in headers)
            if want:
                with self.timing("decode", unit):
                    agreed = gradient_to_form(unit.lead, (-1,)).zero_()
                    for payload in self._payloads:
                        indices, numbers = self._places(payload, slot)
                        agreed.index_add_(0, indices.to(agreed.device), numbers.to(agreed))
                    agreed.mul_(scale)
            if keep and want:
                whole, indices, numbers, loss_scale = self._sent[unit.name]
                whole.index_add_(0, indices, numbers.to(whole), alpha=-1 / loss_scale)
                self.method.commit(unit.name)
            else:
                self.method.rollback(unit.name)
        self._sent.clear()
        self._put.clear()
