"""Handler of layers that have one owner: it adds up the sites' low-rank factors, and compresses the sum once.

With the factors ``L_s, R_s`` of site s and its weight w_s, the owner computes ``L R^T ~ sum over sites of w_s L_s
R_s^T``, of rank r as each site's.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..exchange.factor_buckets import ContributionBucket, FactorPayload, OwnedSlot, Slot
from ..hooks import Factor
from ..methods.base import GradientPath
from ..units.base import Unit
from ..units.factor import FactorUnit
from .context import HandlerContext
from .handler import register_handler
from .merged import MergedHandler


@register_handler(GradientPath.LOWRANK, variant="owner")
class OwnerHandler(MergedHandler):
    """Two exchanges: every site's factors to the owners of their layers, and the owners' results to all sites.

    Args:
        units: the units that share the bucket.
        context: what the handlers of a reducer share.
    """

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        ranks = [context.owners[unit.name].rank for unit in units]
        super().__init__(units, context, sorted(set(ranks)))
        wire = context.wire(self.dtype)
        slots = [Slot(*unit.widths, self._bias_size(unit), 1, wire) for unit in self.units]
        for slot, unit in zip(slots, self.units, strict=True):
            slot.capacity = [self._rank(unit)]
        self._contributions = ContributionBucket(slots, ranks, context.transport, self.dtype, wire)
        owned = {self.units[index].name for index in self._contributions.owned}
        self._merger.forget_whole(unit.name for unit in self.units if unit.name not in owned)
        self._merger.forget_divided(unit.name for unit in self.units)

    def _slot(self, unit: FactorUnit) -> Slot:
        owner = self._owners[self._slots[unit.name]].rank
        room = [self._rank(unit) * (sender == owner) for sender in self.senders]
        return OwnedSlot(*unit.widths, self._bias_size(unit), room, self.context.wire(self.dtype))

    def _contribute(self, slot: int, payload: FactorPayload | None) -> None:
        if payload is None:
            self._contributions.clear(slot)
        else:
            self._contributions.fill(slot, payload)

    def receive(self) -> None:
        """Merge what has arrived of the layers that this site owns, and send the results."""
        with self.timing("wait"):
            samples, contributions = self._contributions.wait()
        for slot, payloads in contributions.items():
            with self.timing("encode", self.units[slot]):
                self._merge(slot, payloads, [count / self.context.reference for count in samples])
        self.bucket.launch(sum(samples))

    def _merge(self, slot: int, payloads: Sequence[FactorPayload | None], weights: Sequence[float]) -> None:
        """Put the compressed sum of the sites' payloads of a unit into its slot.

        Args:
            slot: index of the unit.
            payloads: what each site has sent; None for those without a gradient.
            weights: factor of each site.
        """
        unit, whole = self.units[slot], None
        for payload, weight in zip(payloads, weights, strict=True):
            if payload is not None:
                bias = None if payload.bias is None else payload.bias * weight
                weighted = FactorPayload(payload.left * weight, payload.right, bias)
                whole = weighted if whole is None else whole.plus(weighted)
        if whole is None:
            self.bucket.clear(slot)
            return
        factor = Factor(whole.right, whole.left, bias=whole.bias)
        try:
            merged = self._merger.encode(unit.name, factor, bool(self._bias_size(unit)))
        except FloatingPointError:  # the header of the site that has NaN or Inf says so
            merged = self._not_finite(unit)
        self.bucket.fill(slot, merged.to(self.context.transport.device, self.dtype))

    def _result(self, slot: int, payloads: Sequence[FactorPayload]) -> FactorPayload:
        return payloads[self.senders.index(self._owners[slot].rank)]
