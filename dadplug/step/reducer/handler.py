"""Bucket handlers: a bucket and the units that share it, from the arrival of their gradients to the agreed ones.

A step header has the information about a step that a site sends to all others, so that they can interpret its payloads.
Faults are reported in it.
"""

from __future__ import annotations

import itertools
import math
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ...errors import MismatchError
from ...exchange import Gather, Transport
from ...exchange.factor_buckets import FactorPayload
from ...exchange.fields import COUNT, NUMBER, check_all, check_fields, invalid, minority
from ...exchange.wire import WireFormat, wire_format
from ...options import Options
from ...support.registry import Registry
from ...support.schedules import Decoding
from ..fused.products import Deferral
from ..methods import Method
from ..methods.base import GradientPath
from ..units.base import Unit
from .clipping import MEASURED_EVERY
from .faults import Fault, FaultLog
from .owners import Owners, Ownership

_Result = TypeVar("_Result")


def _as_integer(norm: float) -> int:
    """Return the bits of a float that is not negative, which have its order."""
    return int.from_bytes(struct.pack(">d", norm), "big")


_HEAD = 13  # integers before those of the units
_PRESENT, _DENSE, _VOID = 1, 2, 4  # bits of a unit's flags
_RANGES = {
    "step": (0, NUMBER),
    "version": (0, COUNT),
    "samples": (0, COUNT),
    "stop": (0, 1),
    "fault": (0, Fault.ATTACHED),  # others are not sent
    "culprit": (0, COUNT),
    "finite": (0, 1),
    "noise_every": (0, COUNT),
    "deferred": (0, NUMBER),
    "settings": (0, NUMBER),
    "digest": (0, NUMBER),
    "batch": (0, COUNT),
    "norm": (0, _as_integer(sys.float_info.max)),
}
_MOST_SAMPLES = 64
"""How many times what a site of this run has stated for a step a site may weigh in a later one."""


