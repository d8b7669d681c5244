"""Handlers: a bucket and the units that share it, from their gradients' arrival to the agreed ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..exchange import Traffic, Transport
from ..methods import Method
from ..registry import Registry
from ..units.base import Unit
from .step_header import StepHeader

if TYPE_CHECKING:
    from .reducer import Reducer


class Timing:
    """Counts time on the meter, for one unit or in equal shares for several."""

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


class BucketHandler:
    """A bucket and the units that fill it; one kind for each path that a parameter can take.

    Args:
        units: the units that share the bucket, in the order in which backward is expected to reach them.
        reducer: the reducer that the handler belongs to.
    """

    bucket_mb: ClassVar[float] = 4.0
    """Payload at which a bucket is full by default, in MB."""
    repeats: ClassVar[bool] = False
    """Whether the exchange can be repeated when a payload that has been sent is void."""

    def __init__(self, units: Sequence[Unit], reducer: Reducer) -> None:
        self.units = list(units)
        self.reducer = reducer
        self.dtype = units[0].lead.dtype
        self._slots = {unit.name: slot for slot, unit in enumerate(units)}
        self.missing = len(self.units)

    @property
    def ready(self) -> bool:
        """Whether the bucket can leave."""
        return not self.missing

    def filled(self) -> None:
        """Is called when all units have been filled."""

    def post(self) -> None:
        """Makes ready to receive."""

    def fill(self, unit: Unit) -> None:
        """Puts a unit's gradient, or its absence, into the bucket."""
        raise NotImplementedError

    def launch(self) -> None:
        """Sends the bucket."""
        raise NotImplementedError

    def settle_late(self) -> None:
        """Deals with gradients that arrived after their unit had been sent."""
        raise NotImplementedError

    def present(self, unit: Unit) -> bool:
        """Says whether this site has a gradient for a unit at all."""
        raise NotImplementedError

    def room(self, unit: Unit) -> int:
        """Tells how many rows of a unit this site sends in a step."""
        return 0

    def extra_rows(self, unit: Unit) -> int:
        """Tells how many of this site's rows go in a second round."""
        return 0

    resends_as_gradients: ClassVar[bool] = False
    """Whether all sites send a unit's gradient as it is once one of them has discarded the rows that it sent."""

    def form_sent(self, unit: Unit) -> None:
        """Add to ``.grad`` what this site has sent of a unit, unless it has been discarded."""
        raise NotImplementedError

    def timing(self, kind: str, unit: Unit | None = None) -> Timing:
        """Counts the time inside on the meter, and gives it a name in a profile; a context manager.

        Args:
            kind: ``"encode"``, ``"decode"`` or ``"wait"``.
            unit: the unit that it is for; where None, all of the handler have equal shares of it.
        """
        return Timing(self.reducer.transport.traffic, kind, self.units if unit is None else (unit,))

    def share_state(self) -> None:
        """Hands to all sites what of rank 0's state has to be the same; all sites must call it."""

    def rounding(self) -> dict[str, Tensor]:
        """Tells what rounding on the wire has taken away and the next step adds, by name of the unit."""
        return {}

    def receive(self) -> None:
        """Waits for the bucket."""
        raise NotImplementedError

    def repeat(self) -> None:
        """Drop what has been exchanged in this step, and exchange the present gradients, with the present samples.

        All sites call it, after the headers have been received and before `finish`, if a site's header marks one of the
        handler's units as ``dense``.
        """
        raise NotImplementedError

    def finish(self, headers: Sequence[StepHeader], write: bool, keep: bool) -> None:
        """Write the agreed gradients, or throw them away.

        Args:
            headers: the headers of all sites.
            write: whether gradients are written.
            keep: whether the step counts for what is kept between steps, such as error memory; otherwise that is left
                as it was before the step. The same on all sites.
        """
        raise NotImplementedError

    @classmethod
    def full_at(cls, transport: Transport) -> float:
        """Says at how much payload, in MB, a bucket is full by default."""
        return cls.bucket_mb

    @classmethod
    def numbers(cls, unit: Unit, rows: int, method: Method) -> int:
        """Tells about how many numbers of a unit travel.

        Args:
            unit: the unit.
            rows: rows that it is expected to send, where it has rows.
            method: the method.
        """
        return unit.lead.numel()

    def _indices(self) -> list[int]:
        return [self.reducer.index[unit.name] for unit in self.units]


def write_gradient(parameter: torch.nn.Parameter, flat: Tensor, scale: float) -> None:
    """Replaces ``.grad`` by a flat tensor times a scale."""
    if parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = torch.empty_like(parameter)
    parameter.grad.copy_(flat.view(parameter.shape))
    if scale != 1.0:
        parameter.grad.mul_(scale)


def gradient_to_form(parameter: torch.nn.Parameter, shape: tuple[int, ...]) -> Tensor:
    """Returns ``.grad`` in another shape, to be overwritten where it lies: a gradient is not there twice."""
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse or gradient.requires_grad or not gradient.is_contiguous():
        gradient = parameter.grad = torch.empty_like(parameter, memory_format=torch.contiguous_format)
    return gradient.detach().view(shape)


_HANDLERS: Registry[tuple[str, bool], type[BucketHandler]] = Registry("handler")
"""Handlers by path, and whether they are for hierarchical groups."""


def register_handler(*paths: str, merged: bool = False) -> Callable[[type[BucketHandler]], type[BucketHandler]]:
    """Registers the kind of handler for units that take one of these paths; a class decorator.

    Args:
        paths: the paths.
        merged: whether it is for hierarchical groups, where a machine's processes send as one.
    """

    def decorate(kind: type[BucketHandler]) -> type[BucketHandler]:
        for path in paths:
            _HANDLERS.register((path, merged))(kind)
        return kind

    return decorate


def handler_type(path: str, transport: Transport) -> type[BucketHandler]:
    """Finds the kind of handler for a path."""
    merged = transport.machines is not None and (path, True) in _HANDLERS
    return _HANDLERS[path, merged]
