"""Base of the handlers of layers whose factors are merged at one site or more, which send the result to all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

from ..exchange.factor_buckets import ContributionBucket, FactorPayload
from ..methods.rankdad import RankDAD
from ..units.base import Unit
from ..units.factor import FactorUnit
from .context import HandlerContext
from .factors import SiteFactorHandler
from .kept_payloads import KeptPayloadsHandler
from .step_header import StepHeader


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
        self._merger.refer(context.reference)
        self._owners = [context.owners[unit.name] for unit in units]
        self._results: list[FactorPayload] = []  # of this step, by slot
        super().__init__(units, context, senders)

    def _rank(self, unit: FactorUnit) -> int:
        return min(self.context.options.rank, *unit.widths)

    def sent_bytes(self, unit: Unit) -> int:
        assert isinstance(unit, FactorUnit)
        owner, transport = self._owners[self._slots[unit.name]], self.context.transport
        place = transport.rank, transport.world_size
        numbers = owner.numbers_of_rows(self._rank(unit), unit.widths, *place)
        numbers += owner.numbers_of_bias(self._bias_size(unit), *place)
        return numbers * self.context.wire(self.dtype).itemsize

    def room(self, unit: Unit) -> int:
        assert isinstance(unit, FactorUnit)
        return self._rank(unit)

    def extra_rows(self, unit: Unit) -> int:
        return 0

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

    def fill(self, unit: Unit) -> None:
        assert isinstance(unit, FactorUnit)
        slot = self._slots[unit.name]
        with self.timing("encode", unit):
            payload = self._own[slot] = self._encode(unit)
            self._contribute(slot, payload)
        self.context.transport.traffic.of(unit.name).bytes += self.sent_bytes(unit)
        unit.sent_gradient = partial(self._sent_gradient, unit)

    def launch(self) -> None:
        self._weighted_by = self.context.samples()
        self._contributions.launch(self._weighted_by)

    def _withdraw(self, unit: FactorUnit) -> None:
        self.context.method.rollback(unit.name)
        self.context.faults.drop(unit)

    def fetch_late(self, headers: Sequence[StepHeader]) -> bool:
        return False

    def spoilt(self, headers: Sequence[StepHeader]) -> list[str]:
        results = self._receive_results()
        wanted = zip(self.units, results, self._wanted(headers), strict=True)
        return [unit.name for unit, merged, want in wanted if want and not merged.finite()]

    def _receive_results(self) -> list[FactorPayload]:
        """Wait for the merged factors of this step, and return them by slot."""
        if not self._results:
            with self.timing("wait"):
                self.bucket.wait()
            _, payloads = self.bucket.receive()
            self._results = [self._result(slot, by_sender) for slot, by_sender in enumerate(payloads)]
        return self._results

    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        results = self._receive_results()
        samples, void, wanted = self._samples_of(headers), self._void(headers), self._wanted(headers)
        method = self.context.method
        for slot, unit in enumerate(self.units):
            merged = None
            if write and wanted[slot]:
                with self.timing("decode", unit):
                    merged = results[slot]
                    self._decode_unit(unit, [merged], samples)
                self._write(unit)
            counts = keep and (merged is None or merged.finite())  # sums of finite payloads may overflow
            (method.commit if counts else method.rollback)(unit.name)
            (self._merger.commit if counts and not any(void[slot]) else self._merger.rollback)(unit.name)
        self._results = []
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