@dataclass
class StepHeader:
    """Header of one site for one step.

    Attributes:
        step: number of the step.
        version: version of the plan, which changes when parameters are frozen or freed.
        samples: the site's weight in the mean.
        stop: whether the site asks all to stop after this step.
        fault: kind of the fault to report; `Fault.NONE` for none.
        culprit: index of the unit at fault; for `Fault.ATTACHED`, of the attached parameter.
        finite: whether no gradient of the site holds NaN or Inf, as far as that has been checked.
        noise_every: number of steps after which the site asks all to estimate the noise of the gradient; 0 for never.
        deferred: digest of the weights whose gradients the site would not form, see `fused.Deferral`; 0 for none.
        settings: digest of the optimizers' settings in the last step; 0 for none.
        digest: of the first batch, or of the weights, see `dadplug.step.model_sync.sameness`; 0 for none.
        batch: samples of the site in the step; 0 where they are not known.
        norm: norm of the gradient that the site sends, see `clipping`; 0.0 for none. In a step in which that is not
            finite, the norm in the last step, where the agreed gradient of that was out of all proportion.
        present: by unit, whether the site has a gradient for it.
        dense: by unit, whether the site has a gradient for it that its bucket does not carry; with a handler that can
            repeat its exchange, whether the unit's payload is void, since its gradient has changed.
        void: by unit, whether the rows that its bucket carries have been discarded since.
        extra_rows: by unit, rows that its bucket had no room for, or that came late; 0 for a dense unit.
    """

    step: int
    version: int
    samples: int
    stop: bool = False
    fault: Fault = Fault.NONE
    culprit: int = 0
    finite: bool = True
    noise_every: int = 0
    deferred: int = 0
    settings: int = 0
    digest: int = 0
    batch: int = 0
    norm: float = 0.0
    present: list[bool] = field(default_factory=list)
    dense: list[bool] = field(default_factory=list)
    void: list[bool] = field(default_factory=list)
    extra_rows: list[int] = field(default_factory=list)

    @classmethod
    def idle(cls, step: int, version: int, units: int, void: bool = False) -> StepHeader:
        """Return the header of a site that contributes nothing to a step.

        Args:
            step: number of the step.
            version: version of the plan.
            units: number of units.
            void: whether the site has sent payloads before it left.
        """
        none = [False] * units
        return cls(step, version, 0, present=none, dense=[*none], void=[void] * units, extra_rows=[0] * units)

    def pack(self) -> list[int]:
        """Return the header as integers: 13 of the step, then flags and rows of the units."""
        flags = [
            _PRESENT * present + _DENSE * dense + _VOID * void
            for present, dense, void in zip(self.present, self.dense, self.void, strict=True)
        ]
        head = [self.step, self.version, self.samples, self.stop, self.fault, self.culprit, self.finite]
        further = [self.noise_every, self.deferred, self.settings, self.digest, self.batch, _as_integer(self.norm)]
        return [*map(int, head), *further, *flags, *self.extra_rows]

    @classmethod
    def unpack(cls, integers: Sequence[int], sender: str = "this site", attached: int = 0) -> StepHeader:
        """Return the header that `pack` has made integers of.

        Args:
            integers: the integers.
            sender: the site that has sent them.
            attached: number of attached parameters.

        Raises:
            MismatchError: if they are none.
        """
        units = (len(integers) - _HEAD) // 2
        flags, extra = integers[_HEAD : _HEAD + units], list(integers[_HEAD + units :])
        check_fields("step header", sender, dict(zip(_RANGES, integers, strict=False)), _RANGES)
        places = attached if integers[4] == Fault.ATTACHED else units
        if integers[4] and integers[5] >= places:
            raise invalid("step header", sender, f"culprit is {integers[5]} of {places}")
        check_all("step header", sender, (min(flags, default=0), max(flags, default=0)), 0, _PRESENT | _DENSE | _VOID)
        check_all("step header", sender, (min(extra, default=0), max(extra, default=0)), 0, COUNT)
        present, dense, void = [[*map(bool, map(bit.__and__, flags))] for bit in (_PRESENT, _DENSE, _VOID)]
        step, version, samples, stop, fault, culprit, finite, noise, *digests = integers[:_HEAD]
        head = step, version, samples, bool(stop), Fault(fault), culprit, bool(finite), noise
        deferred, settings, digest, batch, bits = digests
        (norm,) = struct.unpack(">d", bits.to_bytes(8, "big"))
        return cls(*head, deferred, settings, digest, batch, norm, present, dense, void, extra)


class HeaderExchange:
    """Exchange of step headers between all sites.

    Args:
        units: number of units.
        transport: the transport.
        reference: samples of all sites in a step, about, as they have stated at the start.
        check_finite: whether NaN and Inf are faults.
    """

    def __init__(self, units: int, transport: Transport, reference: int, check_finite: bool) -> None:
        self._transport = transport
        self._units = units
        self._reference, self._check_finite = reference, check_finite
        size = _HEAD + 2 * units
        self._gather: Gather = transport.gather([size] * transport.world_size, torch.int64)

    def post(self) -> None:
        """Prepare to receive."""
        self._gather.post()

    def send(self, header: StepHeader) -> None:
        """Send this site's header."""
        self._gather.payload.copy_(torch.tensor(header.pack(), dtype=torch.int64))
        self._gather.launch()

    def receive(self, attached: int = 0, counts: bool = True) -> list[StepHeader]:
        """Wait for the headers of all sites.

        Where sites may be absent, one whose header is invalid has no part in the step, as all sites find.

        Args:
            attached: number of attached parameters.
            counts: whether samples are counted; otherwise a site has 0 or 1.

        Returns:
            The headers, by rank; those of absent sites are the ones of idle sites.

        Raises:
            MismatchError: if a header is invalid, or the sites are not at the same step of the same plan.
        """
        sites, transport = self._transport.sites, self._transport
        headers: dict[int, StepHeader] = {}
        for rank, integers in enumerate(self._gather.wait()):
            if rank not in transport.rounds.absent:
                try:
                    header = headers[rank] = StepHeader.unpack(integers.tolist(), sites[rank], attached)
                    if self._check_finite and not header.finite and header.fault == Fault.NONE:
                        del headers[rank]  # such a step would count, without what depends on finite gradients
                        raise invalid("step header", sites[rank], "finite is 0 without a fault")
                except MismatchError as error:
                    transport.rounds.leave_out(rank, error)
        for rank in [*headers]:
            others = max([header.samples for other, header in headers.items() if other != rank], default=0)
            most = _MOST_SAMPLES * max(self._reference, others) if counts else 1
            if others and headers[rank].samples > most:
                why = f"samples is {headers.pop(rank).samples}, where 0 to {most} is possible in this run"
                transport.rounds.leave_out(rank, invalid("step header", sites[rank], why))
        if not headers:
            raise MismatchError("no site has sent a valid step header")
        apart = minority({rank: (header.step, header.version) for rank, header in headers.items()})
        for rank in apart if transport.rounds.elastic else ():
            why = f"it is at step {headers[rank].step} of plan {headers.pop(rank).version}, and most sites are not"
            transport.rounds.leave_out(rank, invalid("step header", sites[rank], why))
        lowest, first = next(iter(headers.items()))
        for rank, other in headers.items():
            if other.step != first.step:
                raise MismatchError(
                    f"{sites[lowest]} is at step {first.step} and {sites[rank]} at step {other.step}: every site must "
                    "call synchronize() equally often; a site that has run out of data calls idle()"
                )
            if other.version != first.version:
                raise MismatchError(
                    f"in step {other.step}, {sites[rank]} trains other parameters than {sites[lowest]}: freeze and "
                    "free parameters on all sites in the same step"
                )
        idle = StepHeader.idle(first.step, first.version, self._units)
        return [headers.get(rank, idle) for rank in range(transport.world_size)]


