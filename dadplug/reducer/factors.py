"""Handlers of units that send rows: factors, low-rank factors, rows of tables."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from ..exchange.factor_buckets import FactorBucket, FactorPayload, IndexSlot, Slot, finite
from ..fused import GradientProduct
from ..methods import Method, decode, decode_bias, is_product
from ..methods.base import GradientPath
from ..units.base import Unit, add_gradient
from ..units.factor import FactorUnit
from .handler import BucketHandler, HandlerContext, register_handler
from .step_header import Fault, StepHeader


class GatheredHandler(BucketHandler):
    """Base of handlers that gather rows, and form the agreed gradients of them.

    A subclass says who sends, what a sender puts into its bucket, and what a sender counts for in the mean.

    Args:
        units: the units that share the bucket.
        context: what the handlers of a reducer share.
        senders: ranks of the sites that send.
    """

    bucket_mb = 0.03  # small, since a slow link should not wait for the next layer

    def __init__(self, units: Sequence[Unit], context: HandlerContext, senders: Sequence[int]) -> None:
        super().__init__(units, context)
        self.units: Sequence[FactorUnit] = [_factored(unit) for unit in units]
        self.senders = list(senders)
        slots = [self._slot(unit) for unit in self.units]
        self.bucket = FactorBucket(slots, context.transport, self.dtype, context.wire(units[0]), self.senders)
        self._present: set[str] = set()
        self._samples: list[int] = []  # of each sender, as its payload says
        self._rows: list[list[int]] = []  # that have arrived, by slot and sender
        self._late: dict[tuple[int, int], FactorPayload] = {}  # of the second round, by slot and sender
        self._gradients: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._deferred: dict[str, tuple[list[FactorPayload], list[float]]] = {}  # payloads and weights by unit

    @classmethod
    def payload_size(cls, unit: Unit, rows: int, method: Method) -> int:
        return rows * sum(_factored(unit).widths)

    def sent_bytes(self, unit: Unit) -> int:
        return self.context.transport.copies * self.bucket.slot_bytes(self._slots[unit.name])

    def room(self, unit: Unit) -> int:
        return self.bucket.room(self._slots[unit.name])

    def _slot(self, unit: FactorUnit) -> Slot:
        assert unit.form is not None
        sites, (out, width), wire = len(self.senders), unit.widths, self.context.wire(unit)
        if unit.form.table_rows:
            return IndexSlot(out, unit.form.table_rows, wire, sites)
        return Slot(out, width, self._bias_size(unit), sites, wire)

    def _bias_size(self, unit: FactorUnit) -> int:
        """Return the number of elements of the bias gradient that is sent beside a unit's rows."""
        if unit.bias is None or not self.context.method.traits.sends_bias:
            return 0
        return unit.parameters[unit.bias].numel()

    def _not_finite(self, unit: FactorUnit) -> FactorPayload:
        """Return a payload that stands for a gradient with NaN or Inf."""
        (out, width), bias = unit.widths, self._bias_size(unit)
        left, right = unit.lead.new_full((1, out), math.nan), unit.lead.new_zeros(1, width)
        return FactorPayload(left, right, left.new_full((bias,), math.nan) if bias else None)

    def layout(self) -> list[list[int]]:
        return self.bucket.layout()

    def restore(self, layout: Sequence[Sequence[int]]) -> None:
        self.bucket.restore(layout)

    # What a subclass decides

    @abstractmethod
    def _weights(self, samples: Sequence[int]) -> list[float]:
        """Return the factors of each sender's rows in the mean.

        Args:
            samples: samples of each sender.
        """

    @abstractmethod
    def _samples_of(self, headers: Sequence[StepHeader]) -> list[int]:
        """Return the samples that each sender's rows stand for at the end of the step."""

    @abstractmethod
    def _void(self, headers: Sequence[StepHeader]) -> list[list[bool]]:
        """Return, by slot and sender, whether what was sent has been discarded since and is to be left out."""

    @abstractmethod
    def _wanted(self, headers: Sequence[StepHeader]) -> list[bool]:
        """Return, by slot, whether there are rows to make a gradient of."""

    # A step

    def post(self) -> None:
        self.bucket.post()

    def present(self, unit: Unit) -> bool:
        return unit.name in self._present

    def extra_rows(self, unit: Unit) -> int:
        return self.bucket.extra_rows[self._slots[unit.name]]

    def receive(self) -> None:
        with self.timing("wait"):
            self.bucket.wait()
        self._samples, payloads = self.bucket.receive()
        self._rows = [[payload.rows for payload in by_sender] for by_sender in payloads]
        self._decode(payloads, self._samples)

    def _decode(self, payloads: Sequence[list[FactorPayload]], samples: Sequence[int]) -> None:
        """Form the gradients of what has arrived, but for units of which there are no rows: these may still come.

        Args:
            payloads: by slot and sender.
            samples: samples of each sender.
        """
        self._gradients.clear()
        self._deferred.clear()
        if any(samples):
            for unit, by_sender in zip(self.units, payloads, strict=True):
                if any(payload.rows for payload in by_sender):
                    with self.timing("decode", unit):
                        self._decode_unit(unit, by_sender, samples)

    def _decode_unit(self, unit: FactorUnit, payloads: Sequence[FactorPayload], samples: Sequence[int]) -> None:
        assert unit.form is not None
        context, traits, device = self.context, self.context.method.traits, unit.lead.device
        complete = unit.complete([each.to(device, self.dtype) for each in payloads], context.complete_payloads)
        if complete is None:
            return
        if context.transport.observe is not None:
            context.transport.observe(unit.name, complete)
        if traits.recomputes_deltas:  # not otherwise: it is as large as the payloads
            context.complete_payloads[unit.name] = complete
        weights = self._weights(samples)
        if context.deferral is not None and context.deferral.has(unit.lead) and is_product(unit.form):
            self._deferred[unit.name] = complete, weights
        else:
            self._gradients[unit.name] = self._formed(unit, complete, weights)

    def _formed(
        self, unit: FactorUnit, payloads: Sequence[FactorPayload], weights: Sequence[float]
    ) -> tuple[Tensor, Tensor | None]:
        assert unit.form is not None
        exact = self.context.method.traits.exact
        constants = self.context.decoding
        return decode(payloads, weights, unit.bias is not None, site_by_site=exact, form=unit.form, constants=constants)

    def _write(self, unit: FactorUnit) -> None:
        """Write a unit's agreed gradients, or hold that of the weight as a product."""
        if unit.name not in self._deferred:
            _add_gradients(unit, *self._gradients[unit.name])
            return
        payloads, weights = self._deferred[unit.name]
        deferral = self.context.deferral
        if deferral is None or not deferral.agreed or unit.lead.grad is not None:
            with self.timing("decode", unit):
                _add_gradients(unit, *self._formed(unit, payloads, weights))
            return
        assert unit.form is not None
        deferral.products[unit.lead] = GradientProduct(payloads, weights, unit.form.transposed, self.context.decoding)
        if unit.bias is not None:
            add_gradient(unit.parameters[unit.bias], decode_bias(payloads, weights, unit.form))

    def _decoded(self, unit: FactorUnit) -> bool:
        return unit.name in self._gradients or unit.name in self._deferred

    def _extra(self, headers: Sequence[StepHeader]) -> list[list[int]]:
        """Return the rows of the second round, by slot and sender."""
        return [[headers[rank].extra_rows[position] for rank in self.senders] for position in self._positions]

    def fetch_late(self, headers: Sequence[StepHeader]) -> bool:
        extra = self._extra(headers)
        self._late = self.bucket.second_round(extra)
        return any(map(any, extra))

    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        samples, extra = self._samples_of(headers), self._extra(headers)
        void = self._void(headers)
        wanted = [write and want for want in self._wanted(headers)]
        missing = any(want and not self._decoded(unit) for want, unit in zip(wanted, self.units, strict=True))
        if any(map(any, extra)) or any(map(any, void)) or missing or samples != self._samples:
            self._finish_late(extra, void, wanted, samples, write)
        method = self.context.method
        for want, unit in zip(wanted, self.units, strict=True):
            if want:
                self._write(unit)
            if keep:
                method.commit(unit.name)
            else:
                method.rollback(unit.name)
        self._present.clear()
        self._gradients.clear()
        self._deferred.clear()
        self._late.clear()
        self.bucket.end_step(self._rows)

    def _finish_late(
        self,
        extra: Sequence[Sequence[int]],
        void: Sequence[Sequence[bool]],
        wanted: Sequence[bool],
        samples: Sequence[int],
        write: bool,
    ) -> None:
        """Decode what has changed since the bucket was launched: rows in a second round, samples of a late backward.

        Args:
            extra: by slot and sender, rows of the second round.
            void: by slot and sender, whether the payload has been discarded.
            wanted: by slot, whether a gradient is written.
            samples: samples of each sender at the end of the step.
            write: whether gradients are written at all.
        """
        _, payloads = self.bucket.receive()
        if write and samples != self._samples:
            self._decode(payloads, samples)
        for slot, by_sender in enumerate(void):
            for sender in [sender for sender, discarded in enumerate(by_sender) if discarded]:
                payloads[slot][sender] = payloads[slot][sender].without_rows()
                self._rows[slot][sender] = 0
        for (slot, sender), payload in self._late.items():
            if extra[slot][sender]:  # otherwise the sender has left since
                payloads[slot][sender] = payloads[slot][sender].plus(payload)
                self._rows[slot][sender] += payload.rows
        for slot, unit in enumerate(self.units):
            if wanted[slot] and (any(extra[slot]) or any(void[slot]) or not self._decoded(unit)):
                self._decode_unit(unit, payloads[slot], samples)


