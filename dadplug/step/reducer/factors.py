"""Handlers of units that send rows: factors, low-rank factors, rows of tables."""

from __future__ import annotations

import itertools
import math
import time
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from ...exchange.factor_buckets import (
    FactorBucket,
    FactorPayload,
    IndexSlot,
    Slot,
    extent,
    finite,
)
from ...exchange.restrictions import IN_FORCE
from ..fused.products import GradientProduct
from ..methods import Method, decode, decode_bias, is_product
from ..methods.base import GradientPath
from ..units.base import Unit, add_gradient
from ..units.factor import ChainedUnit, FactorUnit, LowrankUnit
from .clipping import square_of
from .faults import Fault
from .handler import BucketHandler, HandlerContext, StepHeader, register_handler

_NAME, _PRESENT, _SAMPLES = map(attrgetter, ("name", "present", "samples"))


class GatheredHandler(BucketHandler):
    """Base of handlers that gather rows, and form the agreed gradients of them.

    A subclass says who sends, what a sender puts into its bucket, and what a sender counts for in the mean.

    Args:
        units: the units that share the bucket.
        context: what the handlers of a reducer share.
        senders: ranks of the sites that send.
    """

    bucket_mb = 0.03  # small, since a slow link should not wait for the next layer
    _is_relayed = False  # whether what the senders send reaches the sites by way of all of them

    def __init__(self, units: Sequence[Unit], context: HandlerContext, senders: Sequence[int]) -> None:
        super().__init__(units, context)
        self.units: Sequence[FactorUnit] = [factored(unit) for unit in units]
        for unit in self.units:
            unit.sender = weakref.ref(self)
        self.senders = list(senders)
        slots = [self._slot(unit) for unit in self.units]
        wire, relayed = context.wire(units[0]), self._is_relayed
        self.bucket = FactorBucket(slots, context.transport, self.dtype, wire, self.senders, relayed=relayed)
        exact, constants = context.method.traits.exact, context.decoding
        self._formed = partial(decode, site_by_site=exact, constants=constants)
        self._present: set[str] = set()
        self._squares: dict[str, Tensor] = {}  # squared norms of what this site sends, by unit
        self._samples: list[int] = []  # of each sender, as its payload says
        self._rows: list[list[int]] = []  # that have arrived, by slot and sender
        self._payloads: list[list[FactorPayload]] = []  # that have arrived, by slot and sender
        self._apart: Sequence[int] = ()  # slots whose payloads have not been measured as they were decoded
        self._late: dict[tuple[int, int], FactorPayload] = {}  # of the second round, by slot and sender
        self._gradients: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._deferred: dict[str, tuple[list[FactorPayload], list[float]]] = {}  # payloads and weights by unit

    @classmethod
    def payload_size(cls, unit: Unit, rows: int, method: Method) -> int:
        return rows * sum(factored(unit).widths)

    def sent_bytes(self, unit: Unit) -> int:
        return self.context.transport.copies * self.bucket.slot_bytes[self._slots[unit.name]]

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
        number = torch.int64 if unit.form is not None and unit.form.table_rows else None  # of a row of a table
        left, right = unit.lead.new_full((1, out), math.nan), unit.lead.new_zeros(1, width, dtype=number)
        return FactorPayload(left, right, left.new_full((bias,), math.nan) if bias else None)

    def layout(self) -> list[list[int]]:
        return self.bucket.layout()

    def restore(self, layout: Sequence[Sequence[int]]) -> None:
        self.bucket.restore(layout)

    # What a subclass decides

    @abstractmethod
    def sent_gradient(self, unit: FactorUnit, name: str) -> list[Tensor]:
        """Return what this site has sent of a parameter's gradient, for programs that read it."""

    @abstractmethod
    def _weights(self, samples: Sequence[int]) -> list[float]:
        """Return the factors of each sender's rows in the mean.

        Args:
            samples: samples of each sender.
        """

    def _own_weight(self, samples: Sequence[int]) -> float:
        """Return the weight in the mean of what this site has encoded.

        Args:
            samples: samples of each sender.
        """
        rank = self.context.transport.rank
        return samples[rank] / sum(samples) * self.context.factor(rank)

    def _samples_of(self, headers: Sequence[StepHeader]) -> list[int]:
        """Return the samples that each sender's rows stand for at the end of the step."""
        return [*map(_SAMPLES, headers)]

    def _void(self, headers: Sequence[StepHeader]) -> list[list[bool]]:
        """Return, by slot and sender, whether what was sent has been discarded since and is to be left out."""
        void = [*zip(*(header.void for header in headers), strict=True)]
        return [[*void[position]] for position in self.positions]

    def _wanted(self, headers: Sequence[StepHeader]) -> list[bool]:
        """Return, by slot, whether there are rows to make a gradient of."""
        return [*map(self.context.present.__getitem__, self.positions)]

    # A step

    def post(self) -> None:
        self.bucket.post()

    def present(self) -> list[bool]:
        return [*map(self._present.__contains__, map(_NAME, self.units))]

    def own_squares(self) -> Sequence[Tensor]:
        return [square for name, square in self._squares.items() if name in self._present]

    def squares(self) -> Sequence[float]:
        return self._squares_of(self._payloads)

    def _squares_of(self, payloads: Sequence[Sequence[FactorPayload]]) -> list[float]:
        """Return, by rank, the squared norms of what all sites have sent.

        Args:
            payloads: by slot and rank.
        """
        known, recomputes = self.context.complete_payloads, self.context.method.traits.recomputes_deltas
        totals = [0.0] * len(self.senders)
        for slot, (unit, position) in enumerate(zip(self.units, self.positions, strict=True)):
            whole = [*payloads[slot]]
            for sender in [sender for sender in range(len(whole)) if (slot, sender) in self._late]:
                whole[sender] = whole[sender].plus(self._late[slot, sender])
            if recomputes and (complete := unit.complete(whole, known)) is not None:
                known[unit.name] = whole = complete
            for sender, payload in enumerate(whole):
                if not self.context.headers[sender].void[position]:
                    totals[sender] += float(self._square(unit, payload))
        return totals

    def _square(self, unit: FactorUnit, payload: FactorPayload) -> Tensor:
        assert unit.form is not None
        return square_of(payload, unit.form, unit.bias is not None, self.context.precise)

    def weigh_again(self) -> None:
        self._samples = []  # so that all is decoded at the end of the step

    def extra_rows(self) -> list[int]:
        return self.bucket.extra_rows

    def inspect(self) -> None:
        self.bucket.inspect()

    def receive(self) -> None:
        self.timed("wait", None, self.bucket.wait)
        self._samples = self._receive_of(self.bucket)
        self._rows = [*map(list, self.bucket.received_rows)]
        self._decode(self._payloads, self._samples)

    def _receive_of(self, bucket: FactorBucket) -> list[int]:
        """Take the payloads of all senders from a bucket, and return the samples that they state."""
        samples, self._payloads = bucket.receive()
        self.extent, self._apart = bucket.extent, bucket.apart
        return samples

    def not_finite(self) -> list[tuple[int | None, str]]:
        self.extent, slots = self.bucket.extent, self.bucket.apart
        if not 127 * self.extent < math.sqrt(
            torch.finfo(self.dtype).max
        ):  # products of rows may leave their type's range
            self.extent, slots = 0.0, list(range(len(self.units)))
        every = [(sender, self.units[slot].name, payload) for (slot, sender), payload in self._late.items()]
        for slot in slots:
            unit, by_sender = self.units[slot], self._payloads[slot]
            formed = None if unit.path == GradientPath.LOWRANK else self._gradients.get(unit.name)  # else few rows
            total = math.nan if formed is None else sum(extent(each) for each in formed if each is not None)
            if formed is not None:
                self.extent += total
            if not math.isfinite(total):
                every += [(sender, unit.name, payload) for sender, payload in enumerate(by_sender)]
        found: list[tuple[int | None, str]] = []
        for sender, name, payload in every:
            bound = payload.bound()
            self.extent += bound
            if not math.isfinite(bound) and not payload.finite():
                found.append((self.senders[sender], name))
        return found

    def overflown(self) -> list[str]:
        formed = dict(self._gradients)
        for unit in self.units:
            if unit.name in self._deferred and unit.form is not None:
                formed[unit.name] = self._formed(*self._deferred[unit.name], unit.bias is not None, form=unit.form)
        return [name for name, parts in formed.items() if not all(finite(each) for each in parts if each is not None)]

    def _decode(self, payloads: Sequence[list[FactorPayload]], samples: Sequence[int]) -> None:
        """Form the gradients of what has arrived, but for units of which there are no rows: these may still come.

        Args:
            payloads: by slot and sender.
            samples: samples of each sender.
        """
        self._gradients.clear()
        self._deferred.clear()
        if any(samples):
            weights, layers, start = self._weights(samples), self.context.transport.traffic.present, time.perf_counter()
            for unit, by_sender, rows in zip(self.units, payloads, self._rows, strict=True):
                if any(rows):
                    self._decode_unit(unit, by_sender, weights)
                    now = time.perf_counter()
                    layers[unit.name].decode_seconds += now - start
                    start = now

    def _decode_unit(self, unit: FactorUnit, payloads: list[FactorPayload], weights: list[float]) -> None:
        assert unit.form is not None
        context, traits, device = self.context, self.context.method.traits, unit.lead.device
        if device != context.transport.device:
            payloads = [each.to(device, self.dtype) for each in payloads]
        complete = unit.complete(payloads, context.complete_payloads) if traits.recomputes_deltas else payloads
        if complete is None:
            return
        if context.transport.observe is not None:
            context.transport.observe(unit.name, complete)
        if traits.recomputes_deltas:  # not otherwise: it is as large as the payloads
            context.complete_payloads[unit.name] = complete
        if context.deferral is not None and context.deferral.has(unit.lead) and is_product(unit.form):
            self._deferred[unit.name] = complete, weights
        else:
            self._gradients[unit.name] = self._formed(complete, weights, unit.bias is not None, form=unit.form)

    def _write(self, units: Iterable[FactorUnit]) -> None:
        """Write agreed gradients, or hold those of weights as products."""
        for unit in units:
            found = self._gradients.get(unit.name) or self._formed_late(unit)
            for parameter, gradient in zip(unit.parameters.values(), found, strict=False):
                if gradient is not None and parameter.grad is None and not gradient.is_sparse:
                    parameter.grad = gradient.reshape(parameter.shape)
                elif gradient is not None:
                    add_gradient(parameter, gradient)

    def _formed_late(self, unit: FactorUnit) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of weight and bias that may stay products; None for a weight whose gradient does."""
        payloads, weights = self._deferred[unit.name]
        assert unit.form is not None
        deferral = self.context.deferral
        if deferral is not None and deferral.agreed and unit.lead.grad is None:
            product = GradientProduct(payloads, weights, unit.form.transposed, self.context.decoding)
            deferral.products[unit.lead] = product
            return None, None if unit.bias is None else decode_bias(payloads, weights, unit.form)
        formed = partial(self._formed, form=unit.form)
        return self.timed("decode", unit, formed, payloads, weights, unit.bias is not None)

    def _extra(self, headers: Sequence[StepHeader]) -> list[list[int]]:
        """Return the rows of the second round, by slot and sender."""
        extra = [*zip(*[headers[rank].extra_rows for rank in self.senders], strict=True)]
        return [[*extra[position]] for position in self.positions]

    def fetch_late(self, headers: Sequence[StepHeader]) -> bool:
        extra = self._extra(headers)
        self._late = self.bucket.second_round(extra)
        return any(map(any, extra))

    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        samples = self._samples_of(headers)
        extra, void = ((), ()) if self.context.as_launched else (self._extra(headers), self._void(headers))
        wanted = self._wanted(headers) if write else [False] * len(self.units)
        late = not (self._gradients.keys() | self._deferred.keys()).issuperset(
            map(_NAME, itertools.compress(self.units, wanted))
        )
        if late or any(map(any, extra)) or any(map(any, void)) or samples != self._samples:
            self._finish_late(self._extra(headers), self._void(headers), wanted, samples, write)
        method, weight = self.context.method, self._own_weight(samples) if keep else 0.0
        self._write(itertools.compress(self.units, wanted))
        for unit in self.units:
            if keep:
                method.commit(unit.name, weight)
            else:
                method.rollback(unit.name)
        self._present.clear()
        self._squares.clear()
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
        payloads = [list(by_sender) for by_sender in self.bucket.receive()[1]]
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
            formed = unit.name in self._gradients or unit.name in self._deferred
            if wanted[slot] and (any(extra[slot]) or any(void[slot]) or not formed):
                self._decode_unit(unit, payloads[slot], self._weights(samples))


class SiteFactorHandler(GatheredHandler):
    """Base of handlers whose sites each encode their own rows."""

    def _encode(self, unit: FactorUnit) -> FactorPayload | None:
        """Encode what has arrived, and measure it; record NaN and Inf, and send NaN for them."""
        payload = self._encoded(unit)
        if payload is None:
            return None
        measured = payload
        if isinstance(unit, ChainedUnit):
            measured, unit.unsent = payload._replace(left=unit.unsent), unit.unsent[:0]
        if not self.context.measures:
            return payload
        square, before = self._square(unit, measured), self._squares.get(unit.name)
        self._squares[unit.name] = square if before is None else (square.sqrt() + before.sqrt()) ** 2
        return payload

    def _encoded(self, unit: FactorUnit) -> FactorPayload | None:
        factor = unit.take_unformed() if isinstance(unit, LowrankUnit) and unit.unformed is not None else unit.take()
        if not unit.layers:  # the rows of a formed gradient are not known, and as many as samples at least
            unit.last_rows = min(unit.last_rows, self.context.method.batch() or unit.last_rows)
        if factor is None:
            return None
        self._present.add(unit.name)
        if not factor.deltas.shape[0] and factor.bias is None:  # no rows: what a method keeps stays as it is
            return None
        context, method = self.context, self.context.method
        method.check_inputs(unit.name)
        task = torch._C._current_graph_task_id()
        if task == -1 or task != context.weighed_in:
            context.weighed_in, method.weight = task, context.expected_weight
        try:
            if factor.form.encoded:
                if IN_FORCE:
                    method.check_rank(unit.name, unit.last_rows)
                payload = method.encode(unit.name, factor, unit.bias is not None)
                if method.traits.detects_nonfinite and not payload.left.is_cuda:
                    return payload
            else:
                payload = method.encode_table(unit.name, factor, context.wire(unit))
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

    def fill(self, unit: Unit) -> int:
        assert isinstance(unit, FactorUnit)
        slot, payload = self._slots[unit.name], self._encode(unit)
        if payload is None:
            self.bucket.clear(slot)
        else:
            self.bucket.fill(slot, payload)
        return self.context.transport.copies * self.bucket.slot_bytes[slot]

    def sent_gradient(self, unit: FactorUnit, name: str) -> list[Tensor]:
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
            if unit.broken:
                unit.reclaim()
            if unit.void:
                self._drop_sent(unit)
            payload = None if unit.is_empty else self._encode(unit)
            if payload is not None:
                self.bucket.add_late(self._slots[unit.name], payload)
            if unit.dense and context.checks_finite:
                context.faults.check_gradient(unit)

    def _drop_sent(self, unit: Unit) -> None:
        """Forget what has been sent of a unit, since its gradient has been discarded."""
        self.bucket.drop_late(self._slots[unit.name])
        self._present.discard(unit.name)
        self._squares.pop(unit.name, None)
        self.context.method.rollback(unit.name)
        self.context.faults.drop(unit)

    def _weights(self, samples: Sequence[int]) -> list[float]:
        total = sum(samples)
        if not self.context.norms:
            return [count / total for count in samples]
        return [count / total * self.context.factor(rank) for rank, count in enumerate(samples)]


def factored(unit: Unit) -> FactorUnit:
    """Return a unit that is known to send factors."""
    assert isinstance(unit, FactorUnit)
    return unit


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
        self._added: set[str] = set()  # units whose payloads `add_sent` has added
        self._weighted_by = 0  # samples when the payloads were weighted
        self._missing_share = 0.0  # of this site's gradients, what its weight at that time has left out

    def sent_gradient(self, unit: FactorUnit, name: str) -> list[Tensor]:
        sent = self._own[self._slots[unit.name]]
        if sent is None:
            return []
        return [sent.left.T @ sent.right] if name == unit.name or sent.bias is None else [sent.bias]

    def add_late(self) -> None:
        """Make dense gradients of what came after the payloads were sent, or counts for more than it did then."""
        context, samples = self.context, self.context.samples()
        self._missing_share = 0.0 if samples in (0, self._weighted_by) else 1 - self._weighted_by / samples
        self._added.clear()
        for slot, unit in enumerate(self.units):
            if unit.void:
                self._own[slot] = None
                self._present.discard(unit.name)
                self._squares.pop(unit.name, None)
                self._withdraw(unit)
            if unit.rows:
                unit.form_gradients()
                unit.dense = True
            if self._missing_share and self._own[slot] is not None:
                self._add_own(unit, self._missing_share)
                unit.dense = True
            if unit.dense and context.checks_finite:
                context.faults.check_gradient(unit)

    def _wanted(self, headers: Sequence[StepHeader]) -> list[bool]:
        absent = self.context.transport.rounds.absent  # what they have sent counts nowhere
        present = [header for rank, header in enumerate(headers) if rank not in absent]
        return [
            any(header.present[position] for header in present) and not any(header.void[position] for header in present)
            for position in self.positions
        ]

    def _withdraw(self, unit: FactorUnit) -> None:
        """Undo what else has been done for a discarded gradient."""

    def add_sent(self, unit: Unit) -> None:
        assert isinstance(unit, FactorUnit)
        if unit.name not in self._added:  # sums are repeated where sites leave meanwhile
            self._added.add(unit.name)
            self._add_own(unit, 1 - self._missing_share)

    def _add_own(self, unit: FactorUnit, scale: float) -> None:
        """Add to ``.grad`` what this site has sent of a unit, times a scale."""
        sent = self._own[self._slots[unit.name]]
        if sent is None:
            return
        add_gradient(unit.lead, scale * (sent.left.T @ sent.right))
        if unit.bias is not None and sent.bias is not None:
            add_gradient(unit.parameters[unit.bias], scale * sent.bias)