def as_launched(headers: Sequence[StepHeader]) -> bool:
    """Return whether what all sites have launched is all of a step: nothing has come late, changed or gone since."""
    return True not in [True in each.dense or True in each.void or any(each.extra_rows) for each in headers]


FORGET = 0.9  # in each step, of the largest weights so far


@dataclass
class HandlerContext:
    """Common state of the handlers of a reducer.

    Attributes:
        transport: the transport.
        method: the method.
        options: the options.
        samples: returns the samples that this site's gradients stand for so far in the step.
        reference: samples of all sites in a step, about: sums are of gradients times samples over this number, which
            keeps them near the size of a gradient while the samples of the other sites are not known.
        positions: position of each unit in the step headers, by its name.
        owners: the sites that merge each unit that has an owner, by its name.
        faults: the faults of this site in the step.
        complete_payloads: payloads that have arrived in this step, with what the sites did not send, by name of the
            unit and rank; kept where methods recompute deltas from them.
        rotation: numbers by which handlers distribute work over the processes of a node, in the order in which the
            handlers are built.
        deferral: which weights' gradients may stay products in the step; None for those of none.
        given: objects for handlers that other rooms register, by path.
        decoding: sizes of the blocks in which gradients are formed, the same at all sites.
        share: this site's largest weight in the mean of the last steps, about; 0.0 before the first.
        scale: what sums were multiplied by to make means in the last steps, at most, about; of a site's own state.
        checks_finite: whether gradients are checked for NaN and Inf, since these are an error or would damage state.
        as_launched: whether what all sites have launched in this step is all of it, as the headers say.
        present: by unit, whether a site has a gradient, as the headers that count say.
        total: samples of all sites, as they say.
        headers: the headers of all sites, by rank, where they are known before anything is received.
        norms: the norms of all sites' gradients in the step, by rank, where they are clipped.
        limit: the norm to which they are clipped; infinity for none.
        measures: whether the norm of what this site sends in the step is stated in its header.
        extent: size of the agreed gradients of the last steps, see `BucketHandler.extent`; 0.0 before the first.
        precise: whether norms are computed in double precision.
        weighed_in: number of the backward pass in which the method has been given its weight; -1 for none.
    """

    transport: Transport
    method: Method
    options: Options
    samples: Callable[[], int]
    reference: int
    positions: Mapping[str, int]
    owners: Owners = field(default_factory=dict)
    decoding: Decoding = field(default_factory=Decoding)
    faults: FaultLog = field(default_factory=FaultLog)
    complete_payloads: dict[str, list[FactorPayload]] = field(default_factory=dict)
    rotation: Iterator[int] = field(default_factory=itertools.count)
    deferral: Deferral | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    share: float = 0.0
    scale: float = 1.0
    checks_finite: bool = field(init=False)
    as_launched: bool = False
    present: Sequence[bool] = ()
    total: int = 0
    headers: Sequence[StepHeader] = ()
    norms: Sequence[float] = ()
    limit: float = math.inf
    measures: bool = True
    extent: float = 0.0
    precise: bool = field(init=False)
    weighed_in: int = -1

    def __post_init__(self) -> None:
        keeps_rest = wire_format(self.options.wire_of(GradientPath.LOWRANK)).quantised
        self.precise = self.options.clip_sites is not None
        self.checks_finite = self.options.check_finite or self.method.traits.keeps_state or keeps_rest

    def factor(self, rank: int, found: float = 0.0) -> float:
        """Return the factor that clips the gradient of a site; 1.0 where it is not clipped.

        Args:
            rank: the site.
            found: norm of what has arrived of it.
        """
        norm = max(self.norms[rank], found) if self.norms else 0.0
        return self.limit / norm if norm > self.limit else 1.0

    @property
    def shares(self) -> list[float]:
        """Factors that clip what has been gathered, by rank; 0.0 for a site that states no samples."""
        if not self.norms:
            return [1.0] * self.transport.world_size
        return [self.factor(rank) if header.samples else 0.0 for rank, header in enumerate(self.headers)]

    def without_weights(self, squares: Sequence[float], whole: int) -> list[float]:
        """Return squared norms of gradients, by rank, from those of weighted ones.

        Args:
            squares: the squared norms.
            whole: samples over which the sites' own make their weights.
        """
        samples = [header.samples / whole for header in self.headers]
        return [square / weight**2 if weight else 0.0 for square, weight in zip(squares, samples, strict=False)]

    @property
    def expected_weight(self) -> float:
        """The weight in the mean that this site's gradients will have, about; 0.0 for none.

        It is rather too large: otherwise the step would apply more of what was kept than there is.
        """
        samples = self.samples()
        return min(1.0, max(samples / self.reference, self.share)) if samples else 0.0

    def take(self, headers: Sequence[StepHeader]) -> None:
        """Take what the headers that count say to all handlers, for the end of the step and the next one."""
        self.present = [*map(any, zip(*map(attrgetter("present"), headers), strict=True))]
        self.total = sum(map(attrgetter("samples"), headers))
        self.measures = self.options.clip_sites is not None or (headers[0].step + 1) % MEASURED_EVERY == 0

    def follow(self, headers: Sequence[StepHeader], rank: int) -> None:
        """Follow the weights of the sites, at the end of a step that some site has a weight in."""
        self.share = max(headers[rank].samples / self.total, FORGET * self.share)
        self.scale = max(self.reference / self.total, FORGET * self.scale)

    def wire(self, unit: Unit) -> WireFormat:
        """Return the format in which a unit's gradients are sent."""
        return unit.wire(self.options)