class SiteFactorHandler(GatheredHandler):
    """Base of handlers whose sites each encode their own rows."""

    def _encode(self, unit: FactorUnit) -> FactorPayload | None:
        """Encode what has arrived; record NaN and Inf, and send NaN for them."""
        unit.last_rows = unit.rows or unit.last_rows
        factor = unit.take_unformed()
        if factor is None:
            return None
        self._present.add(unit.name)
        if not factor.rows and factor.bias is None:  # a batch without rows leaves what a method keeps as it is
            return None
        method = self.context.method
        # One unit in all steps: where the batches of all sites shrink, as in the last step of an epoch, what is kept of
        # a larger batch would be many times the mean gradient if it counted by samples.
        method.samples = min(1, self.context.samples())
        try:
            if factor.form.encoded:
                method.check_rank(unit.name, unit.last_rows)
                payload = method.encode(unit.name, factor, unit.bias is not None)
                if method.traits.detects_nonfinite and not payload.left.is_cuda:
                    return payload
            else:
                payload = FactorPayload(factor.deltas, factor.activations)
            if not self.context.checks_finite or payload.finite():
                return payload
        except FloatingPointError:
            pass
        self.context.faults.record(Fault.DELTAS if finite(factor.inputs) else Fault.ACTIVATIONS, unit)
        return self._not_finite(unit)


