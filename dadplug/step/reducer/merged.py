"""Handlers of layers whose factors some sites merge, which send the result to all: an owner, or every site a part.

**Owners.** With the factors ``L_s, R_s`` of site s and its weight w_s, the owner computes ``L R^T ~ sum over sites of
w_s L_s R_s^T``, of rank r as each site's.

**Divided layers**, so that no site has more to send than others. The sum of all sites' factors is ``L R^T`` with ``L =
[w_1 L_1, w_2 L_2, ...]`` and ``R = [R_1, R_2, ...]``. A site gets some rows of L and of R from all sites. The Gram
matrices ``L^T L`` and ``R^T R`` are sums over such parts, and give the coefficients X and Y of the best approximation
of rank r, ``(L X) (R Y)^T``, whose parts the sites compute and send.

X and Y have q further columns, for the next q singular vectors of the sum. Their parts stay where they are, and belong
to L and R in the next step, as if from one more site: what the merge has dropped is sent later.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...exchange.factor_buckets import FactorBucket, FactorPayload, Slot, finite
from ...exchange.fields import invalid
from ...exchange.owned_buckets import ContributionBucket, OwnedSlot
from ...hooks import Factor
from ...lowrank.dispatch import divide_columns, merge_coefficients, part_size
from ...support.logs import get_logger
from ..methods.base import GradientPath
from ..methods.merge_memory import PartPlace
from ..methods.rankdad import RankDAD
from ..units.base import Unit
from ..units.factor import FactorUnit
from .clipping import OUTSIZED, limit_of, square_of
from .factors import GatheredHandler, KeptPayloadsHandler, SiteFactorHandler
from .handler import HandlerContext, StepHeader, register_handler
from .owners import coefficients, gram_numbers, stacked_rows

_log = get_logger(__name__)
_SPOILT = 2
"""Statement of an owner on what it has got: 0 for incomplete, 1 for complete, or this plus the rank of a site that has
sent NaN, Inf or numbers out of all proportion."""


class MergedHandler(KeptPayloadsHandler, SiteFactorHandler):
    """Exchange of every site's factors with those that merge them, and of their results with all sites.

    The first exchange leaves during backward. The results are waited for after the step headers, so that a site that
    is silent is named by all. All sites use them as they have travelled. What changes after the first exchange was
    launched is summed over sites as gradients, as in hierarchical groups.

    Args:
        units: the units that share the bucket.
        context: what the handlers of a reducer share.
        senders: ranks of the sites that merge.
    """

    _contributions: ContributionBucket

    def __init__(self, units: Sequence[Unit], context: HandlerContext, senders: Sequence[int]) -> None:
        assert isinstance(context.method, RankDAD)
        assert context.method.merger is not None
        self._merger = context.method.merger
        self._merger.max_rank = context.method.largest_rank
        self._owners = [context.owners[unit.name] for unit in units]
        self._results: list[FactorPayload] = []  # of this step, by slot
        self._bounds: list[float] = []  # of their norms
        self._stated: Sequence[int] = ()  # by those that merge, with the results
        super().__init__(units, context, senders)

    def _rank(self, unit: FactorUnit) -> int:
        return self.context.method.rank_of(self.context.method.largest_rank, *unit.widths)

    def sent_bytes(self, unit: Unit) -> int:
        assert isinstance(unit, FactorUnit)
        owner, transport = self._owners[self._slots[unit.name]], self.context.transport
        place = transport.rank, 1 + transport.copies
        numbers = owner.numbers_of_rows(self._rank(unit), unit.widths, *place)
        numbers += owner.numbers_of_bias(self._bias_size(unit), *place)
        return numbers * self.context.wire(unit).itemsize

    def room(self, unit: Unit) -> int:
        assert isinstance(unit, FactorUnit)
        return self._rank(unit)

    # What a subclass decides

    @abstractmethod
    def _contribute(self, slot: int, payload: FactorPayload | None) -> None:
        """Put a unit's payload, or its absence, into what this site sends to those that merge."""

    @abstractmethod
    def _result(self, slot: int, payloads: Sequence[FactorPayload]) -> FactorPayload:
        """Return a unit's merged factors.

        Args:
            slot: index of the unit.
            payloads: what has arrived, by place of the sender.
        """

    # A step

    def fill(self, unit: Unit) -> int:
        assert isinstance(unit, FactorUnit)
        slot = self._slots[unit.name]
        payload = self._own[slot] = self._encode(unit)
        self._contribute(slot, payload)
        return self.sent_bytes(unit)

    def launch(self) -> None:
        self._weighted_by = self.context.samples()
        self._contributions.launch(self._weighted_by)

    def _withdraw(self, unit: FactorUnit) -> None:
        self.context.method.rollback(unit.name)
        self.context.faults.drop(unit)

    def fetch_late(self, headers: Sequence[StepHeader]) -> bool:
        return False

    def squares(self) -> Sequence[float]:
        return ()

    def spoilt(self, headers: Sequence[StepHeader]) -> list[str]:
        wanted = zip(self.units, self._receive_results(), self._bounds, self._wanted(headers), strict=True)
        return [unit.name for unit, merged, bound, want in wanted if want and not (bound < math.inf or merged.finite())]

    def _receive_results(self) -> list[FactorPayload]:
        """Wait for the merged factors of this step, and return them by slot."""
        if not self._results:
            self.timed("wait", None, self.bucket.wait)
            self._stated, payloads = self.bucket.receive()
            self._results = [self._result(slot, by_sender) for slot, by_sender in enumerate(payloads)]
            self._bounds = [merged.bound() for merged in self._results]
        return self._results

    def not_finite(self) -> list[tuple[int | None, str]]:
        self._receive_results()
        self.extent = sum(self._bounds)
        return []

    def overflown(self) -> list[str]:
        found = []
        for unit, payloads in zip(self.units, self._merged(), strict=True):
            if unit.form is not None and all(map(FactorPayload.finite, payloads)):
                equal = [1 / len(payloads)] * len(payloads)
                formed = self._formed(payloads, equal, unit.bias is not None, form=unit.form)
                found += [] if all(finite(each) for each in formed if each is not None) else [unit.name]
        return found

    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        samples, void, wanted = self._samples_of(headers), self._void(headers), self._wanted(headers)
        method, weights = self.context.method, self._weights(samples) if write else []
        for slot, (unit, payloads) in enumerate(zip(self.units, self._merged(), strict=True)):
            counts = keep
            if write and wanted[slot]:
                self.timed("decode", unit, self._decode_unit, unit, payloads, weights)
                self._write([unit])
                counts &= all(each.finite() for each in payloads)  # sums of finite payloads may overflow
            if counts:
                method.commit(unit.name, self._own_weight(samples))
            else:
                method.rollback(unit.name)
            if counts and not any(void[slot]):
                self._merger.commit(unit.name, self.context.reference / sum(samples))
            else:
                self._merger.rollback(unit.name)
        self._results = []
        self._present.clear()
        self._squares.clear()
        self._gradients.clear()
        self._deferred.clear()
        self._own = [None] * len(self.units)

    def _merged(self) -> list[list[FactorPayload]]:
        """Return, by slot, the payloads that make the gradient."""
        return [[merged] for merged in self._receive_results()]

    def _weights(self, samples: Sequence[int]) -> list[float]:
        return [self.context.reference / sum(samples)]