class BucketHandler(ABC):
    """A bucket and the units that fill it; one subclass for each path that a gradient can take.

    In each step the reducer calls `fill` for each unit, `launch` once the handler is `ready`, and after backward, for
    all handlers, `add_late`, `receive`, `proceed`, perhaps `repeat`, `fetch_late`, and `finish`.

    Args:
        units: the units that share the bucket, in the order in which backward is expected to reach them.
        context: what the handlers of a reducer share.

    Attributes:
        units: the units.
        positions: their positions in the step headers.
        missing: number of units that have not been filled in this step; the reducer counts it down.
    """

    bucket_mb: ClassVar[float] = 4.0
    """Payload at which a bucket is full by default, in MB."""
    repeats: ClassVar[bool] = False
    """Whether `repeat` can exchange anew what is void in a payload that has been sent."""
    fills: ClassVar[bool] = True
    """Whether `fill` puts each unit in as its gradient arrives; otherwise `on_filled` puts in all, and counts bytes."""
    rounds: ClassVar[int] = 0
    """Number of calls of `proceed` in a step."""
    resends_as_gradients: ClassVar[bool] = False
    """Whether all sites send a unit's gradient as it is once one of them has discarded the rows that it sent; what
    `add_sent` of the other sites adds to ``.grad`` is part of it then."""

    def __init__(self, units: Sequence[Unit], context: HandlerContext) -> None:
        self.units: Sequence[Unit] = list(units)
        self.context = context
        self.dtype = units[0].lead.dtype
        self.missing = len(self.units)
        self._slots = {unit.name: slot for slot, unit in enumerate(units)}
        self._portions = dict.fromkeys(self._slots, 1 / len(self.units))
        self.positions = [context.positions[unit.name] for unit in units]

    @contextmanager
    def timing(self, kind: str, unit: Unit | None = None) -> Iterator[None]:
        """Count the time inside on the meter, for one unit or in equal parts for all; a context manager.

        Args:
            kind: ``"encode"``, ``"decode"`` or ``"wait"``.
            unit: the only unit; None for all.
        """
        start, profiled = time.perf_counter(), torch.autograd._profiler_enabled()
        name = (self.units[0] if unit is None else unit).name
        with torch.profiler.record_function(f"dadplug {kind} {name}") if profiled else nullcontext():
            yield
        self._count(kind, unit, time.perf_counter() - start)

    def timed(self, kind: str, unit: Unit | None, function: Callable[..., _Result], *args: Any) -> _Result:
        """Call a function, and count its time as `timing` does, by fewer calls."""
        if torch.autograd._profiler_enabled():
            with self.timing(kind, unit):
                return function(*args)
        start = time.perf_counter()
        result = function(*args)
        self._count(kind, unit, time.perf_counter() - start)
        return result

    def _count(self, kind: str, unit: Unit | None, seconds: float) -> None:
        parts = self._portions if unit is None else {unit.name: 1.0}
        self.context.transport.traffic.shared.append((f"{kind}_seconds", parts, seconds))

    # Payload sizes

    @classmethod
    def full_at(cls, transport: Transport, whole: float) -> float:
        """Return the payload, in MB, at which a bucket is full by default.

        Args:
            transport: the transport.
            whole: payload of all units of the kind, in MB.
        """
        return cls.bucket_mb

    @classmethod
    def payload_size(cls, unit: Unit, rows: int, method: Method) -> int:
        """Return about how many elements of a unit are sent.

        Args:
            unit: the unit.
            rows: rows that it is expected to send, where it sends rows.
            method: the method.
        """
        return unit.lead.numel()

    @classmethod
    def payload_bytes(
        cls, unit: Unit, method: Method, wire: WireFormat, transport: Transport, gathered: bool = True
    ) -> int:
        """Return how many bytes a site hands to the transport for a unit in a step.

        Args:
            unit: the unit.
            method: the method.
            wire: format of the payload.
            transport: the transport.
            gathered: whether payloads are gathered, and not summed on their way.
        """
        rate = transport.copies if gathered else transport.ring
        return int(rate * cls.payload_size(unit, 1, method) * wire.itemsize)

    @abstractmethod
    def sent_bytes(self, unit: Unit) -> int:
        """Return how many bytes this site hands to the transport for a unit in a step."""

    def room(self, unit: Unit) -> int:
        """Return how many rows of a unit this site sends in a step; 0 for units without rows."""
        return 0

    # Norms

    extent = 0.0
    """Size of what has arrived in this step, as `not_finite` has found by the pass that it takes: to be compared with
    that of other steps, and NaN or infinite for values that may not be finite."""
    blind = False
    """Whether only sums over sites arrive, so that a site has to clip its gradient itself, when the exchange is
    repeated."""

    def own_squares(self) -> Sequence[Tensor]:
        """Return squared norms of the parts of this site's gradient that it sends, without its weight."""
        return ()

    def squares(self) -> Sequence[float]:
        """Return, by rank, the squared norms of what has arrived of the sites' gradients; empty where it is not known.

        The same at all sites.
        """
        return ()

    def measured(self) -> Sequence[float]:
        """Return what `squares` does, as far as this site can find it; the sites may find different numbers."""
        return () if self.context.transport.nodes is not None else self.squares()

    def overflown(self) -> list[str]:
        """Return the names of units whose agreed gradients are not finite though all of which they are made is so."""
        return []

    def weigh_again(self) -> None:  # noqa: B027  (for those with `squares`)
        """Let what has arrived have the weights that the context has now."""

    # A step

    @property
    def ready(self) -> bool:
        """Whether the bucket can be launched."""
        return not self.missing

    def post(self) -> None:  # noqa: B027  (not all receive in the background)
        """Prepare to receive."""

    def fill(self, unit: Unit) -> int:
        """Put a unit's gradient, or its absence, into the bucket; return the bytes that are sent of it."""
        raise NotImplementedError  # `on_filled` puts in those of all units

    def on_filled(self) -> None:  # noqa: B027  (most wait for the launch)
        """Called when all units have been filled."""

    @abstractmethod
    def launch(self) -> None:
        """Send the bucket."""

    @abstractmethod
    def add_late(self) -> None:
        """Account for gradients that have arrived, changed or gone after their unit had been filled."""

    @abstractmethod
    def present(self) -> list[bool]:
        """Return, by unit, whether this site has a gradient."""

    def extra_rows(self) -> list[int]:
        """Return, by unit, how many of this site's rows are sent in a second round."""
        return [0] * len(self.units)

    def inspect(self) -> None:  # noqa: B027  (sums of numbers have nothing that can be invalid)
        """Wait for the bucket, and leave out the sites whose payloads are invalid, where sites may be absent.

        All sites call it once the first round of the step is closed, before they count the sites that are there.
        """

    @abstractmethod
    def receive(self) -> None:
        """Wait for the bucket."""

    def proceed(self, number: int) -> None:  # noqa: B027  (most have a single exchange)
        """Launch the next exchange, once the last one is over; all sites call it `rounds` times after `receive`.

        Args:
            number: number of the call in the step, from 0.
        """

    def fetch_late(self, headers: Sequence[StepHeader]) -> bool:
        """Exchange what had no room in the bucket, or came too late for it; return whether there was any.

        All sites call it, between `receive` and `finish`.

        Args:
            headers: the headers of all sites, by rank.
        """
        return False

    def repeat(self) -> None:
        """Exchange the present gradients, with the present samples, in place of those that have been sent.

        All sites call it, between `receive` and `finish`, if a site's header marks one of the handler's units as
        ``dense``. Only for handlers with `repeats`.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot repeat its exchange")

    def launch_again(self) -> bool:
        """Send to all sites what this one has sent to owners, in place of what these have merged.

        All sites call it, between `receive` and `finish`, where a site has left that merges or is part of what was
        merged.

        Returns:
            Whether the handler's units have owners.
        """
        return False

    def add_sent(self, unit: Unit) -> None:
        """Add to ``.grad`` what this site has sent of a unit, unless it has been discarded.

        Only for handlers with `resends_as_gradients`.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot form gradients of what has been sent")

    @property
    def unsettled(self) -> bool:
        """Whether what the first round has summed or merged does not count, so that all sites exchange again.

        The same at all sites. The reducer asks for it once, when the round has been closed.
        """
        return False

    def deal(self) -> None:  # noqa: B027  (most have no owners)
        """Let other sites merge from the next step on, as the context names them; the same at all sites."""

    @property
    def launches_results(self) -> bool:
        """Whether `receive` launches what counts only once another round is closed; the same at all sites."""
        return False

    def confirm(self) -> bool:
        """Return whether what was launched for another round, which is closed, counts; the same at all sites.

        Sites that have sent something invalid are left out.
        """
        return True

    def not_finite(self) -> list[tuple[int | None, str]]:
        """Return the ranks of sites that have sent NaN or Inf, None where only a sum shows it, and the names of units.

        All sites return the same, and call it before any gradient is written.
        """
        return []

    def spoilt(self, headers: Sequence[StepHeader]) -> list[str]:
        """Return the names of units whose agreed gradients hold NaN or Inf although those of the sites are finite.

        All sites return the same, and call it before any gradient is written.

        Args:
            headers: the headers of all sites, by rank.
        """
        return []

    @abstractmethod
    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        """Write the agreed gradients, or drop them.

        Args:
            headers: the headers of all sites, by rank.
            write: whether gradients are written.
            keep: whether the step counts for state such as error memory; otherwise that is left as it was before the
                step. The same on all sites.
        """

    # State between steps

    def layout(self) -> list[list[int]]:
        """Return the room in the bucket, by slot, where it follows from earlier steps; the same at all sites."""
        return []

    def restore(self, layout: Sequence[Sequence[int]]) -> None:  # noqa: B027  (most have none)
        """Restore what `layout` returned at another site.

        Raises:
            MismatchError: if it does not fit.
        """

    def share_state(self) -> None:  # noqa: B027  (most have none)
        """Replace state that has to be the same everywhere by that of rank 0; all sites must call it."""

    def rounding(self) -> dict[str, Tensor]:
        """Return the rounding errors that the next step adds, by name of the unit."""
        return {}


