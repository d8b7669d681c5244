"""The handler of units that send rows: factors, low-rank factors, rows of tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from ..exchange.buckets import FactorBucket, Slot
from ..exchange.indices import IndexSlot
from ..exchange.payload import FactorPayload, finite
from ..methods import Method, decode
from ..units.base import Unit, add_gradient
from ..units.factor import FactorUnit
from .handler import BucketHandler, register_handler
from .step_header import StepHeader

if TYPE_CHECKING:
    from .reducer import Reducer


@register_handler("factors", "lowrank", "activations")
class FactorHandler(BucketHandler):
    """Gathers rows from all sites, and forms the agreed gradients of them."""

    bucket_mb = 0.03  # small, since a slow link should not wait for the next layer

    @classmethod
    def numbers(cls, unit: Unit, rows: int, method: Method) -> int:
        assert isinstance(unit, FactorUnit)
        return rows * sum(unit.widths)

    def __init__(self, units: Sequence[Unit], reducer: Reducer) -> None:
        super().__init__(units, reducer)
        self.senders = self._find_senders()
        slots = [self._slot(unit) for unit in units]
        wire = reducer.wire(self.dtype)
        self.bucket = FactorBucket(slots, reducer.transport, self.dtype, wire, self.senders)
        self._present: set[str] = set()
        self._samples: list[int] = []
        self._rows: list[list[int]] = []  # that have arrived, by slot and site
        self._gradients: dict[str, tuple[Tensor, Tensor | None]] = {}

    def _find_senders(self) -> list[int]:
        """Ranks of the sites that send; all of them."""
        return list(range(self.reducer.transport.world_size))

    def _slot(self, unit: Unit) -> Slot:
        assert isinstance(unit, FactorUnit)
        assert unit.form is not None
        sites, (out, width) = len(self.senders), unit.widths
        if unit.form.table_rows:
            return IndexSlot(out, unit.form.table_rows, self.reducer.wire(self.dtype), sites)
        return Slot(out, width, self._bias(unit), sites, self.reducer.wire(self.dtype))

    def _bias(self, unit: FactorUnit) -> int:
        """Number of elements of the bias gradient that is sent beside a unit's rows."""
        sent = unit.bias is not None and self.reducer.method.traits.sends_bias
        return unit.parameters[str(unit.bias)].numel() if sent else 0

    def post(self) -> None:
        self.bucket.post()

    def fill(self, unit: Unit) -> None:
        slot = self._slots[unit.name]
        with self.timing("encode", unit):
            share = self._encode(unit)
            if share is None:
                self.bucket.clear(slot)
            else:
                self.bucket.fill(slot, share)
        self._meter(unit)
        assert isinstance(unit, FactorUnit)
        unit.sent_gradient = partial(self._sent_gradient, unit)

    def _sent_gradient(self, unit: FactorUnit, name: str) -> list[Tensor]:
        """Compute what this site has sent of a parameter's gradient, for programs that read it."""
        share = self.bucket.own_share(self._slots[unit.name]).to(unit.lead.device, self.dtype)
        if not unit.widths[0]:
            raise RuntimeError(
                f"the gradient of {name!r} is on its way to the other sites, without deltas in mode 'edad': read it "
                "after reduction.synchronize()"
            )
        assert unit.form is not None
        weight, bias = decode([share], [1.0], unit.bias is not None, site_by_site=True, form=unit.form)
        return [weight if name == unit.name or bias is None else bias]

    def _meter(self, unit: Unit) -> None:
        transport = self.reducer.transport
        transport.traffic.of(unit.name).bytes += transport.copies * self.bucket.slot_bytes(self._slots[unit.name])

    def _encode(self, unit: Unit) -> FactorPayload | None:
        """Encodes what has arrived; takes note of NaN and Inf, and passes them on as such."""
        assert isinstance(unit, FactorUnit)
        factor = unit.take()
        if factor is None:
            return None
        self._present.add(unit.name)
        if not factor.rows and factor.bias is None:  # a batch without rows leaves what a method keeps as it is
            return None
        try:
            method = self.reducer.method
            if factor.form.encoded:
                share = method.encode(unit.name, factor, unit.bias is not None)
                if method.traits.detects_nonfinite and not share.left.is_cuda:
                    return share
            else:
                share = FactorPayload(factor.deltas, factor.activations)
            if not self.reducer.checks or share.finite():
                return share
        except FloatingPointError:
            pass
        kind = 2 if finite(factor.inputs) else 1
        self.reducer.faults.append((kind, unit.name))
        return self._nan(unit)

    def _nan(self, unit: FactorUnit) -> FactorPayload:
        """What stands for a gradient that is not finite."""
        out, width = unit.widths
        left, right = unit.lead.new_full((1, out), math.nan), unit.lead.new_zeros(1, width)
        return FactorPayload(left, right, left.new_full((self._bias(unit),), math.nan) if self._bias(unit) else None)

    def room(self, unit: Unit) -> int:
        """Tells how many rows of a unit this site sends in a step."""
        return self.bucket.room(self._slots[unit.name])

    def launch(self) -> None:
        self.bucket.launch(self.reducer.samples())

    def settle_late(self) -> None:
        for unit in self.units:
            assert isinstance(unit, FactorUnit)
            unit.before_header()
            if unit.void:
                self._drop_sent(unit)
            share = self._encode(unit)
            if share is not None:
                self.bucket.add_late(self._slots[unit.name], share)
            gradient = unit.lead.grad if unit.dense and self.reducer.checks else None
            if gradient is not None and not finite(gradient):
                self.reducer.faults.append((3, unit.name))

    def _drop_sent(self, unit: Unit) -> None:
        """Forget what has been sent of a unit, since its gradient has been discarded."""
        self.bucket.drop_late(self._slots[unit.name])
        self._present.discard(unit.name)
        self.reducer.method.rollback(unit.name)
        faults = self.reducer.faults
        faults[:] = [fault for fault in faults if fault[1] != unit.name]

    def present(self, unit: Unit) -> bool:
        return unit.name in self._present

    def extra_rows(self, unit: Unit) -> int:
        return self.bucket.extra_rows[self._slots[unit.name]]

    def receive(self) -> None:
        with self.timing("wait"):
            self.bucket.wait()
        self._samples, shares = self.bucket.receive()
        self._rows = [[share.rows for share in sites] for sites in shares]
        self._decode(shares, self._samples)

    def _decode(self, shares: Sequence[list[FactorPayload]], samples: Sequence[int]) -> None:
        """Forms the gradients of what has arrived, with each site's share in the samples."""
        self._gradients.clear()
        if any(samples):
            for unit, each in zip(self.units, shares, strict=True):
                with self.timing("decode", unit):
                    self._decode_unit(unit, each, samples)

    def _decode_unit(self, unit: Unit, shares: Sequence[FactorPayload], samples: Sequence[int]) -> None:
        assert isinstance(unit, FactorUnit)
        assert unit.form is not None
        whole = unit.complete([share.to(unit.lead.device, self.dtype) for share in shares], self.reducer.known)
        if whole is None:
            return
        if self.reducer.method.traits.recomputes_deltas:  # nobody else asks for it, and it is as large as the payloads
            self.reducer.known[unit.name] = whole
        weights, exact = self._weights(samples), self.reducer.method.traits.exact
        gradients = decode(whole, weights, unit.bias is not None, site_by_site=exact, form=unit.form)
        self._gradients[unit.name] = gradients

    def _weights(self, samples: Sequence[int]) -> list[float]:
        """Tells each sender's share in the mean."""
        return [count / sum(samples) for count in samples]

    def _counts(self, headers: Sequence[StepHeader]) -> list[int]:
        """Tells the samples that each sender's rows stand for."""
        return [header.samples for header in headers]

    def _void(self, headers: Sequence[StepHeader]) -> list[list[bool]]:
        """Return, by slot and sender, whether what was sent has been discarded since."""
        return [[headers[rank].void[index] for rank in self.senders] for index in self._indices()]

    def _wanted(self, headers: Sequence[StepHeader]) -> list[bool]:
        """Return, by slot, whether any site has rows."""
        return [any(header.present[index] for header in headers) for index in self._indices()]

    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        samples = self._counts(headers)
        extra = [[headers[rank].extra_rows[index] for rank in self.senders] for index in self._indices()]
        void = self._void(headers)
        wanted = [write and want for want in self._wanted(headers)]
        missing = any(want and unit.name not in self._gradients for want, unit in zip(wanted, self.units, strict=True))
        if any(map(any, extra)) or any(map(any, void)) or missing or samples != self._samples:
            self._finish_late(extra, void, wanted, samples, write)
        for want, unit in zip(wanted, self.units, strict=True):
            if want:
                self._write_gradients(unit, *self._gradients[unit.name])
            if keep:
                self.reducer.method.commit(unit.name)
            else:
                self.reducer.method.rollback(unit.name)
        self._present.clear()
        self._gradients.clear()
        self.bucket.end_step(self._rows)

    def _finish_late(
        self,
        extra: Sequence[Sequence[int]],
        void: Sequence[Sequence[bool]],
        wanted: Sequence[bool],
        samples: Sequence[int],
        write: bool,
    ) -> None:
        """Decodes anew what has changed since the buckets left: rows in a second round, samples of a late backward."""
        _, shares = self.bucket.receive()
        if write and samples != self._samples:
            self._decode(shares, samples)
        for slot, by_site in enumerate(void):
            for site in [site for site, discarded in enumerate(by_site) if discarded]:
                shares[slot][site] = shares[slot][site].without_rows()
                self._rows[slot][site] = 0
        for (slot, site), share in self.bucket.second_round(extra).items():
            shares[slot][site] = shares[slot][site].plus(share)
            self._rows[slot][site] += share.rows
        for slot, unit in enumerate(self.units):
            if wanted[slot] and (any(extra[slot]) or any(void[slot]) or unit.name not in self._gradients):
                self._decode_unit(unit, shares[slot], samples)

    def _write_gradients(self, unit: Unit, weight: Tensor, bias: Tensor | None) -> None:
        assert isinstance(unit, FactorUnit)
        add_gradient(unit.lead, weight)
        if unit.bias is not None and bias is not None:
            add_gradient(unit.parameters[unit.bias], bias)