@register_handler(GradientPath.LOWRANK, variant="owner")
class OwnerHandler(MergedHandler):
    """Two exchanges: every site's factors to the owners of their layers, and the owners' results to all sites.

    Where sites may be absent, the sites that are present at the end of a step own the layers of the absent ones in the
    next step. The results belong to a second round. If an owner leaves before it is closed, or a site whose factors
    have been merged, all sites send their factors to all others in a further round, and add them up.

    Args:
        units: the units that share the bucket.
        context: what the handlers of a reducer share.
    """

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        transport = context.transport
        ranks = self._ranks = [context.owners[unit.name].rank for unit in units]
        self._is_relayed = context.owners[units[0].name].relayed
        everyone = transport.rounds.elastic
        super().__init__(units, context, range(transport.world_size) if everyone else sorted(set(ranks)))
        wire = context.wire(units[0])
        slots = [Slot(*unit.widths, self._bias_size(unit), 1, wire) for unit in self.units]
        for slot, unit in zip(slots, self.units, strict=True):
            slot.capacity = [self._rank(unit)]
        self._contributions = ContributionBucket(slots, ranks, transport, self.dtype, wire)
        self._again: FactorBucket | None = None  # factors of all sites, in place of merged ones
        self._sent_again: list[int] = []  # samples of each site, as it has sent them with these
        self._blamed: set[int] = set()  # sites that have been named since they have sent something invalid
        self._spoiler: int | None = None  # a site that has sent this one values out of all proportion in this step
        self._arrived: Mapping[int, Sequence[FactorPayload | None]] = {}  # in this step, by slot that this site owns
        self._forget_others()
        self._merger.forget_divided(unit.name for unit in self.units)

    def _forget_others(self) -> None:
        """Forget what this site has kept of layers that it does not own."""
        owned = {self.units[index].name for index in self._contributions.owned}
        self._merger.forget_whole(unit.name for unit in self.units if unit.name not in owned)

    def _slot(self, unit: FactorUnit) -> Slot:
        owner = self._ranks[self._slots[unit.name]]
        room = [self._rank(unit) * (sender == owner) for sender in self.senders]
        return OwnedSlot(*unit.widths, self._bias_size(unit), room, self.context.wire(unit))

    def _contribute(self, slot: int, payload: FactorPayload | None) -> None:
        if payload is None:
            self._contributions.clear(slot)
        else:
            self._contributions.fill(slot, payload)

    def receive(self) -> None:
        """Merge what has arrived of the layers that this site owns, and send the results."""
        counts, contributions = self.timed("wait", None, self._contributions.wait)
        self._spoiler, self._arrived = None, contributions
        stated = [header.samples for header in self.context.headers] or counts
        samples = [*map(min, counts, stated)]
        self._merger.weight = self.context.reference / max(1, sum(samples))
        weights = self._clipped_weights(samples, contributions)
        for slot, payloads in contributions.items():
            self.timed("encode", self.units[slot], self._merge, slot, payloads, weights)
        faults, sites = self._contributions.faults, self.context.transport.sites
        for rank, (count, most) in enumerate(zip(counts, stated, strict=False)):
            if count > most:
                faults[rank] = f"{sites[rank]} has sent {count} samples to this owner, and {most} to all sites"
        for rank in faults.keys() - self._blamed:
            _log.warning("%s: in such steps all sites send the factors of its layers to all others again", faults[rank])
        self._blamed |= faults.keys()
        self.bucket.launch(int(not faults) if self._spoiler is None else _SPOILT + self._spoiler)

    def _clipped_weights(
        self, samples: Sequence[int], contributions: Mapping[int, Sequence[FactorPayload | None]]
    ) -> list[float]:
        """Return the factors of the sites: what has arrived here of one alone is not above the limit, either.

        Args:
            samples: samples of each site.
            contributions: by slot that this site owns, what each site has sent.
        """
        found = [0.0] * len(samples)
        for slot, payloads in contributions.items() if self.context.norms else ():
            for sender, payload in enumerate(payloads):
                if payload is not None:
                    found[sender] += float(self._square(self.units[slot], payload))
        reference, factor = self.context.reference, self.context.factor
        return [count / reference * factor(rank, math.sqrt(found[rank])) for rank, count in enumerate(samples)]

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
        except FloatingPointError:
            merged = self._not_finite(unit)
        if not merged.bound() <= OUTSIZED * self.context.extent:
            self._spoiler = self._find_spoiler(unit, payloads, self._spoiler)
        self.bucket.fill(slot, merged.to(self.context.transport.device, self.dtype))

    def _find_spoiler(
        self, unit: FactorUnit, payloads: Sequence[FactorPayload | None], known: int | None
    ) -> int | None:
        """Return the site that has sent NaN or Inf, or numbers out of all proportion to those of others."""
        spoilt = next((rank for rank, each in enumerate(payloads) if each is not None and not each.finite()), None)
        norms = [0.0 if each is None else self._norm(unit, each) for each in payloads]
        if spoilt is None and max(norms) > limit_of(norms, OUTSIZED):
            spoilt = norms.index(max(norms))
        return known if spoilt is None else spoilt

    def _norm(self, unit: FactorUnit, payload: FactorPayload) -> float:
        assert unit.form is not None
        return math.sqrt(square_of(payload, unit.form, unit.bias is not None, exact=True))

    def measured(self) -> Sequence[float]:
        if self._again is not None:
            return self.squares()
        totals = [0.0] * self.context.transport.world_size
        for slot, (unit, owner, bound) in enumerate(zip(self.units, self._ranks, self._bounds, strict=True)):
            found = dict(enumerate(self._arrived.get(slot, ())))
            spoiler = self._stated[self.senders.index(owner)] - _SPOILT
            spoiler, own = spoiler if 0 <= spoiler < len(totals) else owner, self._own[slot]
            if not found and own is not None:  # others have sent as much as this site, but for whom the owner states
                found = dict.fromkeys(range(len(totals)), own) | {spoiler: None}
                totals[spoiler] += bound**2
            for rank, payload in found.items():
                totals[rank] += 0.0 if payload is None else self._norm(unit, payload) ** 2
        return totals

    def _result(self, slot: int, payloads: Sequence[FactorPayload]) -> FactorPayload:
        return payloads[self.senders.index(self._ranks[slot])]

    # Where sites may be absent

    def inspect(self) -> None:
        """Do nothing: what others have sent to this site alone is checked when it is merged."""

    @property
    def launches_results(self) -> bool:
        return self.context.transport.rounds.elastic

    @property
    def unsettled(self) -> bool:
        return any(rank in self.context.transport.rounds.absent for rank in self._ranks)

    def launch_again(self) -> bool:
        sites = self.context.transport.world_size
        slots = [Slot(*unit.widths, self._bias_size(unit), sites, self.context.wire(unit)) for unit in self.units]
        for slot, unit in zip(slots, self.units, strict=True):
            slot.capacity = [self._rank(unit)] * sites
        wire = self.context.wire(self.units[0])
        self._again = FactorBucket(slots, self.context.transport, self.dtype, wire, once=True)
        for index, payload in enumerate(self._own):
            if payload is None:
                self._again.clear(index)
            else:
                self._again.fill(index, payload)
        self._again.launch(self._weighted_by)
        return True

    def confirm(self) -> bool:
        if not self.launches_results:
            return True
        if self._again is not None:
            self.timed("wait", None, self.bucket.wait)
            self._again.inspect()
            self._sent_again = self._receive_of(self._again)
            return True
        self.bucket.inspect()
        self._receive_results()
        return all(self._stated[rank] == 1 for rank in self._ranks)

    def not_finite(self) -> list[tuple[int | None, str]]:
        if self._again is not None:
            return GatheredHandler.not_finite(self)
        found = super().not_finite()
        for unit, owner, merged, bound in zip(self.units, self._ranks, self._results, self._bounds, strict=True):
            spoiler = self._stated[self.senders.index(owner)] - _SPOILT
            if 0 <= spoiler < self.context.transport.world_size and not (bound < math.inf or merged.finite()):
                found.append((spoiler, unit.name))
        return found

    def spoilt(self, headers: Sequence[StepHeader]) -> list[str]:
        return super().spoilt(headers) if self._again is None else []

    def _merged(self) -> list[list[FactorPayload]]:
        return super()._merged() if self._again is None else self._payloads

    def _weights(self, samples: Sequence[int]) -> list[float]:
        if self._again is None:
            return super()._weights(samples)
        counts = map(min, self._sent_again, samples)
        return [count / sum(samples) * self.context.factor(rank) for rank, count in enumerate(counts)]

    def squares(self) -> Sequence[float]:
        return () if self._again is None else self._squares_of(self._payloads)

    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        if self._again is not None:  # nothing that has been merged counts
            for unit in self.units:
                self._merger.rollback(unit.name)
        super().finish(headers, write, keep)
        self._again, self._payloads = None, []

    def deal(self) -> None:
        owners = [self.context.owners[unit.name] for unit in self.units]
        if owners == self._owners:
            return
        self._owners, self._ranks = owners, [owner.rank for owner in owners]
        for slot, rank in zip(self.bucket.slots, self._ranks, strict=True):
            assert isinstance(slot, OwnedSlot)
            slot.deal(rank)
        self.bucket.lay_out()
        self._contributions.deal(self._ranks)
        self._forget_others()

    def restore(self, layout: Sequence[Sequence[int]]) -> None:
        super().restore(layout)
        ranks = [slot.owner for slot in self.bucket.slots if isinstance(slot, OwnedSlot)]
        found = zip(self.units, self._owners, ranks, strict=True)
        self.context.owners = {**self.context.owners} | {
            unit.name: replace(own, rank=rank) for unit, own, rank in found
        }
        self.deal()


