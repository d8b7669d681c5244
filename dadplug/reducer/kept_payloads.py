"""Base of handlers whose payloads are summed before all sites have them, and so cannot be sent again by themselves."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..exchange.factor_buckets import FactorPayload
from ..units.base import Unit, add_gradient
from ..units.factor import FactorUnit
from .context import HandlerContext
from .factors import GatheredHandler


class KeptPayloadsHandler(GatheredHandler):
    """Handler that keeps what it has sent of each unit; a subclass forgets it at the end of the step.

    What changes after it was sent is summed over sites as gradients.

    Args:
        units: the units that share the bucket.
        context: what the handlers of a reducer share.
        senders: ranks of the sites that send.
    """

    resends_as_gradients = True  # a sum contains what has been discarded

    def __init__(self, units: Sequence[Unit], context: HandlerContext, senders: Sequence[int]) -> None:
        super().__init__(units, context, senders)
        self._own: list[FactorPayload | None] = [None] * len(self.units)
        self._weighted_by = 0  # samples when the payloads were weighted
        self._missing_share = 0.0  # of this site's gradients, what its weight at that time has left out

    def _sent_gradient(self, unit: FactorUnit, name: str) -> list[Tensor]:
        """Return what this site has sent of a parameter's gradient, for programs that read it."""
        sent = self._own[self._slots[unit.name]]
        if sent is None:
            return []
        return [sent.left.T @ sent.right] if name == unit.name or sent.bias is None else [sent.bias]

    def add_late(self) -> None:
        """Make dense gradients of what came after the payloads were sent, or counts for more than it did then."""
        context, samples = self.context, self.context.samples()
        self._missing_share = 0.0 if samples in (0, self._weighted_by) else 1 - self._weighted_by / samples
        for slot, unit in enumerate(self.units):
            if unit.void:
                self._own[slot] = None
                self._present.discard(unit.name)
                self._withdraw(unit)
            if unit.rows:
                unit.form_gradients()
                unit.dense = True
            if self._missing_share and self._own[slot] is not None:
                self._add_own(unit, self._missing_share)
                unit.dense = True
            if unit.dense and context.checks_finite:
                context.faults.check_gradient(unit)

    def _withdraw(self, unit: FactorUnit) -> None:
        """Undo what else has been done for a discarded gradient."""

    def add_sent(self, unit: Unit) -> None:
        assert isinstance(unit, FactorUnit)
        self._add_own(unit, 1 - self._missing_share)

    def _add_own(self, unit: FactorUnit, scale: float) -> None:
        """Add to ``.grad`` what this site has sent of a unit, times a scale."""
        sent = self._own[self._slots[unit.name]]
        if sent is None:
            return
        add_gradient(unit.lead, scale * (sent.left.T @ sent.right))
        if unit.bias is not None and sent.bias is not None:
            add_gradient(unit.parameters[unit.bias], scale * sent.bias)
