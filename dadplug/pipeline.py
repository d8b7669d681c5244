"""One step's exchange: buckets that fill while backward goes on, and leave in one fixed order on all sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .exchange import Transport
from .exchange.buckets import DenseBucket, FactorBucket, Slot
from .methods import Method, decode
from .notes import Note, NoteExchange, raise_fault
from .options import Options
from .share import Share, finite
from .units import FactorUnit, Unit, add_gradient

_FACTOR_MB = 0.03  # small, since a slow link should not wait for the next layer
_DENSE_MB = 4.0


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
        self._index = {unit.name: index for index, unit in enumerate(self.units)}
        self._stages = self._divide(rows)
        self._stage_of = {unit.name: stage for stage in self._stages for unit in stage.units}
        self._launched = 0
        self._notes = NoteExchange(len(self.units), transport)

    def _divide(self, rows: dict[str, int]) -> list[_Stage]:
        """Groups neighbouring units of one kind into stages; a stage's place is where its last unit stands."""
        stages: list[_Stage] = []
        open_groups: dict[tuple[type[_Stage], torch.dtype], tuple[list[Unit], int]] = {}
        limits = {
            _FactorStage: self.options.bucket_bytes(_FACTOR_MB),
            _DenseStage: self.options.bucket_bytes(_DENSE_MB),
        }
        for unit in self.units:
            kind: type[_Stage] = _FactorStage if isinstance(unit, FactorUnit) else _DenseStage
            numbers = rows.get(unit.name, 1) * sum(unit.shape) if isinstance(unit, FactorUnit) else unit.lead.numel()
            group, size = open_groups.pop((kind, unit.lead.dtype), ([], 0))
            group.append(unit)
            size += numbers * self.wire(unit.lead.dtype).itemsize
            if size >= limits[kind]:
                stages.append(kind(group, self))
            else:
                open_groups[kind, unit.lead.dtype] = group, size
        stages += [kind(group, self) for (kind, _), (group, _) in open_groups.items()]
        return stages

    def wire(self, dtype: torch.dtype) -> torch.dtype:
        """Says in which type numbers of a parameter's type travel."""
        return torch.bfloat16 if self.options.wire == "bf16" and dtype.itemsize > 2 else dtype

    def arrive(self, unit: Unit) -> None:
        """Takes a unit whose gradient is complete, and launches what can leave."""
        self._fill(unit)
        while self._launched < len(self._stages) and not self._stages[self._launched].missing:
            self._launch_next()

    def _fill(self, unit: Unit) -> None:
        stage = self._stage_of[unit.name]
        stage.fill(unit)
        stage.missing -= 1
        unit.sent = True

    def _launch_next(self) -> None:
        if self._launched == 0:  # a receiver that is ready spares the sender a round trip
            for stage in self._stages:
                stage.post()
            self._notes.post()
        self._stages[self._launched].launch()
        self._launched += 1

    def finish(self, step: int, stop: bool) -> list[Note]:
        """Sends what is left, waits for the others, and writes ``.grad``.

        Args:
            step: number of the step.
            stop: whether to ask all sites to stop after this step.

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
        notes = self._notes.exchange(self._note(step, stop))
        faulty = any(note.fault for note in notes)
        total = sum(note.samples for note in notes)
        weights = [note.samples / total if total else 0.0 for note in notes]
        if not faulty and total:
            self._reduce_dense(notes, weights)
        for stage in self._stages:
            stage.finish(notes, weights, write=not faulty and total > 0)
            stage.missing = len(stage.units)
        self._launched = 0
        self.faults.clear()
        raise_fault(notes, [unit.name for unit in self.units], self.transport.sites)
        return notes

    def room(self, unit: FactorUnit) -> int:
        """Tells how many rows of a unit this site sends in a step."""
        stage = self._stage_of[unit.name]
        assert isinstance(stage, _FactorStage)
        return stage.room(unit)

    def check_version(self, step: int, version: int) -> None:
        """Tells the other sites that this one has a new plan, in a note that says nothing else.

        Raises:
            MismatchError: if they have not.
        """
        nothing = [0] * len(self.units)
        nobody = [False] * len(self.units)
        self._notes.exchange(Note(step, version, 0, False, 0, 0, nobody, nobody, nothing, nothing))

    def _note(self, step: int, stop: bool) -> Note:
        note = Note(step, self.version, self.samples(), stop)
        activations = [name for kind, name in self.faults if kind == 1]
        if self.faults:
            # The forward pass reaches last what backward reaches first.
            note.fault, name = (1, activations[-1]) if activations else self.faults[0]
            note.culprit = self._index[name]
        for unit in self.units:
            rows, extra, present = self._stage_of[unit.name].counts(unit)
            note.rows.append(rows)
            note.extra_rows.append(extra)
            note.present.append(present)
            note.dense.append(unit.dense)
        return note

    def _reduce_dense(self, notes: Sequence[Note], weights: Sequence[float]) -> None:
        """All-reduces gradients that no bucket carries, on all sites if any has one."""
        for index, unit in enumerate(self.units):
            if not any(note.dense[index] for note in notes):
                continue
            for parameter in unit.parameters.values():
                bucket = DenseBucket([parameter.numel()], self.transport, self.wire(parameter.dtype))
                bucket.fill(0, parameter.grad, weights[self.transport.rank])
                bucket.launch()
                _write(parameter, bucket.wait()[0], 1.0)


class _Stage:
    """A bucket and the units that fill it."""

    def __init__(self, units: Sequence[Unit], pipeline: Pipeline) -> None:
        self.units = list(units)
        self.pipeline = pipeline
        self.dtype = units[0].lead.dtype
        self._slots = {unit.name: slot for slot, unit in enumerate(units)}

        self.missing = len(self.units)

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

    def counts(self, unit: Unit) -> tuple[int, int, bool]:
        """Rows in the payload, rows in the second round, and whether there is a gradient at all."""
        raise NotImplementedError

    def finish(self, notes: Sequence[Note], weights: Sequence[float], write: bool) -> None:
        """Waits for the bucket, and writes agreed gradients."""
        raise NotImplementedError

    def _indices(self) -> list[int]:
        return [self.pipeline._index[unit.name] for unit in self.units]


class _FactorStage(_Stage):
    def __init__(self, units: Sequence[Unit], pipeline: Pipeline) -> None:
        super().__init__(units, pipeline)
        slots = []
        for unit in units:
            assert isinstance(unit, FactorUnit)
            bias = unit.shape[0] if unit.bias is not None and pipeline.method.sends_bias else 0
            slots.append(Slot(*unit.shape, bias, pipeline.transport.world_size))
        self.bucket = FactorBucket(slots, pipeline.transport, pipeline.wire(self.dtype))
        self._present: set[str] = set()

    def post(self) -> None:
        self.bucket.post()

    def fill(self, unit: Unit) -> None:
        share = self._encode(unit)
        if share is not None:
            self.bucket.fill(self._slots[unit.name], share)

    def _encode(self, unit: Unit) -> Share | None:
        """Encodes what has arrived; takes note of NaN and Inf, and passes them on as such."""
        assert isinstance(unit, FactorUnit)
        factor = unit.take()
        if factor is None:
            return None
        self._present.add(unit.name)
        try:
            share = self.pipeline.method.encode(unit.name, factor, unit.bias is not None)
            if not self.pipeline.options.check_finite or share.finite():
                return share
        except FloatingPointError:
            pass
        kind = 2 if finite(factor.activations) else 1
        if self.pipeline.options.check_finite:
            self.pipeline.faults.append((kind, unit.name))
        left, right = factor.deltas.new_full((1, unit.shape[0]), math.nan), factor.deltas.new_zeros(1, unit.shape[1])
        return Share(left, right, left[0] if self.bucket.slots[self._slots[unit.name]].bias else None)

    def room(self, unit: Unit) -> int:
        """Tells how many rows of a unit this site sends in a step."""
        return self.bucket.slots[self._slots[unit.name]].capacity[self.pipeline.transport.rank]

    def launch(self) -> None:
        self.bucket.launch()

    def settle_late(self) -> None:
        for unit in self.units:
            share = self._encode(unit)
            if share is not None:
                self.bucket.add_late(self._slots[unit.name], share)

    def counts(self, unit: Unit) -> tuple[int, int, bool]:
        slot = self._slots[unit.name]
        return self.bucket.rows[slot], self.bucket.extra_rows[slot], unit.name in self._present

    def finish(self, notes: Sequence[Note], weights: Sequence[float], write: bool) -> None:
        rows = [[note.rows[index] for note in notes] for index in self._indices()]
        extra = [[note.extra_rows[index] for note in notes] for index in self._indices()]
        shares = self.bucket.wait(rows, extra, self.dtype)
        for unit, index, by_site in zip(self.units, self._indices(), shares, strict=True):
            assert isinstance(unit, FactorUnit)
            if write and any(note.present[index] for note in notes):
                self._write_gradients(unit, by_site, weights)
        self.bucket.end_step(
            [[a + b for a, b in zip(*counts, strict=True)] for counts in zip(rows, extra, strict=True)]
        )
        self._present.clear()

    def _write_gradients(self, unit: FactorUnit, shares: Sequence[Share], weights: Sequence[float]) -> None:
        device = unit.lead.device
        local = [share.to(device) for share in shares]
        unit.lead.grad, bias = decode(local, weights, unit.bias is not None, onto=unit.lead.grad)
        if unit.bias is not None and bias is not None:
            add_gradient(unit.parameters[unit.bias], bias)


class _DenseStage(_Stage):
    def __init__(self, units: Sequence[Unit], pipeline: Pipeline) -> None:
        super().__init__(units, pipeline)
        sizes = [unit.lead.numel() for unit in units]
        self.bucket = DenseBucket(sizes, pipeline.transport, pipeline.wire(self.dtype))
        self._samples = 0
        self._arrivals: dict[str, int] = {}

    def fill(self, unit: Unit) -> None:
        if not self._arrivals:
            self._samples = self.pipeline.samples()
        slot = self._slots[unit.name]
        self.bucket.fill(slot, unit.lead.grad, self._samples / self.pipeline.reference)
        if self.pipeline.options.check_finite and not self.bucket.finite(slot):
            self.pipeline.faults.append((3, unit.name))
        self._arrivals[unit.name] = unit.arrivals

    def launch(self) -> None:
        self.bucket.launch()

    def settle_late(self) -> None:
        samples = self.pipeline.samples()
        for unit in self.units:
            unit.dense |= unit.arrivals != self._arrivals[unit.name] or self._samples != samples
            gradient = unit.lead.grad if unit.dense and self.pipeline.options.check_finite else None
            if gradient is not None and not finite(gradient):
                self.pipeline.faults.append((3, unit.name))

    def counts(self, unit: Unit) -> tuple[int, int, bool]:
        return 0, 0, unit.lead.grad is not None

    def finish(self, notes: Sequence[Note], weights: Sequence[float], write: bool) -> None:
        sums = self.bucket.wait()
        scale = self.pipeline.reference / max(1, sum(note.samples for note in notes))
        for unit, index, value in zip(self.units, self._indices(), sums, strict=True):
            reduced_already = any(note.dense[index] for note in notes)
            if write and not reduced_already and any(note.present[index] for note in notes):
                _write(unit.lead, value, scale)
        self._arrivals.clear()


def _write(parameter: torch.nn.Parameter, flat: Tensor, scale: float) -> None:
    """Replaces ``.grad`` by a flat tensor times a scale."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    parameter.grad.copy_(flat.view(parameter.shape))
    if scale != 1.0:
        parameter.grad.mul_(scale)