def write_gradients(values: Sequence[tuple[torch.nn.Parameter, Tensor]], scale: float = 1.0) -> None:
    """Replace ``.grad`` of parameters by flat tensors times a scale, all at once."""
    rooms: list[Any] = []
    for parameter, _ in values:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            gradient = parameter.grad = torch.empty_like(parameter)
        rooms.append(gradient)
    if rooms:
        pairs = zip(rooms, values, strict=True)
        shaped = [value if room.dim() == 1 else value.view(room.shape) for room, (_, value) in pairs]
        try:
            torch._foreach_copy_(rooms, shaped)
        except RuntimeError:  # a program has put a tensor there whose elements share memory, such as an expanded one
            for (parameter, _), value in zip(values, shaped, strict=True):
                parameter.grad = torch.empty_like(parameter).copy_(value)
            rooms = [parameter.grad for parameter, _ in values]
    if rooms and scale != 1.0:
        torch._foreach_mul_(rooms, scale)


def gradient_room(parameter: torch.nn.Parameter, shape: tuple[int, ...]) -> Tensor:
    """Return ``.grad`` in another shape, to be overwritten in place, so that no second gradient takes memory."""
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse or gradient.requires_grad or not gradient.is_contiguous():
        gradient = parameter.grad = torch.empty_like(parameter, memory_format=torch.contiguous_format)
    return gradient.detach().view(shape)


