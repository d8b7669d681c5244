"""One step's exchange: buckets that fill while backward goes on, and leave in one fixed order on all sites."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from ..exchange import Transport
from ..exchange.buckets import DenseBucket
from ..exchange.payload import Share
from ..methods import Method
from ..methods.feedback import ErrorFeedback
from ..options import Options
from ..units.base import Unit
from ..units.factor import FactorUnit
from . import DenseStage, Stage, stage_kind, write_gradient
from .attached import AttachedGradients
from .step_header import ATTACHED, CHAIN_BROKEN, Note, NoteExchange, raise_fault

_WIRES = {"bf16": torch.bfloat16, "int8": torch.int8}


class Pipeline:
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
        self.checks = options.check_finite or method.keeps_state or options.wire == "int8"
        self.known: dict[str, list[Share]] = {}  # what has arrived in the step, complete, by unit and site
        self.index = {unit.name: index for index, unit in enumerate(self.units)}
        self.turns = itertools.count()  # of those that work for their machine, under hierarchical groups
        self._stages = self._divide(rows)
        self._stage_of = {unit.name: stage for stage in self._stages for unit in stage.units}
        self._launched = 0
        self._notes = NoteExchange(len(self.units), transport)

    def _divide(self, rows: dict[str, int]) -> list[Stage]:
        """Groups neighbouring units of one kind into stages; a stage's place is where its last unit stands."""
        stages: list[Stage] = []
        open_groups: dict[tuple[type[Stage], torch.dtype], tuple[list[Unit], int]] = {}
        for unit in self.units:
            kind, dtype = stage_kind(unit.path, self.transport), unit.lead.dtype
            group, size = open_groups.pop((kind, dtype), ([], 0))
            group.append(unit)
            size += kind.numbers(unit, rows.get(unit.name, 1), self.method) * self.wire(dtype).itemsize
            if size >= self.options.bucket_bytes(kind.full_at(self.transport)):
                stages.append(kind(group, self))
            else:
                open_groups[kind, dtype] = group, size
        stages += [kind(group, self) for (kind, _), (group, _) in open_groups.items()]
        return stages

    def wire(self, dtype: torch.dtype) -> torch.dtype:
        """Says in which type numbers of a parameter's type travel."""
        narrower = dtype.itemsize > 2 and dtype.is_floating_point
        return _WIRES.get(self.options.wire, dtype) if narrower else dtype

    def arrive(self, unit: Unit) -> None:
        """Takes a unit whose gradient is complete, and launches what can leave."""
        self._fill(unit)
        while self._launched < len(self._stages) and self._stages[self._launched].ready:
            self._launch_next()

    def _fill(self, unit: Unit) -> None:
        stage = self._stage_of[unit.name]
        stage.fill(unit)
        stage.missing -= 1
        unit.sent = True
        if not stage.missing:
            stage.filled()

    def _launch_next(self) -> None:
        if self._launched == 0:  # a receiver that is ready spares the sender a round trip
            for stage in self._stages:
                stage.post()
            self._notes.post()
        self._stages[self._launched].launch()
        self._launched += 1

    def finish(self, step: int, stop: bool, attached: AttachedGradients | None = None) -> list[Note]:
        """Sends what is left, waits for the others, and writes ``.grad``.

        Args:
            step: number of the step.
            stop: whether to ask all sites to stop after this step.
            attached: gradients that it does not send, and that are checked with those it sends.

        Returns:
            The notes of all sites.

        Raises:
            NonFiniteError: if some site's gradient holds NaN or Inf; no ``.grad`` has been written then.
        """
        for stage in self._stages[self._launched :]:
            for unit in stage.units:
                if not unit.sent:
                    self._fill(unit)
        while self._launched < len(self._stages):
            self._launch_next()
        for stage in self._stages:
            stage.settle_late()
        for unit in self.units:
            if isinstance(unit, FactorUnit):
                unit.release_sent()
        self._notes.send(self._note(step, stop, attached))
        for stage in self._stages:  # the first are worked on while the last are still on their way
            stage.receive()
        notes = self._notes.receive()
        total = sum(note.samples for note in notes)
        write = total > 0 and not any(note.fault for note in notes)
        if write:
            self._repeat(notes)
            self._reduce_dense(notes, [note.samples / total for note in notes])
        keep = write and all(note.finite for note in notes)
        for stage in self._stages:
            stage.finish(notes, write, keep)
            stage.missing = len(stage.units)
        self._launched = 0
        self.known.clear()
        self.faults.clear()
        others = [] if attached is None else attached.names
        raise_fault(notes, [unit.name for unit in self.units], self.transport.sites, others)
        return notes

    def room(self, unit: FactorUnit) -> int:
        """Tells how many rows of a unit this site sends in a step."""
        stage = self._stage_of[unit.name]
        return stage.room(unit)

    def sent_bytes(self, unit: Unit) -> int:
        """Tells how many bytes this site hands to the transport in a step for a unit without rows."""
        stage = self._stage_of[unit.name]
        assert isinstance(stage, DenseStage)
        return stage.sent_bytes(unit)

    def share_state(self) -> None:
        """Hands to all sites what of rank 0's state has to be the same; all sites must call it."""
        for stage in self._stages:
            stage.share_state()

    def rounding(self) -> ErrorFeedback:
        """Tells what rounding of dense gradients has taken away, and the next step adds."""
        kept = ErrorFeedback(True)
        kept.refer(self.reference)
        for stage in self._stages:
            for name, lost in stage.rounding().items():
                kept.of(name, lost).copy_(lost)
        return kept

    def add_rounding(self, kept: ErrorFeedback) -> None:
        """Takes over what another pipeline's rounding has taken away."""
        kept.refer(self.reference)
        for stage in self._stages:
            for name, lost in stage.rounding().items():
                lost.copy_(kept.of(name, lost))

    def retire(self, step: int, version: int) -> None:
        """Takes an empty step under the number of the next plan, to learn whether the other sites have one too.

        Raises:
            MismatchError: if they have not.
        """
        self.version = version
        self.samples = lambda: 0
        self.finish(step, False)

    def _note(self, step: int, stop: bool, attached: AttachedGradients | None) -> Note:
        note = Note(step, self.version, self.samples(), stop)
        activations = [name for kind, name in self.faults if kind == 1]
        note.finite = not self.faults
        broken = [(CHAIN_BROKEN, unit.name) for unit in self.units if unit.broken]
        if broken or (self.faults and self.options.check_finite):
            # The forward pass reaches last what backward reaches first.
            note.fault, name = (broken or [(1, name) for name in activations[-1:]] or self.faults)[0]
            note.culprit = self.index[name]
        elif attached is not None and (culprit := attached.first_not_finite()) is not None:
            note.finite = False
            if self.options.check_finite:
                note.fault, note.culprit = ATTACHED, culprit
        for unit in self.units:
            stage = self._stage_of[unit.name]
            note.present.append(stage.present(unit))
            note.dense.append(unit.dense and (stage.repeats or unit.has_gradient))
            note.void.append(unit.void and not stage.repeats)
            note.extra_rows.append(stage.extra_rows(unit))
        return note

    def _repeat(self, notes: Sequence[Note]) -> None:
        """Exchange again, on all sites, what has changed at some site since it was sent."""
        for stage in self._stages:
            void = any(note.dense[self.index[unit.name]] for note in notes for unit in stage.units)
            if stage.repeats and void:
                stage.repeat()

    def _reduce_dense(self, notes: Sequence[Note], weights: Sequence[float]) -> None:
        """All-reduces gradients that no bucket carries, on all sites if any has one."""
        for index, unit in enumerate(self.units):
            stage = self._stage_of[unit.name]
            void = stage.resends_as_gradients and any(note.void[index] for note in notes)
            if stage.repeats or not (void or any(note.dense[index] for note in notes)):
                continue
            if void:
                stage.form_sent(unit)
            for parameter in unit.parameters.values():
                bucket = DenseBucket([parameter.numel()], self.transport, parameter.dtype)
                bucket.fill(0, parameter.grad, weights[self.transport.rank])
                bucket.launch()
                write_gradient(parameter, bucket.wait()[0], 1.0)
