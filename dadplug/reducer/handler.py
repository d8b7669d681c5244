"""Bucket handlers: a bucket and the units that share it, from the arrival of their gradients to the agreed ones."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..exchange import Traffic, Transport
from ..exchange.factor_buckets import FactorPayload
from ..exchange.wire import WireFormat, wire_format
from ..fused import Deferral
from ..methods import Method
from ..methods.base import GradientPath
from ..options import Options
from ..privacy.secure_sum import SecureSum
from ..registry import Registry
from ..schedules import Decoding
from ..units.base import Unit
from .owners import Owners, Ownership
from .step_header import FaultLog, StepHeader


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
        secure_sum: the secure sum of the sites, where gradients are summed under masks.
        decoding: sizes of the blocks in which gradients are formed, the same at all sites.
        checks_finite: whether gradients are checked for NaN and Inf, since these are an error or would damage state.
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
    secure_sum: SecureSum | None = None
    checks_finite: bool = field(init=False)

    def __post_init__(self) -> None:
        keeps_rest = wire_format(self.options.wire_of(GradientPath.LOWRANK)).quantised
        self.checks_finite = self.options.check_finite or self.method.traits.keeps_state or keeps_rest

    def wire(self, unit: Unit) -> WireFormat:
        """Return the format in which a unit's gradients are sent."""
        return wire_format(self.options.wire_of(unit.path), unit.lead.dtype)


class Timing:
    """Context manager that counts time on the meter, for one unit or in equal parts for several.

    Args:
        traffic: the meter.
        kind: ``"encode"``, ``"decode"`` or ``"wait"``.
        units: the units.
    """

    __slots__ = ("_kind", "_record", "_start", "_traffic", "_units")

    def __init__(self, traffic: Traffic, kind: str, units: Sequence[Unit]) -> None:
        self._traffic = traffic
        self._kind = kind
        self._units = units
        self._record: torch.profiler.record_function | None = None

    def __enter__(self) -> None:
        if torch.autograd._profiler_enabled():
            self._record = torch.profiler.record_function(f"dadplug {self._kind} {self._units[0].name}")
            self._record.__enter__()
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self._start
        if self._record is not None:
            self._record.__exit__(*error)
        for unit in self._units:
            self._traffic.of(unit.name).add(self._kind, seconds / len(self._units))


class BucketHandler(ABC):
    """A bucket and the units that fill it; one subclass for each path that a gradient can take.

    In each step the reducer calls `fill` for each unit, `launch` once the handler is `ready`, and after backward, for
    all handlers, `add_late`, `receive`, `proceed`, perhaps `repeat`, `fetch_late`, and `finish`.

    Args:
        units: the units that share the bucket, in the order in which backward is expected to reach them.
        context: what the handlers of a reducer share.

    Attributes:
        units: the units.
        missing: number of units that have not been filled in this step; the reducer counts it down.
    """

    bucket_mb: ClassVar[float] = 4.0
    """Payload at which a bucket is full by default, in MB."""
    repeats: ClassVar[bool] = False
    """Whether `repeat` can exchange anew what is void in a payload that has been sent."""
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
        self._positions = [context.positions[unit.name] for unit in units]

    # Payload sizes

    @classmethod
    def full_at(cls, transport: Transport) -> float:
        """Return the payload, in MB, at which a bucket is full by default."""
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

    # A step

    @property
    def ready(self) -> bool:
        """Whether the bucket can be launched."""
        return not self.missing

    def post(self) -> None:  # noqa: B027  (not all receive in the background)
        """Prepare to receive."""

    @abstractmethod
    def fill(self, unit: Unit) -> None:
        """Put a unit's gradient, or its absence, into the bucket."""

    def on_filled(self) -> None:  # noqa: B027  (most wait for the launch)
        """Called when all units have been filled."""

    @abstractmethod
    def launch(self) -> None:
        """Send the bucket."""

    @abstractmethod
    def add_late(self) -> None:
        """Account for gradients that have arrived, changed or gone after their unit had been filled."""

    @abstractmethod
    def present(self, unit: Unit) -> bool:
        """Return whether this site has a gradient for a unit."""

    def extra_rows(self, unit: Unit) -> int:
        """Return how many of this site's rows of a unit are sent in a second round."""
        return 0

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

    def add_sent(self, unit: Unit) -> None:
        """Add to ``.grad`` what this site has sent of a unit, unless it has been discarded.

        Only for handlers with `resends_as_gradients`.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot form gradients of what has been sent")

    @property
    def unsettled(self) -> bool:
        """Whether the sum of the first round does not count, so that all sites exchange again; the same at all sites.

        The reducer asks for it once, when the round has been closed. Only for handlers with `repeats`.
        """
        return False

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

    def timing(self, kind: str, unit: Unit | None = None) -> Timing:
        """Return a context manager that counts the time inside on the meter, and names it in a profile.

        Args:
            kind: ``"encode"``, ``"decode"`` or ``"wait"``.
            unit: the unit that the time is spent for; None for all units of the handler.
        """
        return Timing(self.context.transport.traffic, kind, self.units if unit is None else (unit,))


def write_gradient(parameter: torch.nn.Parameter, flat: Tensor, scale: float) -> None:
    """Replace ``.grad`` by a flat tensor times a scale."""
    if parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = torch.empty_like(parameter)
    parameter.grad.copy_(flat.view(parameter.shape))
    if scale != 1.0:
        parameter.grad.mul_(scale)


def gradient_room(parameter: torch.nn.Parameter, shape: tuple[int, ...]) -> Tensor:
    """Return ``.grad`` in another shape, to be overwritten in place, so that no second gradient takes memory."""
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse or gradient.requires_grad or not gradient.is_contiguous():
        gradient = parameter.grad = torch.empty_like(parameter, memory_format=torch.contiguous_format)
    return gradient.detach().view(shape)


_HANDLERS: Registry[tuple[str, str], type[BucketHandler]] = Registry("handler")
"""Handlers by path and variant."""


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
    if owner is not None:
        return _HANDLERS[path, "divided" if owner.divided else "owner"]
    variant = "" if transport.nodes is None else "nodes"
    return _HANDLERS[(path, variant) if (path, variant) in _HANDLERS else (path, "")]
