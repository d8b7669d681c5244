"""Reducer: one step's exchange, in buckets that fill during backward and leave in one fixed order on all sites."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import DroppedError, MismatchError
from ...exchange import Transport
from ...exchange.factor_buckets import extent
from ...exchange.summed_buckets import AllReducedBucket, GatheredBucket, SummedBucket
from ...exchange.wire import WireFormat
from ...options import Options
from ...support.logs import get_logger
from ...support.schedules import Decoding
from ..fused.products import Deferral, compare_digests
from ..methods import Method
from ..methods.feedback import ErrorFeedback
from ..units.base import Unit
from ..units.factor import FactorUnit
from .clipping import OUTSIZED, TRUSTED, OutsizedGradients, limit_of, sum_of_squares, total_of
from .faults import Fault, raise_fault
from .handler import (
    FORGET,
    BucketHandler,
    HandlerContext,
    HeaderExchange,
    StepHeader,
    as_launched,
    gradient_room,
    handler_type,
    write_gradients,
)
from .owners import Owners, deal

_log = get_logger(__name__)
_NOTHING = nullcontext()
_SAMPLES, _FAULT, _FINITE = map(attrgetter, ("samples", "fault", "finite"))
_Late = tuple[str, torch.nn.Parameter, SummedBucket]
"""The name of a unit, one of its parameters, and the bucket of the gradient of that, which no handler sends."""
_Sum = tuple[str, torch.nn.Parameter, Tensor]
"""The same with the agreed gradient."""


class AttachedGradients(Protocol):
    """Gradients of parameters that are managed elsewhere, such as those of rows in tables.

    Attributes:
        names: names of the parameters, in the same order on all sites.
        arrived: whether backward has added gradients since the last synchronization, cleared or not.
        cleared: whether the program has cleared all of them.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def arrived(self) -> bool: ...

    @property
    def cleared(self) -> bool: ...

    def first_not_finite(self) -> int | None:
        """Return the index of the first parameter whose gradient holds NaN or Inf; None if there is none."""

    def apply_share(self, share: float) -> None:
        """Weight the gradients that have arrived; called at the end of a synchronization.

        Args:
            share: this site's weight in the mean of the step.
        """

    def fill_with_inf(self) -> None:
        """Replace the gradients by Inf, since some site's are not finite; called instead of `apply_share`."""


@dataclass(frozen=True)
class StepRequest:
    """Request of one site for the end of a step.

    Attributes:
        step: number of the step.
        stop: whether to ask all sites to stop after it.
        attached: gradients that the reducer does not send, and that are checked with those that it sends.
        admits: whether sites that come may join in this step.
        noise_every: as in `StepHeader`.
        settings: as in `StepHeader`.
        digest: as in `StepHeader`.
        batch: as in `StepHeader`.
        deferral: which weights' gradients may stay products, if all sites say so; takes these products.
        counts: whether samples are counted; otherwise a site has 0 or 1.
        before_end: called with its number once the gradients are agreed, for exchanges in the rounds of the step.
    """

    step: int
    stop: bool = False
    attached: AttachedGradients | None = None
    admits: bool = True
    noise_every: int = 0
    settings: int = 0
    digest: int = 0
    batch: int = 0
    deferral: Deferral | None = None
    counts: bool = True
    before_end: Callable[[int], None] | None = None