_HANDLERS: Registry[tuple[str, str], type[BucketHandler]] = Registry("handler")
"""Handlers by path and variant."""
_HANDLERS.defer(f"{__package__}.nodes", (GradientPath.LOWRANK, "nodes"))
_HANDLERS.defer(f"{__package__}.merged", (GradientPath.LOWRANK, "owner"), (GradientPath.LOWRANK, "divided"))
_HANDLERS.defer(f"{__package__}.powersgd", (GradientPath.POWERSGD, ""))
_HANDLERS.defer(f"{__package__}.topk", (GradientPath.TOPK, ""))


def register_handler(*paths: str, variant: str = "") -> Callable[[type[BucketHandler]], type[BucketHandler]]:
    """Register the handler of units that take one of these paths; a class decorator.

    Args:
        paths: the paths.
        variant: ``"nodes"`` for hierarchical groups, where the processes of a node send as one site; ``"owner"`` for
            units that have an owner, ``"divided"`` for those that are divided among the sites; empty for all others.
    """

    def decorate(handler: type[BucketHandler]) -> type[BucketHandler]:
        for path in paths:
            _HANDLERS.register((path, variant))(handler)
        return handler

    return decorate


def handler_type(path: str, transport: Transport, owner: Ownership | None = None) -> type[BucketHandler]:
    """Return the handler that is registered for a path.

    Args:
        path: the path.
        transport: the transport.
        owner: the sites that merge the unit; None for units without an owner.
    """
    variant = "" if transport.nodes is None else "nodes"
    if owner is not None:
        variant = "divided" if owner.divided else "owner"
    return _HANDLERS[(path, variant) if (path, variant) in _HANDLERS.names else (path, "")]
