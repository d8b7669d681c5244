"""One step's exchange: buckets that fill while backward goes on, and leave in one fixed order on all sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .exchange import Transport
from .exchange.buckets import DenseBucket, FactorBucket, Slot
from .exchange.codes import CodedBucket, CodedSlot
from .exchange.indices import IndexSlot
from .methods import Method, decode
from .notes import Note, NoteExchange, raise_fault
from .options import Options
from .share import Share, finite
from .units import FactorUnit, Unit, add_gradient

_FACTOR_MB = 0.03  # small, since a slow link should not wait for the next layer
_DENSE_MB = 4.0
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
            numbers = rows.get(unit.name, 1) * sum(unit.widths) if isinstance(unit, FactorUnit) else unit.lead.numel()
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
        narrower = dtype.itemsize > 2 and dtype.is_floating_point
        return _WIRES.get(self.options.wire, dtype) if narrower else dtype

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
        self._notes.send(self._note(step, stop))
        for stage in self._stages:  # the first are worked on while the last are still on their way
            stage.receive()
        notes = self._notes.receive()
        total = sum(note.samples for note in notes)
        write = total > 0 and not any(note.fault for note in notes)
        if write:
            self._reduce_dense(notes, [note.samples / total for note in notes])
        for stage in self._stages:
            stage.finish(notes, write)
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

    def retire(self, step: int, version: int) -> None:
        """Takes an empty step under the number of the next plan, to learn whether the other sites have one too.

        Raises:
            MismatchError: if they have not.
        """
        self.version = version
        self.samples = lambda: 0
        self.finish(step, False)

    def _note(self, step: int, stop: bool) -> Note:
        note = Note(step, self.version, self.samples(), stop)
        activations = [name for kind, name in self.faults if kind == 1]
        if self.faults:
            # The forward pass reaches last what backward reaches first.
            note.fault, name = (1, activations[-1]) if activations else self.faults[0]
            note.culprit = self._index[name]
        for unit in self.units:
            stage = self._stage_of[unit.name]
            note.present.append(stage.present(unit))
            note.dense.append(unit.dense)
            note.extra_rows.append(stage.extra_rows(unit))
        return note

    def _reduce_dense(self, notes: Sequence[Note], weights: Sequence[float]) -> None:
        """All-reduces gradients that no bucket carries, on all sites if any has one."""
        for index, unit in enumerate(self.units):
            if not any(note.dense[index] for note in notes):
                continue
            for parameter in unit.parameters.values():
                bucket = DenseBucket([parameter.numel()], self.transport, parameter.dtype)
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

    def present(self, unit: Unit) -> bool:
        """Says whether this site has a gradient for a unit at all."""
        raise NotImplementedError

    def extra_rows(self, unit: Unit) -> int:
        """Tells how many of this site's rows go in a second round."""
        return 0

    def receive(self) -> None:
        """Waits for the bucket."""
        raise NotImplementedError

    def finish(self, notes: Sequence[Note], write: bool) -> None:
        """Writes the agreed gradients, or throws them away."""
        raise NotImplementedError

    def _indices(self) -> list[int]:
        return [self.pipeline._index[unit.name] for unit in self.units]