class Reducer:
    """Exchange of units as their gradients arrive; writes the agreed gradients at the end of the step.

    Args:
        units: the units, in the order in which backward is expected to reach them, the same on all sites.
        method: encodes factors.
        transport: the transport.
        options: the options.
        rows: rows that a unit is expected to send, by its name; decides how units share buckets.
        samples: returns the samples that this site's gradients stand for so far in the step.
        reference: samples of all sites in a step, about; a scale that keeps sums near the size of a gradient.
        version: number of the plan that the units belong to.
        owners: the sites that merge each unit that has an owner, by its name.
        decoding: sizes of the blocks in which gradients are formed, the same at all sites.
        given: see `HandlerContext`.
        outsized: log of the sites whose gradients are out of all proportion.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        method: Method,
        transport: Transport,
        options: Options,
        rows: dict[str, int],
        samples: Callable[[], int],
        reference: int,
        version: int,
        owners: Owners,
        decoding: Decoding,
        given: Mapping[str, Any],
        outsized: OutsizedGradients,
    ) -> None:
        self._units = list(units)
        self._version = version
        self._outsized = outsized
        positions = {unit.name: position for position, unit in enumerate(units)}
        transport.rounds.begin_plan()
        reference = max(reference, 1)
        self._assigned = owners  # where all sites are present
        self._factored = [unit for unit in units if isinstance(unit, FactorUnit)]
        self._sizes = {unit.name: sum(unit.widths) for unit in self._factored}
        self._dealt_without: frozenset[int] | None = transport.rounds.absent
        owners = deal(owners, owners, self._sizes, transport.rounds.present)
        self._context = HandlerContext(
            transport, method, options, samples, reference, positions, owners, decoding, given=given
        )
        self._handlers = self._make_handlers(rows)
        self._handler_of = {unit.name: handler for handler in self._handlers for unit in handler.units}
        self._rounds = max((handler.rounds for handler in self._handlers), default=0)
        self._launched = 0
        self._asks_to_stop = False  # in a step in which this site had no part
        self._headers = HeaderExchange(len(self._units), transport, reference, options.check_finite)
        self._norm = 0.0  # of this site's gradient in the last step, if the agreed one was out of all proportion

    def _make_handlers(self, rows: dict[str, int]) -> list[BucketHandler]:
        """Group neighbouring units of one kind into buckets; a bucket's place in the order is that of its last unit.

        Args:
            rows: rows that a unit is expected to send, by its name.
        """
        context = self._context
        handlers: list[BucketHandler] = []
        open_groups: dict[tuple[type[BucketHandler], WireFormat, torch.dtype], tuple[list[Unit], int]] = {}
        kinds, sizes, wholes = [], [], Counter[type[BucketHandler]]()
        for unit in self._units:
            kind = handler_type(unit.path, context.transport, context.owners.get(unit.name))
            size = kind.payload_size(unit, rows.get(unit.name, 1), context.method) * context.wire(unit).itemsize
            kinds.append(kind)
            sizes.append(size)
            wholes[kind] += size
        for unit, kind, added in zip(self._units, kinds, sizes, strict=True):
            key = kind, context.wire(unit), unit.lead.dtype
            group, size = open_groups.pop(key, ([], 0))
            group.append(unit)
            size += added
            if size >= context.options.bucket_bytes(kind.full_at(context.transport, 1e-6 * wholes[kind])):
                handlers.append(kind(group, context))
            else:
                open_groups[key] = group, size
        handlers += [kind(group, context) for (kind, *_), (group, _) in open_groups.items()]
        return handlers

    # A step

    def arrive(self, unit: Unit, launches: bool = True) -> None:
        """Put a unit whose gradient is complete into its bucket, and launch the buckets that can leave."""
        handler = self._handler_of[unit.name]
        if handler.fills:
            layer, start = self._context.transport.traffic.present[unit.name], time.perf_counter()
            profiled = torch.autograd._profiler_enabled()
            with torch.profiler.record_function(f"dadplug encode {unit.name}") if profiled else _NOTHING:
                layer.bytes += handler.fill(unit)
            layer.encode_seconds += time.perf_counter() - start
        handler.missing -= 1
        unit.sent = True
        if handler.missing and not handler.fills:  # as of most parameters
            return
        if not handler.missing:
            handler.on_filled()
        ready = self._launched
        last = len(self._handlers) if launches else 0
        while ready < last and not self._handlers[ready].missing and self._handlers[ready].ready:
            ready += 1
        if ready > self._launched:
            self._launch(ready)

    def _launch(self, count: int) -> None:
        """Launch the buckets up to a number of them; the last ones may leave with the header, which follows."""
        if self._launched == 0 and count:  # a receiver that is ready spares the sender a round trip
            for handler in self._handlers:
                handler.post()
            self._headers.post()
        for number in range(self._launched, count):
            self._context.transport.more_follows = count == len(self._handlers) or number + 1 < count
            self._handlers[number].launch()
            self._launched = number + 1

    def finish(self, request: StepRequest) -> list[StepHeader]:
        """Send what is left, wait for the other sites, and write ``.grad``.

        Args:
            request: what this site asks for.

        Returns:
            The headers of all sites, by rank.

        Raises:
            NonFiniteError: if some site's gradient holds NaN or Inf; no ``.grad`` has been written then.
        """
        context = self._context
        context.deferral = request.deferral
        self._send_rest()
        header = self._header(request)
        context.transport.more_follows = context.transport.rounds.elastic  # the end of the round
        self._headers.send(header)
        context.transport.more_follows = False
        context.transport.rounds.close(request.admits, idle=not header.samples)
        attached = [] if request.attached is None else request.attached.names
        receive = partial(self._headers.receive, len(attached), request.counts)
        # Where sites may be absent, all has arrived, and who has a part in the step is clear before sums are made.
        for handler in self._handlers if context.transport.rounds.elastic else ():
            handler.inspect()
        known = receive() if context.transport.rounds.elastic or context.options.clip_sites is not None else []
        self._clip(known)
        for handler in self._handlers:  # the first are decoded while the last are still on their way
            handler.receive()
        for number in range(self._rounds):
            for handler in self._handlers:
                if number < handler.rounds:
                    handler.proceed(number)
        headers, late = self._exchange_late(known or receive())
        sums = self._agreed(headers, late)
        self._check_sent(headers, sums)
        write = _counts(headers)
        write_gradients([(parameter, value) for _, parameter, value in sums if write])
        absent = context.transport.rank in context.transport.rounds.absent
        digests = [each.deferred for rank, each in enumerate(headers) if rank not in context.transport.rounds.absent]
        compare_digests(request.deferral, header.deferred, digests)
        keep = write and all(map(_FINITE, headers)) and not absent
        context.take(headers)
        for handler in self._handlers:
            handler.finish(headers, write, keep)
            handler.missing = len(handler.units)
        if absent:
            self._clear_own(headers)
        self._asks_to_stop = header.stop and absent
        if keep:
            context.follow(headers, context.transport.rank)
        self._launched = 0
        self._deal()
        self._end_rounds(request)
        context.complete_payloads.clear()
        context.faults.clear()
        self._raise_faults(headers, request.step, attached)
        if request.admits and not any(map(_SAMPLES, headers)):  # not in an exchange that ends a plan
            self._write_zeros(headers)
        return headers

    def _end_rounds(self, request: StepRequest) -> None:
        """End the rounds of a step, after the exchanges that belong to it besides those of the gradients."""
        if request.before_end is not None:
            with suppress(DroppedError):  # then this site gets what it needs with the state of another one
                request.before_end(request.step)
        self._context.transport.rounds.end_step()

    def _raise_faults(self, headers: Sequence[StepHeader], step: int, attached: Sequence[str]) -> None:
        """Follow the norms that the headers state, and raise the error of a fault in one of them."""
        faults = [*map(_FAULT, headers)]
        earlier = 0 < max(faults) <= Fault.ATTACHED  # stated in headers, as are the norms of the step before then
        self._outsized.follow([header.norm for header in headers], step - earlier)
        if any(faults):
            names, explanation = [unit.name for unit in self._units], self._outsized.explain(step)
            raise_fault(headers, names, self._context.transport.sites, attached, explanation)

    def _deal(self) -> None:
        """Let sites that are present own the layers of absent ones, from the next step on."""
        context, before = self._context, self._context.owners
        if not before or context.transport.rounds.absent == self._dealt_without:
            return
        self._dealt_without = context.transport.rounds.absent
        context.owners = deal(before, self._assigned, self._sizes, context.transport.rounds.present)
        moved = sum(owner != before[name] for name, owner in context.owners.items())
        if moved:
            _log.info("%d layers have other owners; what the last ones have kept of them is dropped", moved)
        for handler in self._handlers:
            handler.deal()

    def _clip(self, headers: Sequence[StepHeader]) -> None:
        """Clip the sites' gradients by the norms in their headers; mark the sums that have to be exchanged again."""
        context = self._context
        context.headers, context.norms, context.limit = headers, (), math.inf
        multiple = context.options.clip_sites
        if multiple is None or not all(map(attrgetter("finite"), headers)):
            return
        context.norms = [header.norm if header.samples else 0.0 for header in headers]
        context.limit = limit_of(context.norms, multiple)
        for rank, header in enumerate(headers):
            for handler in self._handlers if context.factor(rank) < 1 else ():
                for position in handler.positions if handler.blind else ():
                    header.dense[position] |= header.present[position]

    def _agreed(self, headers: Sequence[StepHeader], late: Sequence[_Late]) -> list[_Sum]:
        """Return the agreed gradients that no handler sends, clipped by what has arrived."""
        self._measure(headers, late)
        return [(name, parameter, bucket.wait(self._context.shares)[0]) for name, parameter, bucket in late]

    def _measure(self, headers: Sequence[StepHeader], late: Sequence[_Late]) -> None:
        """Clip by what has arrived of a site where that is larger than its header states; the same at all sites."""
        context = self._context
        if not context.norms or not _counts(headers):
            return
        context.headers, samples = headers, sum(map(_SAMPLES, headers))
        parts = [handler.squares() for handler in self._handlers]
        parts += [context.without_weights(bucket.squares(), samples) for *_, bucket in late]
        squares = zip_longest(*filter(None, parts), fillvalue=0.0)
        found = [
            math.sqrt(sum(each)) if header.samples else 0.0 for each, header in zip(squares, headers, strict=False)
        ]
        larger = [rank for rank, norm in enumerate(found) if not norm <= TRUSTED * context.norms[rank]]
        if not larger:
            return
        for rank in larger:
            headers[rank].norm = found[rank]
        context.norms = [header.norm if header.samples else 0.0 for header in headers]
        context.limit = limit_of(context.norms, context.options.clip_sites or math.inf)
        for handler in self._handlers:
            handler.weigh_again()

    def _check_sent(self, headers: Sequence[StepHeader], late: Sequence[_Sum]) -> None:
        """Record a fault in the headers, the same at all sites, where what has arrived or been merged is not finite."""
        if not self._context.options.check_finite or not _counts(headers):
            return
        counted = next(rank for rank, header in enumerate(headers) if header.samples)
        found = [each for handler in self._handlers for each in handler.not_finite()]
        extents = [extent(value) for *_, value in late]
        found += [(None, name) for (name, *_), each in zip(late, extents, strict=True) if not math.isfinite(each)]
        size = sum(extents) + sum(handler.extent for handler in self._handlers)
        self._norm = 0.0
        if not size <= OUTSIZED * self._context.extent:
            self._measure_again(headers)
            found += [(None, name) for handler in self._handlers for name in handler.overflown()]
        if math.isfinite(size):
            self._context.extent = max(size, FORGET * self._context.extent)
        for rank, name in sorted(found, key=lambda each: each[0] is None):  # those that are named first
            header = headers[counted if rank is None else rank]
            if header.samples and header.finite and _counts(headers):
                header.fault, header.finite = Fault.SUMMED if rank is None else Fault.SENT, False
                header.culprit = self._context.positions[name]
        if found and not _counts(headers):
            return
        if spoilt := [name for handler in self._handlers for name in handler.spoilt(headers)]:
            position = min(self._context.positions[name] for name in spoilt)
            merged = headers[self._context.owners[self._units[position].name].rank]
            merged.fault, merged.finite, merged.culprit = Fault.MERGED, False, position

    def _measure_again(self, headers: Sequence[StepHeader]) -> None:
        """State in the headers the norms that have arrived, where the agreed gradient is out of all proportion."""
        context, own = self._context, self._context.transport.rank
        if context.norms:
            return
        context.headers, context.precise = headers, True
        found = [0.0] * len(headers)
        for handler in self._handlers:
            squares = handler.measured()
            found = [one + other for one, other in zip_longest(found, squares, fillvalue=0.0)]
            self._norm += squares[own] if squares else total_of(handler.own_squares())
        self._norm, context.precise = _norm_of(self._norm), False
        for header, square in zip(headers, found, strict=True):
            header.norm = max(header.norm, _norm_of(square) if header.samples else 0.0)

    def _clear_own(self, headers: Sequence[StepHeader]) -> None:
        """Clear the gradients of units of which only this site has one, where it has no part in the step."""
        for position, unit in enumerate(self._units):
            if not any(header.present[position] or header.dense[position] for header in headers):
                for parameter in unit.parameters.values():
                    parameter.grad = None

    def _write_zeros(self, headers: Sequence[StepHeader]) -> None:
        """Write zeros where no site has samples, as autograd does in one process for batches without rows.

        Momentum and weight decay are applied to zeros, and not where ``.grad`` is None. What backward has left at this
        site has no weight.
        """
        for position, unit in enumerate(self._units):
            if any(header.present[position] or header.dense[position] for header in headers):
                sparse = isinstance(unit, FactorUnit) and unit.form is not None and unit.form.sparse
                for parameter in unit.parameters.values():
                    if sparse or (parameter.grad is not None and parameter.grad.is_sparse):
                        # SparseAdam refuses dense gradients
                        nowhere = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
                        parameter.grad = torch.sparse_coo_tensor(nowhere, parameter[:0].detach(), parameter.shape)
                    else:
                        gradient_room(parameter, parameter.shape).zero_()

    def _send_rest(self) -> None:
        """Fill and launch what backward has left, and account for what has changed since."""
        for handler in self._handlers[self._launched :]:
            for unit in handler.units:
                if not unit.sent:
                    self.arrive(unit, launches=False)
        self._launch(len(self._handlers))
        for handler in self._handlers:
            handler.add_late()
        for unit in self._factored:
            unit.sent_factors = None

    def _header(self, request: StepRequest) -> StepHeader:
        faults, check_finite = self._context.faults, self._context.options.check_finite
        header = StepHeader.idle(request.step, self._version, len(self._units))
        header.samples, header.stop = self._context.samples(), request.stop or self._asks_to_stop
        header.noise_every, header.settings = request.noise_every, request.settings
        header.digest, header.batch = request.digest, request.batch
        if self._context.deferral is not None:
            header.deferred = self._context.deferral.digest((unit.name, unit.lead) for unit in self._units)
        header.finite = not faults.entries
        if header.samples and header.finite and self._context.transport.world_size > 1 and self._context.measures:
            late = [unit for unit in self._units if unit.dense and not self._handler_of[unit.name].repeats]
            squares = [square for handler in self._handlers for square in handler.own_squares()]
            squares += [sum_of_squares([each.grad for each in unit.parameters.values()]) for unit in late]
            header.norm = _norm_of(total_of(squares))
        broken = [(Fault.CHAIN_BROKEN, unit.name) for unit in self._units if unit.broken]
        if broken or (faults.entries and check_finite):
            header.fault, name = broken[0] if broken else faults.first
            header.culprit = self._context.positions[name]
        elif request.attached is not None and (culprit := request.attached.first_not_finite()) is not None:
            header.finite = False
            if check_finite:
                header.fault, header.culprit = Fault.ATTACHED, culprit
        if not header.finite:
            header.norm = self._norm
        for handler in self._handlers:
            found = zip(handler.units, handler.positions, handler.present(), handler.extra_rows(), strict=True)
            for unit, position, present, extra in found:
                header.present[position] = present
                if extra:
                    header.extra_rows[position] = extra
                if unit.dense or unit.void:
                    header.dense[position] = unit.dense and (handler.repeats or unit.has_gradient)
                    header.void[position] = unit.void and not handler.repeats
        return header

    def _exchange_late(self, headers: list[StepHeader]) -> tuple[list[StepHeader], list[_Late]]:
        """Exchange what the payloads had no room for, and what has changed since they were launched.

        Where a site leaves meanwhile, it counts as idle, and the others repeat all sums, which contain its share.

        Args:
            headers: the headers of all sites, by rank.

        Returns:
            The headers that count, and the gradients that no handler sends.
        """
        transport, units = self._context.transport, len(self._units)
        sums: list[_Late] = []
        exchanged = any(map(attrgetter("launches_results"), self._handlers))
        left, first = _counts(headers) and any(map(attrgetter("unsettled"), self._handlers)), True
        self._context.as_launched = not left and as_launched(headers)
        while exchanged or not self._context.as_launched:
            sums, before = [], transport.rounds.absent
            if _counts(headers):
                exchanged |= self._repeat(headers, everything=left)
                sums = [*self._sum_dense(headers)]
                exchanged |= bool(sums)
            if first:
                for handler in self._handlers:
                    exchanged |= handler.fetch_late(headers)
            if exchanged:
                transport.rounds.close()
            settled = not exchanged or False not in [handler.confirm() for handler in self._handlers]
            if transport.rounds.absent == before and settled:
                break
            own = headers[transport.rank]
            gone = StepHeader.idle(own.step, own.version, units, void=True)
            headers = [gone if rank in transport.rounds.absent - before else each for rank, each in enumerate(headers)]
            self._clip(headers)
            exchanged, left, first, self._context.as_launched = False, True, False, False
        return headers, sums

    def _repeat(self, headers: Sequence[StepHeader], everything: bool) -> bool:
        """Exchange again, on all sites, the buckets that have changed at some site since they were launched.

        Args:
            headers: the headers of all sites.
            everything: whether to exchange all of them.

        Returns:
            Whether there were any.
        """
        if not everything and not any(True in header.dense for header in headers):
            return False
        positions, repeated = self._context.positions, False
        if everything:
            repeated = True in [handler.launch_again() for handler in self._handlers]
        for handler in self._handlers:
            void = any(header.dense[positions[unit.name]] for header in headers for unit in handler.units)
            if handler.repeats and (void or everything):
                handler.repeat()
                repeated = True
        return repeated

    def _sum_dense(self, headers: Sequence[StepHeader]) -> Iterator[_Late]:
        """Sum gradients that no handler sends, on all sites if any has one; where sites are clipped, gather them.

        Args:
            headers: the headers of all sites.

        Yields:
            The gradients, which have arrived.
        """
        if not any(True in header.dense or True in header.void for header in headers):
            return
        transport = self._context.transport
        kind = partial(GatheredBucket, once=True) if self._context.norms else AllReducedBucket
        own, absent = headers[transport.rank], transport.rounds.absent
        weight = own.samples / sum(header.samples for header in headers)
        present = [header for rank, header in enumerate(headers) if rank not in absent]
        for position, unit in enumerate(self._units):
            handler = self._handler_of[unit.name]
            dense = any(header.dense[position] for header in headers)
            void = handler.resends_as_gradients and any(header.void[position] for header in present)
            void &= dense or any(header.present[position] for header in present)  # else no site has a gradient
            if handler.repeats or not (void or dense):
                continue
            if void:
                handler.add_sent(unit)
            for parameter in unit.parameters.values():
                bucket: SummedBucket = kind([parameter.numel()], transport, parameter.dtype)
                bucket.fill(0, parameter.grad, weight)
                bucket.launch()
                if not bucket.squares():  # which wait, too; shares follow from all squares
                    bucket.wait()
                yield unit.name, parameter, bucket

    def close_plan(self, step: int, version: int) -> None:
        """Exchange an empty step under the number of the next plan, to learn whether the other sites have one too.

        Args:
            step: number of the step.
            version: number of the next plan.

        Raises:
            MismatchError: if they have not.
        """
        self._version = version
        self._context.samples = lambda: 0
        self.finish(StepRequest(step, admits=False))

    # Costs and state

    def room(self, unit: Unit) -> int:
        """Return how many rows of a unit this site sends in a step; 0 for units without rows."""
        return self._handler_of[unit.name].room(unit)

    def sent_bytes(self, unit: Unit) -> int:
        """Return how many bytes this site hands to the transport for a unit in a step."""
        return self._handler_of[unit.name].sent_bytes(unit)

    @property
    def expected(self) -> tuple[float, float]:
        """This site's weight in the mean in the next step, and the scale of sums, about."""
        return self._context.share, self._context.scale

    @expected.setter
    def expected(self, values: tuple[float, float]) -> None:
        self._context.share, self._context.scale = values

    @property
    def extent(self) -> float:
        """Size of the agreed gradients of the last steps; the same at all sites."""
        return self._context.extent

    @extent.setter
    def extent(self, value: float) -> None:
        self._context.extent = value

    def layout(self) -> list[list[list[int]]]:
        """Return the room in the buckets, by handler and slot; the same at all sites."""
        return [handler.layout() for handler in self._handlers]

    def restore(self, layout: Sequence[Sequence[Sequence[int]]]) -> None:
        """Restore what `layout` returned at another site.

        Raises:
            MismatchError: if it does not fit.
        """
        if len(layout) != len(self._handlers):
            raise MismatchError(f"the other sites have {len(layout)} buckets where this one has {len(self._handlers)}")
        for handler, rooms in zip(self._handlers, layout, strict=True):
            handler.restore(rooms)
        self._dealt_without = None  # the owners are those of the other site

    def share_state(self) -> None:
        """Replace state that has to be the same everywhere by that of rank 0; all sites must call it."""
        for handler in self._handlers:
            handler.share_state()

    def rounding(self) -> ErrorFeedback:
        """Return copies of the rounding errors that the next step adds."""
        kept = ErrorFeedback(True)
        for handler in self._handlers:
            for name, lost in handler.rounding().items():
                kept.of(name, lost).copy_(lost)
        return kept

    def add_rounding(self, kept: ErrorFeedback) -> None:
        """Restore rounding errors that `rounding` of this or of another reducer has returned."""
        for handler in self._handlers:
            for name, lost in handler.rounding().items():
                lost.copy_(kept.of(name, lost))


def _norm_of(square: float) -> float:
    """Return a norm as step headers state it: that of values out of range is the largest number."""
    return min(sys.float_info.max, math.sqrt(square))


def _counts(headers: Sequence[StepHeader]) -> bool:
    """Return whether a step has samples and no fault, so that gradients are written."""
    return any(map(_SAMPLES, headers)) and not any(map(_FAULT, headers))
