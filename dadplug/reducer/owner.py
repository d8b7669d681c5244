"""Handler of layers that have an owner: it adds up the sites' low-rank factors, compresses the sum once, and sends it.

With the factors ``L_s, R_s`` of site s and its weight w_s, the owner computes ``L R^T ~ sum over sites of w_s L_s
R_s^T``, of rank r as each site's. All sites, the owner included, use its result as it has travelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..exchange.buckets import Slot
from ..exchange.owner_buckets import ContributionBucket, OwnedSlot
from ..exchange.payload import FactorPayload
from ..hooks import Factor
from ..methods.paths import GradientPath
from ..methods.rankdad import RankDAD
from ..units.base import Unit
from ..units.factor import FactorUnit
from .context import HandlerContext
from .factors import SiteFactorHandler
from .handler import register_handler
from .kept_payloads import KeptPayloadsHandler
from .step_header import StepHeader


@register_handler(GradientPath.LOWRANK, variant="owner")
class OwnerHandler(KeptPayloadsHandler, SiteFactorHandler):
    """Two exchanges: every site's factors to the owners of their layers, and the owners' results to all sites.

    The first one leaves during backward. The owners merge and send once it has arrived; the results are waited for
    after the step headers, so that a site that is silent is named by all. What changes after the first exchange was
    launched is summed over sites as gradients, as in hierarchical groups.

    Args:
        units: the units that share the bucket.
        context: what the handlers of a reducer share.
    """

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        assert isinstance(context.method, RankDAD)
        assert context.method.merger is not None
        self._merger = context.method.merger
        self._merger.errors.refer(context.reference)
        self._owners = [context.owners[unit.name] for unit in units]
        super().__init__(units, context, sorted(set(self._owners)))
        wire = context.wire(self.dtype)
        slots = [Slot(*unit.widths, self._bias_size(unit), 1, wire) for unit in self.units]
        for slot, unit in zip(slots, self.units, strict=True):
            slot.capacity = [self._rank(unit)]
        self._contributions = ContributionBucket(slots, self._owners, context.transport, self.dtype, wire)
        owned = {self.units[index].name for index in self._contributions.owned}
        self._merger.forget(unit.name for unit in self.units if unit.name not in owned)

    def _rank(self, unit: FactorUnit) -> int:
        return min(self.context.options.rank, *unit.widths)

    def _slot(self, unit: FactorUnit) -> Slot:
        owner = self._owners[self._slots[unit.name]]
        room = [self._rank(unit) * (sender == owner) for sender in self.senders]
        return OwnedSlot(*unit.widths, self._bias_size(unit), room, self.context.wire(self.dtype))

    def sent_bytes(self, unit: Unit) -> int:
        slot, transport = self._slots[unit.name], self.context.transport
        copies = owner_copies(self._owners[slot], transport.rank, transport.world_size)
        return copies * self._contributions.slot_bytes(slot)

    def room(self, unit: Unit) -> int:
        assert isinstance(unit, FactorUnit)
        return self._rank(unit)

    def extra_rows(self, unit: Unit) -> int:
        return 0

    # A step

    def fill(self, unit: Unit) -> None:
        assert isinstance(unit, FactorUnit)
        slot = self._slots[unit.name]
        with self.timing("encode", unit):
            payload = self._own[slot] = self._encode(unit)
            if payload is None:
                self._contributions.clear(slot)
            else:
                self._contributions.fill(slot, payload)
        self.context.transport.traffic.of(unit.name).bytes += self.sent_bytes(unit)
        unit.sent_gradient = partial(self._sent_gradient, unit)

    def launch(self) -> None:
        self._weighted_by = self.context.samples()
        self._contributions.launch(self._weighted_by)

    def _withdraw(self, unit: FactorUnit) -> None:
        self.context.method.rollback(unit.name)
        self.context.faults.drop(unit)

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

    def fetch_late(self, headers: Sequence[StepHeader]) -> bool:
        return False

    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        with self.timing("wait"):
            self.bucket.wait()
        _, payloads = self.bucket.receive()
        samples, void, wanted = self._samples_of(headers), self._void(headers), self._wanted(headers)
        method = self.context.method
        for slot, unit in enumerate(self.units):
            if write and wanted[slot]:
                with self.timing("decode", unit):
                    self._decode_unit(unit, [payloads[slot][self.senders.index(self._owners[slot])]], samples)
                self._write(unit)
            (method.commit if keep else method.rollback)(unit.name)
            (self._merger.commit if keep and not any(void[slot]) else self._merger.rollback)(unit.name)
        self._present.clear()
        self._gradients.clear()
        self._deferred.clear()
        self._own = [None] * len(self.units)

    def _weights(self, samples: Sequence[int]) -> list[float]:
        return [self.context.reference / sum(samples)]

    def _samples_of(self, headers: Sequence[StepHeader]) -> list[int]:
        return [header.samples for header in headers]

    def _void(self, headers: Sequence[StepHeader]) -> list[list[bool]]:
        return [[header.void[position] for header in headers] for position in self._positions]

    def _wanted(self, headers: Sequence[StepHeader]) -> list[bool]:
        """Return, by slot, whether there is a result; what is void anywhere is sent anew by all sites."""
        void = self._void(headers)
        return [
            any(header.present[position] for header in headers) and not any(void[slot])
            for slot, position in enumerate(self._positions)
        ]


def owner_copies(owner: int, rank: int, sites: int) -> int:
    """Return how many times a site sends the numbers of a layer: to its owner, or as the owner to all others."""
    return sites - 1 if owner == rank else 1