class _FactorStage(_Stage):
    def __init__(self, units: Sequence[Unit], pipeline: Pipeline) -> None:
        super().__init__(units, pipeline)
        slots = [self._slot(unit) for unit in units]
        self.bucket = FactorBucket(slots, pipeline.transport, self.dtype, pipeline.wire(self.dtype))
        self._present: set[str] = set()
        self._samples: list[int] = []
        self._shares: list[list[Share]] = []
        self._gradients: dict[str, tuple[Tensor, Tensor | None]] = {}

    def _slot(self, unit: Unit) -> Slot:
        assert isinstance(unit, FactorUnit)
        assert unit.form is not None
        sites, (out, width) = self.pipeline.transport.world_size, unit.widths
        if unit.form.table_rows:
            return IndexSlot(out, unit.form.table_rows, self.pipeline.wire(self.dtype), sites)
        sends_bias = unit.bias is not None and self.pipeline.method.sends_bias
        kind = CodedSlot if self.pipeline.wire(self.dtype) == torch.int8 else Slot
        return kind(out, width, unit.parameters[str(unit.bias)].numel() if sends_bias else 0, sites)

    def post(self) -> None:
        self.bucket.post()

    def fill(self, unit: Unit) -> None:
        share = self._encode(unit)
        if share is None:
            self.bucket.clear(self._slots[unit.name])
        else:
            self.bucket.fill(self._slots[unit.name], share)

    def _encode(self, unit: Unit) -> Share | None:
        """Encodes what has arrived; takes note of NaN and Inf, and passes them on as such."""
        assert isinstance(unit, FactorUnit)
        factor = unit.take()
        if factor is None:
            return None
        self._present.add(unit.name)
        try:
            if factor.form.encoded:
                share = self.pipeline.method.encode(unit.name, factor, unit.bias is not None)
            else:
                share = Share(factor.deltas, factor.activations)
            if not self.pipeline.options.check_finite or share.finite():
                return share
        except FloatingPointError:
            pass
        kind = 2 if finite(factor.activations) else 1
        if self.pipeline.options.check_finite:
            self.pipeline.faults.append((kind, unit.name))
        out, width = unit.widths
        left, right = factor.deltas.new_full((1, out), math.nan), factor.activations.new_zeros(1, width)
        bias = self.bucket.slots[self._slots[unit.name]].bias
        return Share(left, right, left.new_full((bias,), math.nan) if bias else None)

    def room(self, unit: Unit) -> int:
        """Tells how many rows of a unit this site sends in a step."""
        return self.bucket.slots[self._slots[unit.name]].capacity[self.pipeline.transport.rank]

    def launch(self) -> None:
        self.bucket.launch(self.pipeline.samples())

    def settle_late(self) -> None:
        for unit in self.units:
            share = self._encode(unit)
            if share is not None:
                self.bucket.add_late(self._slots[unit.name], share)
            gradient = unit.lead.grad if unit.dense and self.pipeline.options.check_finite else None
            if gradient is not None and not finite(gradient):
                self.pipeline.faults.append((3, unit.name))

    def present(self, unit: Unit) -> bool:
        return unit.name in self._present

    def extra_rows(self, unit: Unit) -> int:
        return self.bucket.extra_rows[self._slots[unit.name]]

    def receive(self) -> None:
        self._samples, self._shares = self.bucket.receive()
        self._decode(self._samples)

    def _decode(self, samples: Sequence[int]) -> None:
        """Forms the gradients of what has arrived, with each site's share in the samples."""
        self._gradients.clear()
        if any(samples):
            for unit, shares in zip(self.units, self._shares, strict=True):
                self._gradients[unit.name] = self._decode_unit(unit, shares, samples)

    def _decode_unit(self, unit: Unit, shares: Sequence[Share], samples: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        assert isinstance(unit, FactorUnit)
        assert unit.form is not None
        local = [share.to(unit.lead.device, self.dtype) for share in shares]
        weights, exact = [count / sum(samples) for count in samples], self.pipeline.method.exact
        return decode(local, weights, unit.bias is not None, site_by_site=exact, form=unit.form)

    def finish(self, notes: Sequence[Note], write: bool) -> None:
        samples = [note.samples for note in notes]
        if write and samples != self._samples:  # a backward pass came after the bucket had left
            self._decode(samples)
        extra = [[note.extra_rows[index] for note in notes] for index in self._indices()]
        for (slot, site), share in self.bucket.second_round(extra).items():
            self._shares[slot][site] = self._shares[slot][site].plus(share)
        for slot, (unit, index) in enumerate(zip(self.units, self._indices(), strict=True)):
            if write and any(note.present[index] for note in notes):
                if any(extra[slot]):
                    self._gradients[unit.name] = self._decode_unit(unit, self._shares[slot], samples)
                self._write_gradients(unit, *self._gradients[unit.name])
        self.bucket.end_step([[share.rows for share in shares] for shares in self._shares])
        self._present.clear()
        self._gradients.clear()

    def _write_gradients(self, unit: Unit, weight: Tensor, bias: Tensor | None) -> None:
        assert isinstance(unit, FactorUnit)
        add_gradient(unit.lead, weight)
        if unit.bias is not None and bias is not None:
            add_gradient(unit.parameters[unit.bias], bias)


class _DenseStage(_Stage):
    def __init__(self, units: Sequence[Unit], pipeline: Pipeline) -> None:
        super().__init__(units, pipeline)
        sizes = [unit.lead.numel() for unit in units]
        wire, transport = pipeline.wire(self.dtype), pipeline.transport
        coded = wire == torch.int8
        self.bucket = CodedBucket(sizes, transport) if coded else DenseBucket(sizes, transport, wire)
        self._samples = 0
        self._arrivals: dict[str, int] = {}
        self._sums: Sequence[Tensor] = ()

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

    def present(self, unit: Unit) -> bool:
        return unit.lead.grad is not None

    def receive(self) -> None:
        self._sums = self.bucket.wait()

    def finish(self, notes: Sequence[Note], write: bool) -> None:
        scale = self.pipeline.reference / max(1, sum(note.samples for note in notes))
        for unit, index, value in zip(self.units, self._indices(), self._sums, strict=True):
            reduced_already = any(note.dense[index] for note in notes)
            if write and not reduced_already and any(note.present[index] for note in notes):
                _write(unit.lead, value, scale)
        self._arrivals.clear()


def _write(parameter: torch.nn.Parameter, flat: Tensor, scale: float) -> None:
    """Replaces ``.grad`` by a flat tensor times a scale."""
    if parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = torch.empty_like(parameter)
    parameter.grad.copy_(flat.view(parameter.shape))
    if scale != 1.0:
        parameter.grad.mul_(scale)
