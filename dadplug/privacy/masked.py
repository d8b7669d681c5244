"""Handler of gradients that are summed under the masks of secure sums; registered when it is imported."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import MismatchError
from ..exchange import Transport
from ..exchange.transport import Gather, PendingSum
from ..exchange.wire import WireFormat
from ..step.methods import Method
from ..step.methods.base import GradientPath
from ..step.reducer import SummedHandler, register_handler
from ..step.reducer.handler import HandlerContext
from ..step.units.base import Unit
from .secure_sum import ANNOUNCEMENT_BYTES


@register_handler(GradientPath.MASKED)
class MaskedHandler(SummedHandler):
    """Sum of masked numbers modulo 2^32, which is exact in any order; see `SecureSum`.

    The first handler of a reducer sends the announcements of its site. If the sum of the step's first exchange does not
    count, all sites exchange again once the round is over.
    """

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        super().__init__(units, context)
        self._secure = context.given[GradientPath.MASKED]
        self._number = next(context.rotation)
        self._parameters = [unit.lead for unit in units]
        self._sizes = [each.numel() for each in self._parameters]
        transport, count = context.transport, sum(self._sizes)
        self._announcements: Gather | None = None
        if not self._number:
            self._announcements = transport.gather([ANNOUNCEMENT_BYTES] * transport.world_size, torch.uint8)
        self.gathers = transport.prefers_gather(4 * count)
        self._gather: Gather | None = None
        if self.gathers:
            self._gather = transport.gather([count] * transport.world_size, torch.int32)
        self._sum = torch.zeros(count, dtype=torch.int32, device=transport.device)
        self._pending = PendingSum()

    @classmethod
    def payload_bytes(
        cls, unit: Unit, method: Method, wire: WireFormat, transport: Transport, gathered: bool = False
    ) -> int:
        rate = transport.copies if gathered else transport.ring
        return int(rate * 4 * unit.lead.numel())

    def _put(self, unit: Unit, weight: float) -> bool:
        return True  # `launch` encodes all units, for the sites that are there then

    def own_squares(self) -> Sequence[Tensor]:
        return ()  # the norm of a part is not shown

    def launch(self) -> None:
        transport, secure = self.context.transport, self._secure
        closes = not self.context.samples() and not secure.abstains  # the last exchange of a plan, which is empty
        members = () if closes else secure.planned(transport.rounds.present)
        self._send(members)
        if self._announcements is not None:
            announced = bytearray(secure.announcement(members))
            self._announcements.payload.copy_(torch.frombuffer(announced, dtype=torch.uint8))
            self._announcements.launch()

    def _send(self, members: tuple[int, ...]) -> None:
        with self.timing("encode"):
            payload = self._secure.masked(members, self._number, self._parameters, self._sum.device)
        if self._gather is not None:
            self._gather.payload.copy_(payload)
            self._gather.launch()
        else:
            self._sum.copy_(payload)
            self._pending = self.context.transport.all_reduce(self._sum)

    def inspect(self) -> None:
        transport = self.context.transport
        names = {rank: transport.sites[rank] for rank in range(transport.world_size)}
        announced = {rank: each for rank, each in enumerate(self._hear()) if rank not in transport.rounds.absent}
        for rank, error in self._secure.invalid(announced, names).items():
            transport.rounds.leave_out(rank, MismatchError(str(error)))

    def receive(self) -> None:
        self._add_up()
        self._heard = self._hear()

    def _hear(self) -> list[bytes]:
        """Return what the sites have announced; nothing where another handler sends the announcements."""
        if self._announcements is None:
            return []
        return [bytes(each.cpu().numpy().tobytes()) for each in self._announcements.wait()]

    def _add_up(self) -> None:
        with self.timing("wait"):
            if self._gather is None:
                self._pending.wait()
                return
            self._sum.zero_()
            for payload in self._gather.wait():
                self._sum += payload

    @property
    def unsettled(self) -> bool:
        if self._announcements is None:
            return False
        transport = self.context.transport
        announced = {rank: self._heard[rank] for rank in transport.rounds.present}
        return not self._secure.hear(announced, {rank: transport.sites[rank] for rank in range(transport.world_size)})

    def repeat(self) -> None:
        self._send(tuple(self.context.transport.rounds.present))
        self._add_up()

    def _write(self, wanted: Sequence[bool], scale: float, keep: bool) -> None:
        parts: Sequence[Tensor] = self._sum.split(self._sizes)
        for unit, want, part in zip(self.units, wanted, parts, strict=True):
            if not want:
                continue
            with self.timing("decode", unit):
                parameter, loss_scale = unit.lead, self.context.method.loss_scales.of(unit.name)
                scale_of_sum = scale / self.context.reference * loss_scale * self._secure.unit  # sums are not weighted
                value = part.to(torch.promote_types(parameter.dtype, torch.float32)).mul_(scale_of_sum)
                value = value.view(parameter.shape).to(parameter)
                # What `.grad` held before the step is that of an earlier one, which all sites have.
                parameter.grad = value if parameter.grad is None else parameter.grad + value