@register_handler(GradientPath.LOWRANK, variant="divided")
class DividedHandler(MergedHandler):
    """Four exchanges: parts of the factors, Gram matrices to a layer's owner, its coefficients, and merged parts.

    One site computes the coefficients, since those of two processors could differ in the signs of singular vectors.

    Args:
        units: the units that share the bucket.
        context: what the handlers of a reducer share.
    """

    rounds = 2

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        transport = context.transport
        self._sites = transport.world_size
        super().__init__(units, context, range(self._sites))
        self._merger.forget_whole(unit.name for unit in self.units)
        wire = context.wire(units[0])
        slots = []
        for unit in self.units:
            for _ in range(self._sites):
                slots.append(Slot(*self._part_sizes(unit), 1, wire))
                slots[-1].capacity = [self._rank(unit)]
        owners = list(range(self._sites)) * len(self.units)
        self._contributions = ContributionBucket(slots, owners, transport, self.dtype, wire)
        self._precision = torch.promote_types(self.dtype, torch.float32)
        self._owned = [slot for slot, owner in enumerate(self._owners) if owner.rank == transport.rank]
        self._grams = transport.all_to_all(self._sizes(gram_numbers), self._precision)
        self._merging = transport.gather(self._sizes(coefficients), self._precision)
        self._parts: list[tuple[Tensor, Tensor, Tensor | None]] = []  # by slot: left, right and bias of the own part
        self._contributed: list[bool] = []  # by slot: whether some site has sent a gradient

    def _part_sizes(self, unit: FactorUnit) -> tuple[int, int, int]:
        """Return the columns of a unit's parts: of left, of right, and of the bias gradient."""
        out, width = unit.widths
        return part_size(out, self._sites), part_size(width, self._sites), part_size(self._bias_size(unit), self._sites)

    def _slot(self, unit: FactorUnit) -> Slot:
        room = [self._rank(unit)] * len(self.senders)
        return OwnedSlot(*self._part_sizes(unit), room, self.context.wire(unit))

    def _place(self, unit: FactorUnit) -> PartPlace:
        return PartPlace(self.context.transport.rank, self._sites, *unit.widths)

    def _sizes(self, numbers: Callable[[int, int, int], int]) -> list[int]:
        """Return by rank the numbers of all units that a site owns, of which each has some by its rank."""
        sizes = [0] * self._sites
        for unit, owner in zip(self.units, self._owners, strict=True):
            sizes[owner.rank] += numbers(self._rank(unit), self._sites, owner.kept)
        return sizes

    def _contribute(self, slot: int, payload: FactorPayload | None) -> None:
        first = slot * self._sites
        if payload is None:
            for site in range(self._sites):
                self._contributions.clear(first + site)
            return
        parts = (divide_columns(part, self._sites) for part in (payload.left, payload.right))
        bias = None if payload.bias is None else divide_columns(payload.bias[None], self._sites)
        for site, (left, right) in enumerate(zip(*parts, strict=True)):
            part = FactorPayload(left, right, None if bias is None else bias[site][0])
            self._contributions.fill(first + site, part)

    def receive(self) -> None:
        """Put the sites' parts together, and send their Gram matrices to the owners."""
        samples, contributions = self.timed("wait", None, self._contributions.wait)
        weights = [count / self.context.reference * self.context.factor(rank) for rank, count in enumerate(samples)]
        self._weighted_by_all = sum(samples)
        self._parts, self._contributed = [], []
        starts = [0] * self._sites
        with self.timing("encode"):
            for slot, (unit, owner) in enumerate(zip(self.units, self._owners, strict=True)):
                payloads = contributions[slot * self._sites + self.context.transport.rank]
                contributed = any(payload is not None for payload in payloads)
                memory = self._memory(unit, owner.kept) if contributed else None
                own = self._stacked(unit, payloads, weights, memory, owner.kept)
                self._parts.append(own)
                self._contributed.append(contributed)
                packed = torch.cat([_packed(each @ each.T) for each in own[:2]])
                start, starts[owner.rank] = starts[owner.rank], starts[owner.rank] + len(packed)
                self._grams.payloads[owner.rank][start : start + len(packed)] = packed
        self._grams.launch()

    def _memory(self, unit: FactorUnit, kept: int) -> FactorPayload | None:
        """Return this site's part of the rows kept of earlier steps, with the loss scale; None for none."""
        memory = self._merger.memory.find(unit.name, self._place(unit)) if kept else None
        if memory is None:
            return None
        factor = self._merger.loss_scales.of(unit.name) * self._weighted_by_all / self.context.reference
        return FactorPayload(memory.left[:kept] * factor, memory.right[:kept])

    def _stacked(
        self,
        unit: FactorUnit,
        payloads: Sequence[FactorPayload | None],
        weights: Sequence[float],
        memory: FactorPayload | None,
        kept: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return all rows of this site's part, the memory's last, with zeros for those that are not there, in double.

        Args:
            unit: the unit.
            payloads: what each site has sent; None for those without a gradient.
            weights: factor of each site.
            memory: rows kept of earlier steps; None for none.
            kept: room for these.
        """
        rank, (out, width, bias) = self._rank(unit), self._part_sizes(unit)
        rows = stacked_rows(rank, self._sites, kept)
        left, right = (torch.zeros(rows, size, dtype=torch.float64) for size in (out, width))
        total = torch.zeros(bias, dtype=torch.float64)
        for start, payload, weight in zip(range(0, rows, rank), [*payloads, memory], [*weights, 1.0], strict=False):
            if payload is not None:
                place = slice(start, start + payload.rows)
                left[place], right[place] = payload.left.double() * weight, payload.right
                if payload.bias is not None:
                    total += payload.bias * weight
        return left, right, total if bias else None

    def proceed(self, number: int) -> None:
        if number == 0:
            self._send_coefficients()
        else:
            self._send_parts()

    def _send_coefficients(self) -> None:
        """Compute the coefficients of the units that this site owns, and send them to all sites."""
        received = self.timed("wait", None, self._grams.wait)
        if not self._owned:
            self._merging.launch()
            return
        with self.timing("encode"):
            start, found = 0, []
            for slot in self._owned:
                rank, kept = self._rank(self.units[slot]), self._owners[slot].kept
                rows, size = stacked_rows(rank, self._sites, kept), gram_numbers(rank, self._sites, kept) // 2
                grams = []
                for first in (start, start + size):
                    parts = [payload[first : first + size].double() for payload in received]
                    grams.append(_symmetric(torch.stack([_unpacked(part) for part in parts]).sum(0), rows))
                start += 2 * size
                merging = merge_coefficients(grams[0], grams[1], rank + kept, self._precision)
                found += [part.reshape(-1) for part in merging]
            self._merging.payload.copy_(torch.cat(found))
        self._merging.launch()

    def _send_parts(self) -> None:
        """Merge this site's parts, and send them to all sites."""
        received = self.timed("wait", None, self._merging.wait)
        starts = [0] * self._sites
        with self.timing("encode"):
            for slot, (unit, owner) in enumerate(zip(self.units, self._owners, strict=True)):
                left, right, bias = self._parts[slot]
                rank, kept = self._rank(unit), owner.kept
                start, size = starts[owner.rank], coefficients(rank, self._sites, kept)
                starts[owner.rank] += size
                x, y = received[owner.rank][start : start + size].double().view(2, -1, rank + kept)
                merged = FactorPayload(x.T @ left, y.T @ right, bias)
                if kept and self._contributed[slot]:
                    self._keep(unit, merged.part(rank, with_bias=False))
                self.bucket.fill(slot, merged.part(0, rank).to(self.context.transport.device, self.dtype))
        self.bucket.launch(self._weighted_by_all)

    def _keep(self, unit: FactorUnit, rows: FactorPayload) -> None:
        """Keep this site's part of the rows that follow those that are sent, without the loss scale."""
        factor = self.context.reference / self._weighted_by_all / self._merger.loss_scales.of(unit.name)
        rows = FactorPayload(rows.left * factor, rows.right.clone())
        self._merger.memory.prepare(unit.name, self._place(unit), rows)

    def _result(self, slot: int, payloads: Sequence[FactorPayload]) -> FactorPayload:
        out, width = self.units[slot].widths
        size, rank = self._bias_size(self.units[slot]), self._rank(self.units[slot])
        for sender, payload in zip(self.senders, payloads, strict=True):
            if payload.rows != rank:
                raise invalid("payload", self.context.transport.sites[sender], f"{payload.rows} rows instead of {rank}")
        left = torch.cat([payload.left for payload in payloads], 1)
        right = torch.cat([payload.right for payload in payloads], 1)
        bias = torch.cat([payload.bias for payload in payloads if payload.bias is not None])[:size] if size else None
        return FactorPayload(left[:, :out], right[:, :width], bias)


def _packed(gram: Tensor) -> Tensor:
    """Return the root of a Gram matrix's largest element, and its triangle as shares of that element.

    The squares of numbers that single precision holds may be beyond its range.
    """
    scale = gram.diagonal().max().sqrt()
    shares = _triangle(gram) / torch.where(scale > 0, scale * scale, 1.0)
    return torch.cat([scale[None], shares])


def _unpacked(packed: Tensor) -> Tensor:
    """Return the triangle of which `_packed` returned the shares."""
    return packed[1:] * packed[0] * packed[0]


def _triangle(matrix: Tensor) -> Tensor:
    """Return the elements of a symmetric matrix on and above its diagonal."""
    rows, columns = torch.triu_indices(*matrix.shape)
    return matrix[rows, columns]


def _symmetric(triangle: Tensor, size: int) -> Tensor:
    """Return the matrix of which `_triangle` returned the elements."""
    matrix = triangle.new_zeros(size, size)
    rows, columns = torch.triu_indices(size, size)
    matrix[rows, columns] = triangle
    matrix[columns, rows] = triangle
    return matrix
