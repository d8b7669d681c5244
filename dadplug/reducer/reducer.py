"""One step's exchange: buckets that fill while backward goes on, and leave in one fixed order on all sites."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from ..exchange import Transport
from ..exchange.payload import FactorPayload
from ..exchange.summed_buckets import AllReducedBucket
from ..exchange.wire import WireFormat, wire_format
from ..methods import Method
from ..methods.feedback import ErrorFeedback
from ..options import Options
from ..units.base import Unit
from ..units.factor import FactorUnit
from . import BucketHandler, DenseHandler, handler_type, write_gradient
from .attached import AttachedGradients
from .step_header import ATTACHED, CHAIN_BROKEN, HeaderExchange, StepHeader, raise_fault


class Reducer:
    """Takes units as their gradients arrive, and writes agreed gradients at the end of the step.

    Args:
        units: the units, in the order in which backward is expected to reach them, the same on all sites.
        method: encodes factors.
        transport: the transport.
        options: the options.
        rows: rows that a unit is expected to send, by its name; decides how units share buckets.
        samples: tells the samples that this site's gradients stand for so far in the step.
        reference: samples of all sites in a step, about; a scale that keeps sums near the size of a gradient.
        version: number of the plan that the units belong to.
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
    ) -> None:
        self.units = list(units)
        self.method = method
        self.transport = transport
        self.options = options
        self.version = version
        self.samples = samples
        self.reference = max(reference, 1)
        self.faults: list[tuple[int, str]] = []
        self.checks = options.check_finite or method.traits.keeps_state or wire_format(options.wire).quantised
        self.known: dict[str, list[FactorPayload]] = {}  # what has arrived in the step, complete, by unit and site
        self.index = {unit.name: index for index, unit in enumerate(self.units)}
        self.turns = itertools.count()  # of those that work for their machine, under hierarchical groups
        self._handlers = self._divide(rows)
        self._handler_of = {unit.name: handler for handler in self._handlers for unit in handler.units}
        self._launched = 0
        self._headers = HeaderExchange(len(self.units), transport)

    def _divide(self, rows: dict[str, int]) -> list[BucketHandler]:
        """Groups neighbouring units of one kind into handlers; a handler's place is where its last unit stands."""
        handlers: list[BucketHandler] = []
        open_groups: dict[tuple[type[BucketHandler], torch.dtype], tuple[list[Unit], int]] = {}
        for unit in self.units:
            kind, dtype = handler_type(unit.path, self.transport), unit.lead.dtype
            group, size = open_groups.pop((kind, dtype), ([], 0))
            group.append(unit)
            size += kind.numbers(unit, rows.get(unit.name, 1), self.method) * self.wire(dtype).itemsize
            if size >= self.options.bucket_bytes(kind.full_at(self.transport)):
                handlers.append(kind(group, self))
            else:
                open_groups[kind, dtype] = group, size
        handlers += [kind(group, self) for (kind, _), (group, _) in open_groups.items()]
        return handlers

    def wire(self, dtype: torch.dtype) -> WireFormat:
        """Return the format in which gradients of parameters of a type are sent."""
        return wire_format(self.options.wire, dtype)

    def arrive(self, unit: Unit) -> None:
        """Takes a unit whose gradient is complete, and launches what can leave."""
        self._fill(unit)
        while self._launched < len(self._handlers) and self._handlers[self._launched].ready:
            self._launch_next()

    def _fill(self, unit: Unit) -> None:
        handler = self._handler_of[unit.name]
        handler.fill(unit)
        handler.missing -= 1
        unit.sent = True
        if not handler.missing:
            handler.filled()

    def _launch_next(self) -> None:
        if self._launched == 0:  # a receiver that is ready spares the sender a round trip
            for handler in self._handlers:
                handler.post()
            self._headers.post()
        self._handlers[self._launched].launch()
        self._launched += 1

    def finish(self, step: int, stop: bool, attached: AttachedGradients | None = None) -> list[StepHeader]:
        """Sends what is left, waits for the others, and writes ``.grad``.

        Args:
            step: number of the step.
            stop: whether to ask all sites to stop after this step.
            attached: gradients that it does not send, and that are checked with those it sends.

        Returns:
            The headers of all sites.

        Raises:
            NonFiniteError: if some site's gradient holds NaN or Inf; no ``.grad`` has been written then.
        """
        for handler in self._handlers[self._launched :]:
            for unit in handler.units:
                if not unit.sent:
                    self._fill(unit)
        while self._launched < len(self._handlers):
            self._launch_next()
        for handler in self._handlers:
            handler.settle_late()
        for unit in self.units:
            if isinstance(unit, FactorUnit):
                unit.release_sent()
        self._headers.send(self._header(step, stop, attached))
        for handler in self._handlers:  # the first are worked on while the last are still on their way
            handler.receive()
        headers = self._headers.receive()
        total = sum(header.samples for header in headers)
        write = total > 0 and not any(header.fault for header in headers)
        if write:
            self._repeat(headers)
            self._reduce_dense(headers, [header.samples / total for header in headers])
        keep = write and all(header.finite for header in headers)
        for handler in self._handlers:
            handler.finish(headers, write, keep)
            handler.missing = len(handler.units)
        self._launched = 0
        self.known.clear()
        self.faults.clear()
        others = [] if attached is None else attached.names
        raise_fault(headers, [unit.name for unit in self.units], self.transport.sites, others)
        return headers

    def room(self, unit: FactorUnit) -> int:
        """Tells how many rows of a unit this site sends in a step."""
        handler = self._handler_of[unit.name]
        return handler.room(unit)

    def sent_bytes(self, unit: Unit) -> int:
        """Tells how many bytes this site hands to the transport in a step for a unit without rows."""
        handler = self._handler_of[unit.name]
        assert isinstance(handler, DenseHandler)
        return handler.sent_bytes(unit)

    def share_state(self) -> None:
        """Hands to all sites what of rank 0's state has to be the same; all sites must call it."""
        for handler in self._handlers:
            handler.share_state()

    def rounding(self) -> ErrorFeedback:
        """Tells what rounding of dense gradients has taken away, and the next step adds."""
        kept = ErrorFeedback(True)
        kept.refer(self.reference)
        for handler in self._handlers:
            for name, lost in handler.rounding().items():
                kept.of(name, lost).copy_(lost)
        return kept

    def add_rounding(self, kept: ErrorFeedback) -> None:
        """Takes over what another reducer's rounding has taken away."""
        kept.refer(self.reference)
        for handler in self._handlers:
            for name, lost in handler.rounding().items():
                lost.copy_(kept.of(name, lost))

    def close_plan(self, step: int, version: int) -> None:
        """Takes an empty step under the number of the next plan, to learn whether the other sites have one too.

        Raises:
            MismatchError: if they have not.
        """
        self.version = version
        self.samples = lambda: 0
        self.finish(step, False)

    def _header(self, step: int, stop: bool, attached: AttachedGradients | None) -> StepHeader:
        header = StepHeader(step, self.version, self.samples(), stop)
        activations = [name for kind, name in self.faults if kind == 1]
        header.finite = not self.faults
        broken = [(CHAIN_BROKEN, unit.name) for unit in self.units if unit.broken]
        if broken or (self.faults and self.options.check_finite):
            # The forward pass reaches last what backward reaches first.
            header.fault, name = (broken or [(1, name) for name in activations[-1:]] or self.faults)[0]
            header.culprit = self.index[name]
        elif attached is not None and (culprit := attached.first_not_finite()) is not None:
            header.finite = False
            if self.options.check_finite:
                header.fault, header.culprit = ATTACHED, culprit
        for unit in self.units:
            handler = self._handler_of[unit.name]
            header.present.append(handler.present(unit))
            header.dense.append(unit.dense and (handler.repeats or unit.has_gradient))
            header.void.append(unit.void and not handler.repeats)
            header.extra_rows.append(handler.extra_rows(unit))
        return header

    def _repeat(self, headers: Sequence[StepHeader]) -> None:
        """Exchange again, on all sites, what has changed at some site since it was sent."""
        if not any(True in header.dense for header in headers):
            return
        for handler in self._handlers:
            void = any(header.dense[self.index[unit.name]] for header in headers for unit in handler.units)
            if handler.repeats and void:
                handler.repeat()

    def _reduce_dense(self, headers: Sequence[StepHeader], weights: Sequence[float]) -> None:
        """All-reduce gradients that no bucket carries, on all sites if any has one."""
        if not any(True in header.dense or True in header.void for header in headers):
            return
        for index, unit in enumerate(self.units):
            handler = self._handler_of[unit.name]
            void = handler.resends_as_gradients and any(header.void[index] for header in headers)
            if handler.repeats or not (void or any(header.dense[index] for header in headers)):
                continue
            if void:
                handler.form_sent(unit)
            for parameter in unit.parameters.values():
                bucket = AllReducedBucket([parameter.numel()], self.transport, parameter.dtype)
                bucket.fill(0, parameter.grad, weights[self.transport.rank])
                bucket.launch()
                write_gradient(parameter, bucket.wait()[0], 1.0)