@register_handler(GradientPath.FACTORS, GradientPath.LOWRANK, GradientPath.ACTIVATIONS)
class FactorHandler(SiteFactorHandler):
    """Gather of rows that each site has encoded itself.

    Args:
        units: the units that share the bucket.
        context: what the handlers of a reducer share.
    """

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        super().__init__(units, context, range(context.transport.world_size))

    def fill(self, unit: Unit) -> None:
        assert isinstance(unit, FactorUnit)
        slot = self._slots[unit.name]
        with self.timing("encode", unit):
            payload = self._encode(unit)
            if payload is None:
                self.bucket.clear(slot)
            else:
                self.bucket.fill(slot, payload)
        self.context.transport.traffic.of(unit.name).bytes += self.sent_bytes(unit)
        unit.sent_gradient = partial(self._sent_gradient, unit)

    def _sent_gradient(self, unit: FactorUnit, name: str) -> list[Tensor]:
        """Return what this site has sent of a parameter's gradient, for programs that read it."""
        payload = self.bucket.own_share(self._slots[unit.name]).to(unit.lead.device, self.dtype)
        if not unit.widths[0]:
            raise RuntimeError(
                f"the gradient of {name!r} is on its way to the other sites, without deltas in mode 'edad': read it "
                "after reduction.synchronize()"
            )
        assert unit.form is not None
        weight, bias = decode([payload], [1.0], unit.bias is not None, site_by_site=True, form=unit.form)
        return [weight if name == unit.name or bias is None else bias]

    def launch(self) -> None:
        self.bucket.launch(self.context.samples())

    def add_late(self) -> None:
        context = self.context
        for unit in self.units:
            unit.before_header()
            if unit.void:
                self._drop_sent(unit)
            payload = self._encode(unit)
            if payload is not None:
                self.bucket.add_late(self._slots[unit.name], payload)
            if unit.dense and context.checks_finite:
                context.faults.check_gradient(unit)

    def _drop_sent(self, unit: Unit) -> None:
        """Forget what has been sent of a unit, since its gradient has been discarded."""
        self.bucket.drop_late(self._slots[unit.name])
        self._present.discard(unit.name)
        self.context.method.rollback(unit.name)
        self.context.faults.drop(unit)

    def _weights(self, samples: Sequence[int]) -> list[float]:
        total = sum(samples)
        return [count / total for count in samples]

    def _samples_of(self, headers: Sequence[StepHeader]) -> list[int]:
        return [header.samples for header in headers]

    def _void(self, headers: Sequence[StepHeader]) -> list[list[bool]]:
        return [[header.void[position] for header in headers] for position in self._positions]

    def _wanted(self, headers: Sequence[StepHeader]) -> list[bool]:
        return [any(header.present[position] for header in headers) for position in self._positions]


def _factored(unit: Unit) -> FactorUnit:
    assert isinstance(unit, FactorUnit)
    return unit


def _add_gradients(unit: FactorUnit, weight: Tensor, bias: Tensor | None) -> None:
    add_gradient(unit.lead, weight)
    if unit.bias is not None and bias is not None:
        add_gradient(unit.parameters[unit.bias], bias)


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
