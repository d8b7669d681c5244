"""Gradients of one site: collected after backward, held while they cannot leave, and written before a step.

Batch normalisation is by the rows of all sites, where sites do not wait for each other. In synchronous steps sites
exchange statistics in the middle of forward and backward. Here each contribution contains those of its batches: of each
layer mean and variance, and the sums of deltas that backward takes over all rows. A site normalises a batch with its
own rows and with what the others have committed last. Statistics are part of the log, so that all replicas of one
version have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from ..errors import DamagedError, MismatchError, NonFiniteError
from ..exchange import Transport, codec
from ..exchange.factor_buckets import FactorPayload, finite, multiplies
from ..exchange.fields import checked
from ..hooks import Factor, stack_by_form
from ..options import Options
from ..step.fused.products import GradientProduct
from ..step.methods import Method, decode, decode_bias, feedback, is_product
from ..step.model_sync.batchnorm import SyncedForward, add_up, batch_norms, merge_statistics
from ..step.model_sync.private import private_parameters, whole_of
from ..step.model_sync.samples import SampleCounter, warn_of_unequal
from ..step.model_sync.structure import ModelStructure
from ..step.planning.partition import partition_parameters, show_inputs
from ..step.planning.planner import FirstStepReport, merge_reports
from ..step.units.base import Unit, begin_step, drop_cleared
from ..step.units.factor import FactorUnit

# Batch normalisation

Packed = dict[str, Tensor]
"""By name of a layer: mean, sums of squares, number of rows, weight, two sums of deltas; 4 n + 2 for n channels."""


class CommittedBatchNorms:
    """Batch normalisations of a model, with the statistics of all sites.

    In train mode a layer normalises by mean and variance over the rows of its batch and over those that other sites
    have committed last. In eval mode it is unchanged.

    Args:
        model: the model; its layers derived from `nn.BatchNorm1d`, `2d` and `3d` are normalised so.
        site: rank of this site.
        sites: number of sites.
        samples: counter of the samples of a forward pass.
        by_samples: whether the weight of a site is its number of samples; otherwise all have the same.
        lifetime: number of versions after which the statistics of a site that has committed no others do not count.

    Attributes:
        version: version that this site is at.
    """

    def __init__(
        self, model: nn.Module, site: int, sites: int, samples: SampleCounter, by_samples: bool, lifetime: int
    ) -> None:
        self.version = 0
        self._site, self._sites = site, sites
        self._samples = samples
        self._lifetime = lifetime
        self._layers = batch_norms(model)
        self._passes: list[_Pass] = []  # since the last call of `keep`
        self._held = {name: _Means() for name in self._layers}  # since the last call of `pack`
        self._committed: dict[int, tuple[int, Packed]] = {}  # by site: version, and the last statistics
        self._forwards = [
            SyncedForward(layer, partial(self._sums, name), samples if by_samples else None)
            for name, layer in self._layers.items()
        ]

    def _sums(self, name: str) -> _KnownSums:
        """Return the sums over rows that the next batch of a layer is normalised with."""
        others = [
            packed[name]
            for site, (version, packed) in sorted(self._committed.items())
            if site != self._site and name in packed and self.version - version < self._lifetime
        ]
        return _KnownSums(partial(self._record, name), others)

    def _record(self, name: str, forward: bool, values: Tensor) -> None:
        self._passes.append(_Pass(self._samples.forwards, name, forward, values))

    def keep(self) -> None:
        """Count the passes since the last call to the next contribution."""
        for each in self._passes:
            self._held[each.name].add(each.values, each.forward)
        self._passes = []

    def drop(self, *, but_last: bool = False) -> None:
        """Forget the passes since the last call of `keep`, whose gradients have been cleared.

        Args:
            but_last: whether those of the last call of the model stay, whose backward pass is beginning.
        """
        last = self._samples.forwards if but_last else -1
        self._passes = [each for each in self._passes if each.number == last]

    def pack(self) -> Packed:
        """Return the means over the passes that count to the next contribution, and begin anew.

        Raises:
            NonFiniteError: if they hold NaN or Inf.
        """
        held, self._held = self._held, {name: _Means() for name in self._layers}
        packed = {name: means.pack() for name, means in held.items() if means.forwards}
        for name, values in packed.items():
            if not finite(values):
                raise NonFiniteError(
                    f"NaN or Inf in the statistics of {name!r} of this site. Nothing has been sent, and the other "
                    "sites go on; the batch is left out if you go on, too"
                )
        return packed

    def check(self, packed: Any) -> Packed:
        """Return the statistics of a contribution.

        Raises:
            ValueError: if they are not those of this model's layers.
        """
        if not isinstance(packed, dict):
            raise ValueError("statistics of batch normalisation are missing")
        for name, values in packed.items():
            if name not in self._layers:
                raise ValueError(f"statistics of {name!r}, which is no batch normalisation here")
            numbers = 4 * self._layers[name].num_features + 2
            if not isinstance(values, Tensor) or values.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"the statistics of {name!r} are no numbers")
            if tuple(values.shape) != (numbers,) or not finite(values):
                raise ValueError(f"the statistics of {name!r} are not {numbers} finite numbers")
            channels = self._layers[name].num_features
            if bool((values[channels : 2 * channels + 2] < 0).any()):  # sums of squares, number of rows, weight
                raise ValueError(f"the statistics of {name!r} are not possible")
        return packed

    def follow(self, site: int, packed: Packed, version: int) -> None:
        """Take over the statistics of a contribution that has been committed.

        Args:
            site: rank of its site.
            packed: result of `check`.
            version: version that it has been committed to.
        """
        self._committed[site] = version, packed

    def state_dict(self) -> dict[int, tuple[int, Packed]]:
        """Return by site the age in versions of its last statistics, and these."""
        return {site: (self.version - version, packed) for site, (version, packed) in self._committed.items()}

    def load_state_dict(self, state: Mapping[int, tuple[int, Packed]]) -> None:
        """Restore what `state_dict` returned, at the present version.

        Args:
            state: the state; sites that there are no more are left out.
        """
        self._committed = {
            site: (self.version - age, dict(packed)) for site, (age, packed) in state.items() if site < self._sites
        }

    def detach(self) -> None:
        """Restore the forward of the layers."""
        for forward in self._forwards:
            forward.restore()


class _Pass(NamedTuple):
    """Forward or backward pass of a layer.

    Attributes:
        number: number of the call of the model.
        name: name of the layer.
        forward: whether it is a forward pass.
        values: mean, sums of squares, number of rows and weight, or the sums of deltas of a backward pass.
    """

    number: int
    name: str
    forward: bool
    values: Tensor


@dataclass
class _Means:
    """Means over passes of a layer, in double precision.

    Attributes:
        rows: sum over forward passes of (sum of rows, sum of their squares, number of rows, weight).
        deltas: sum over backward passes of their sums of deltas.
        dtype: type of the layer's statistics.
        forwards: number of forward passes.
        backwards: number of backward passes.
    """

    rows: Tensor | float = 0.0
    deltas: Tensor | float = 0.0
    dtype: torch.dtype = torch.float32
    forwards: int = 0
    backwards: int = 0

    def add(self, values: Tensor, forward: bool) -> None:
        """Add a pass, see `_Pass`."""
        wide = values.double().cpu()
        if not forward:
            self.deltas = wide + self.deltas
            self.backwards += 1
            return
        mean, squares, rest = _split(wide)
        self.rows = torch.cat([mean * rest[0], squares + mean.square() * rest[0], rest]) + self.rows
        self.dtype = values.dtype
        self.forwards += 1

    def pack(self) -> Tensor:
        """Return the means as one vector, see `Packed`."""
        assert isinstance(self.rows, Tensor)
        sums, squares, rest = _split(self.rows / self.forwards)
        mean = sums / rest[0].clamp_min(1.0)
        spread = (squares - mean.square() * rest[0]).clamp_min(0.0)
        deltas = torch.zeros(2 * len(mean), dtype=torch.float64) + self.deltas / max(self.backwards, 1)
        return torch.cat([mean, spread, rest, deltas]).to(self.dtype)


def _split(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first and the second half of all but two numbers, and these."""
    first, second, rest = values.tensor_split([len(values) // 2 - 1, len(values) - 2])
    return first, second, rest


class _KnownSums:
    """Sums over rows that one batch of a layer is normalised with: its own, and the last of other sites.

    Args:
        record: called with whether a pass is a forward pass, and its values.
        others: statistics of other sites.
    """

    def __init__(self, record: Callable[[bool, Tensor], None], others: list[Tensor]) -> None:
        self._record = record
        self._others = others

    def of_forward(self, values: Tensor) -> Tensor:
        self._record(True, values)
        return merge_statistics([values, *(each[: len(values)].to(values) for each in self._others)])

    def of_backward(self, values: Tensor, weight: float) -> Tensor:
        self._record(False, values)
        size = len(values)
        return add_up([values * weight, *(each[-size:].to(values) * each[size + 1] for each in self._others)])


# Gradients


class UnitGradient(NamedTuple):
    """Gradient of one unit at one site: rows, gradients that have been formed, or both.

    Attributes:
        factor: the rows, in the unit's form.
        dense: formed gradients by name of the parameter.
    """

    factor: Factor | None
    dense: dict[str, Tensor]

    def times(self, weight: float) -> UnitGradient:
        """Return the gradient times a number."""
        factor = self.factor
        if factor is not None:
            bias = None if factor.bias is None else factor.bias * weight
            factor = replace(factor, deltas=factor.deltas * weight, bias=bias)
        return UnitGradient(factor, {name: gradient * weight for name, gradient in self.dense.items()})

    def plus(self, other: UnitGradient) -> UnitGradient:
        """Return the sum with another gradient of the same unit."""
        factors = [each for each in (self.factor, other.factor) if each is not None]
        dense = dict(self.dense)
        for name, gradient in other.dense.items():
            dense[name] = dense[name] + gradient if name in dense else gradient
        return UnitGradient(stack_by_form(factors)[0] if factors else None, dense)


class UnsentGradients:
    """Mean over the samples of some batches of their gradients.

    Attributes:
        samples: number of samples.
        base: version at which the first of them was computed.
        batches: number of batches.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.base = 0
        self.batches = 0
        self._sums: dict[str, UnitGradient] = {}  # times samples, unless it is a single batch

    def add(self, gradients: dict[str, UnitGradient], samples: int, base: int) -> None:
        """Add the gradients of a batch.

        Args:
            gradients: the gradients by name of the unit.
            samples: the batch's samples.
            base: version at which they were computed.
        """
        if not self.batches:
            self._sums, self.base = gradients, base
        else:
            if self.batches == 1:
                self._sums = {name: each.times(self.samples) for name, each in self._sums.items()}
            for name, each in gradients.items():
                weighted = each.times(samples)
                self._sums[name] = self._sums[name].plus(weighted) if name in self._sums else weighted
        self.batches += 1
        self.samples += samples

    def mean(self) -> dict[str, UnitGradient]:
        """Return the mean over samples, by name of the unit."""
        if self.batches == 1:
            return self._sums
        return {name: each.times(1 / self.samples) for name, each in self._sums.items()}


class ModelGradients:
    """Gradients of a model at one site, by units that are the same at all sites, with the samples they stand for.

    Args:
        model: the shared part of the model.
        method: the method.
        options: the options.
        site: rank of this site.
        sites: number of sites.
        lifetime: number of versions for which statistics of batch normalisation count.

    Attributes:
        units: the units, in the model's order.
        counter: counter of samples.
        norms: batch normalisations with the statistics of all sites; None without such.
        reference: samples of all sites in the first step; 0 before it.
        reports: reports of all sites on their first steps; empty before it.
        expected_reference: `reference` of a training that this one resumes, which it takes over; else 0.
        pending: whether gradients have arrived that have not been collected.
        counted: samples of the passes of the last collection.
        private: gradients of private parameters, of the last collection.
    """

    def __init__(
        self, model: nn.Module, method: Method, options: Options, site: int, sites: int, lifetime: int
    ) -> None:
        self._method = method
        self._options = options
        self._alone = sites == 1
        self._by_samples = options.weighting == "samples"
        self._structure = ModelStructure(model)
        self._own = [*private_parameters(model).values()]
        self.private: dict[nn.Parameter, Tensor] = {}
        self.counter = SampleCounter(
            whole_of(model), self.check_unchanged, lambda: self._drop_cleared(begins=True), self._by_samples
        )
        found = partition_parameters(model, method, (), options.dense == "lowrank")
        self._capture, self.units = found.capture, found.units
        show_inputs(method, found.units)
        method.batch = lambda: self.counted
        self._order: list[Unit] = []
        self.reports: Sequence[FirstStepReport] = ()
        self.reference = self.expected_reference = self.counted = 0
        self.pending = self._scaled = False
        for unit in self.units:
            unit.watch(WeakMethod(self._arrived))
        feedback.watch()
        self.norms: CommittedBatchNorms | None = None
        if options.sync_batchnorm:
            self.norms = CommittedBatchNorms(model, site, sites, self.counter, self._by_samples, lifetime)

    def check_unchanged(self) -> None:
        """Raise RuntimeError if layers or parameters have been added, removed, frozen or freed."""
        if not (self._structure.same_tensors() and self._structure.same_training()):
            raise RuntimeError(
                "the model has changed since the ParameterServer was made: call finish() and detach() on all sites, "
                "and make a new one"
            )

    # Backward passes

    def _drop_cleared(self, *, begins: bool = False) -> None:
        """Discard passes whose gradients have been cleared, except one whose backward begins."""
        cleared = drop_cleared(self.units)
        if cleared and all(cleared):
            self.counter.discard()
            self.pending = False
            if self.norms is not None:
                self.norms.drop(but_last=begins)

    def _arrived(self, unit: Unit) -> None:
        """Record that a backward pass has delivered a unit's gradient; in the first step, in which order."""
        self.counter.deliver()
        unit.arrivals += 1
        self.pending = True
        self._scaled |= feedback.running().value != 1.0
        if not self.reference and unit not in self._order:
            self._order.append(unit)
        if isinstance(unit, FactorUnit):
            unit.placeholders.put()
            unit.keep(self.counter.owned)

    def collect(self, transport: Transport) -> tuple[dict[str, UnitGradient], int]:
        """Return the gradients since the last call by name of the unit, and their samples; clear ``.grad``.

        Args:
            transport: the transport; in the first call all sites report over it.

        Raises:
            ValueError: if a GradScaler has scaled the loss.
        """
        self._drop_cleared()
        self.counter.follow()
        samples = self.counter.weight(self.pending, self._alone)
        scaled = self._scaled
        if not scaled and not self.reference:
            own = FirstStepReport.of(
                self.units, self._order, self._options.share_inputs, samples, self.counter.count, None
            )
            every = transport.gather_present(own)
            reports = [*checked(every, FirstStepReport, "report", transport, FirstStepReport.counts).values()]
            if any(each.samples for each in reports):
                self.merge(reports)
                if not self._by_samples:
                    warn_of_unequal([each.batch for each in reports if each.samples])
        taken = self._take()
        self.counted = self.counter.count
        self.counter.reset()
        self._method.loss_scales.end_step()
        self.pending = self._scaled = False
        if scaled:
            raise ValueError(
                "a ParameterServer cannot train with a GradScaler, whose scale each site changes on its own: use "
                "bfloat16, which needs none"
            )
        if self.norms is not None and taken and samples:
            self.norms.keep()
        elif self.norms is not None:
            self.norms.drop()
        return taken, samples

    def _take(self) -> dict[str, UnitGradient]:
        """Return the gradients that have arrived, by name of the unit, and clear ``.grad``."""
        taken: dict[str, UnitGradient] = {}
        for unit in self.units:
            factor = None
            if isinstance(unit, FactorUnit):
                unit.resolve()
                factor = unit.take()
            dense = {name: each.grad.detach() for name, each in unit.parameters.items() if each.grad is not None}
            for parameter in unit.parameters.values():
                parameter.grad = None
            if factor is not None or dense:
                taken[unit.name] = UnitGradient(factor, dense)
        self.private = {each: each.grad for each in self._own if each.grad is not None}
        for parameter in self._own:
            parameter.grad = None
        begin_step(self.units)
        return taken

    def merge(self, reports: Sequence[FirstStepReport]) -> None:
        """Complete the units by what all sites report on their first step, by rank."""
        self.reports = reports
        merged = merge_reports(reports, self.units, self._method, len(reports))
        self.units = [new for unit in self.units for new in self._unless_dense(unit, merged.reasons.get(unit.name))]
        self.reference = self.expected_reference or merged.samples

    def _unless_dense(self, unit: Unit, reason: str | None) -> Sequence[Unit]:
        """Return a unit, or the dense units that replace it."""
        if not isinstance(unit, FactorUnit) or reason is None:
            return [unit]
        units = unit.become_dense(self._capture, WeakMethod(self._arrived))
        unit.placeholders.resolve()
        return units

    # Steps

    def write(self, gradients: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write gradients to ``.grad``.

        Args:
            gradients: by name of the unit, the gradients of its parameters by name.
        """
        for unit in self.units:
            for name, gradient in gradients.get(unit.name, {}).items():
                parameter = unit.parameters[name]
                parameter.grad = gradient if gradient.is_sparse else gradient.view(parameter.shape)

    def clear(self) -> None:
        """Clear ``.grad`` of all parameters."""
        for unit in self.units:
            for parameter in unit.parameters.values():
                parameter.grad = None

    def release(self) -> None:
        """Remove all hooks from the model; gradients that have arrived are dropped."""
        self._take()
        for unit in self.units:
            if isinstance(unit, FactorUnit):
                unit.placeholders.resolve()
            unit.release()
        self._capture.detach()
        self.counter.detach()
        if self.norms is not None:
            self.norms.detach()
        feedback.unwatch()


Content = dict[str, Any]
"""Decoded contribution: by name of a unit, its rows and its formed gradients, see `ContributionCodec.encode`."""


class DecodedContribution(NamedTuple):
    """Decoded contribution.

    Attributes:
        settings: settings of the optimizer's groups at its site.
        content: its gradients.
        statistics: its statistics of batch normalisation; None where these are not exchanged.
    """

    settings: Any
    content: Content
    statistics: Packed | None


class ContributionCodec:
    """Encoding of one site's gradients, and decoding of those of all sites in a commit.

    Args:
        gradients: the model's gradients.
        method: the method.
        options: the options.
    """

    def __init__(self, gradients: ModelGradients, method: Method, options: Options) -> None:
        self._gradients = gradients
        self._norms = gradients.norms
        self._method = method
        self._options = options
        self._lost = feedback.ErrorFeedback(enabled=True)  # what rounding to int8 takes from formed gradients

    def state_dict(self) -> dict[str, Tensor]:
        """Return what rounding has taken from formed gradients, by name."""
        lost: dict[str, Tensor] = self._lost.state_dict()["errors"]
        return lost

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: the state.
        """
        sizes = {name: each.numel() for unit in self._gradients.units for name, each in unit.parameters.items()}
        lost = {name: each.reshape(-1)[: sizes[name]] for name, each in state.items()}  # once in whole rows
        self._lost.load_state_dict({"errors": lost})

    # Encoding

    def encode(self, gradients: Mapping[str, UnitGradient], samples: int, settings: Any) -> bytes:
        """Encode a contribution; state that the method keeps is that of the next one then.

        Args:
            gradients: the gradients by name of the unit.
            samples: samples that they stand for.
            settings: settings of the optimizer's groups.

        Raises:
            NonFiniteError: if a gradient holds NaN or Inf; nothing has changed then.
        """
        statistics = None if self._norms is None else self._norms.pack()
        content: Content = {}
        weight = samples / self._gradients.reference
        self._method.weight = float(bool(samples))
        try:
            for unit in self._gradients.units:
                if unit.name in gradients:
                    factor, dense = gradients[unit.name]
                    rows = None if factor is None else self._encode_rows(unit, factor)
                    formed = {name: self._encode_dense(unit, name, each, weight) for name, each in dense.items()}
                    content[unit.name] = (rows, formed)
        except NonFiniteError:
            for unit in self._gradients.units:
                self._method.rollback(unit.name)
                for name in unit.parameters:
                    self._lost.rollback(name)
            raise
        for unit in self._gradients.units:
            self._method.commit(unit.name)
            for name in unit.parameters:
                self._lost.commit(name)
        return codec.encode((settings, content, statistics))

    def _encode_rows(self, unit: Unit, factor: Factor) -> tuple[Tensor | None, ...] | None:
        assert isinstance(unit, FactorUnit)
        if not factor.rows and factor.bias is None:
            return None
        self._method.check_inputs(unit.name)
        try:
            if factor.form.encoded:
                self._method.check_rank(unit.name, factor.rows)
                payload = self._method.encode(unit.name, factor, unit.bias is not None)
            else:
                payload = self._method.encode_table(unit.name, factor, unit.wire(self._options))
        except FloatingPointError as error:
            raise not_finite(unit.name) from error
        if not payload.finite():
            raise not_finite(unit.name)
        wire = unit.wire(self._options)
        bias = None if payload.bias is None else wire.encode(payload.bias[None])[0]
        right = payload.right if factor.form.table_rows else wire.encode(payload.right)
        return wire.encode(payload.left), right, bias

    def _encode_dense(self, unit: Unit, name: str, gradient: Tensor, weight: float) -> Tensor:
        """Encode a formed gradient times the site's samples over the reference."""
        if not finite(gradient):
            raise not_finite(name)
        flat = (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1) * weight
        wire = unit.wire(self._options)
        if not wire.quantised:
            return wire.encode(flat)
        flat = flat.float()
        lost, rest = self._lost.prepare(name, flat)
        if lost is not None:
            flat = flat + lost
        encoded = wire.encode_flat(flat)
        torch.sub(flat, wire.decode_flat(encoded, flat.numel()), out=rest)
        return encoded

    # Decoding

    def unpack(self, body: bytes | bytearray, site: str) -> DecodedContribution:
        """Return a decoded contribution, checked.

        Args:
            body: what `encode` has returned at its site.
            site: name of the site, for messages.

        Raises:
            MismatchError: if it does not fit this site's model.
        """
        units = {unit.name: unit for unit in self._gradients.units}
        try:
            settings, content, statistics = codec.decode(body)
            if (statistics is None) != (self._norms is None):
                raise ValueError("one of both sites sends no statistics of batch normalisation")
            if self._norms is not None:
                self._norms.check(statistics)
            for name, (rows, formed) in content.items():
                self._check(units[name], rows, formed)
        except (DamagedError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise MismatchError(f"the contribution of {site} does not fit this site's model: {error}") from error
        return DecodedContribution(settings, content, statistics)

    def _check(self, unit: Unit, rows: Any, formed: Any) -> None:
        """Raise ValueError if shapes or types of a unit's parts are not possible."""
        wire = unit.wire(self._options)
        if rows is not None:
            left, right, bias = rows
            if not isinstance(unit, FactorUnit):
                raise ValueError(f"{unit.name!r} has no factors here")
            out, width = unit.widths
            expected = (len(left), wire.row_size(out))
            if tuple(left.shape) != expected or left.dtype != wire.dtype:
                raise ValueError(f"rows of {unit.name!r} are {left.dtype} of shape {tuple(left.shape)}")
            if unit.form is not None and unit.form.table_rows:
                if right.dtype not in (torch.int32, torch.int64) or len(right) != len(left):
                    raise ValueError(f"row numbers of {unit.name!r} are {right.dtype} of shape {tuple(right.shape)}")
                if right.numel() and not 0 <= int(right.min()) <= int(right.max()) < unit.form.table_rows:
                    raise ValueError(f"row numbers of {unit.name!r} are out of range")
            elif tuple(right.shape) != (len(left), wire.row_size(width)) or right.dtype != wire.dtype:
                raise ValueError(f"rows of {unit.name!r} are {right.dtype} of shape {tuple(right.shape)}")
            sends_bias = unit.bias is not None and self._method.traits.sends_bias
            size = wire.row_size(unit.parameters[unit.bias].numel()) if sends_bias and unit.bias is not None else 0
            if (bias is not None) != sends_bias or (bias is not None and bias.numel() != size):
                raise ValueError(f"the bias of {unit.name!r} does not fit")
            table = unit.form is not None and unit.form.table_rows
            values = [left, *([] if table else [right]), *([] if bias is None else [bias[None]])]
            if not all(multiplies(wire.decode(each)) for each in values):
                raise ValueError(f"rows of {unit.name!r} hold NaN, Inf or numbers whose products overflow")
        for name, value in formed.items():
            if value.numel() != wire.flat_size(unit.parameters[name].numel()) or value.dtype != wire.dtype:
                raise ValueError(f"the gradient of {name!r} has {value.numel()} elements of {value.dtype}")
            if not finite(wire.decode_flat(value, unit.parameters[name].numel())):
                raise ValueError(f"the gradient of {name!r} holds NaN or Inf")

    def merge(
        self,
        contents: Sequence[Content],
        samples: Sequence[float],
        scales: Sequence[float],
        apart: Set[nn.Parameter],
    ) -> tuple[dict[str, dict[str, Tensor]], dict[nn.Parameter, GradientProduct]]:
        """Compute the gradient of a commit.

        Args:
            contents: the contributions, in the order of the commit.
            samples: samples of each.
            scales: factor of each.
            apart: weights whose gradients are not formed where they are products.

        Returns:
            By name of the unit, the formed gradients of its parameters by name; and by weight, the gradients that are
            not formed.
        """
        total = sum(count * scale for count, scale in zip(samples, scales, strict=True))
        weights = [count * scale / total for count, scale in zip(samples, scales, strict=True)]
        merged: dict[str, dict[str, Tensor]] = {}
        products: dict[nn.Parameter, GradientProduct] = {}
        for unit in self._gradients.units:
            found = [each.get(unit.name, (None, {})) for each in contents]
            rows = [(each, weight) for (each, _), weight in zip(found, weights, strict=True) if each is not None]
            gradients: dict[str, Tensor] = {}
            if rows:
                assert isinstance(unit, FactorUnit)
                assert unit.form is not None
                payloads, shares = self._decode_rows(unit, rows), [weight for _, weight in rows]
                formed = any(unit.name in dense for _, dense in found)
                with_bias, exact = unit.bias is not None, self._method.traits.exact
                if unit.lead in apart and not formed and is_product(unit.form):
                    products[unit.lead] = GradientProduct(payloads, shares, unit.form.transposed)
                    bias = decode_bias(payloads, shares, unit.form) if with_bias else None
                else:
                    gradients[unit.name], bias = decode(payloads, shares, with_bias, site_by_site=exact, form=unit.form)
                if unit.bias is not None and bias is not None:
                    gradients[unit.bias] = bias
            for name in unit.parameters:
                parts = [(dense[name], scale) for (_, dense), scale in zip(found, scales, strict=True) if name in dense]
                if parts:
                    dense = self._sum_dense(unit, name, parts).mul_(self._gradients.reference / total)
                    known = gradients.get(name)
                    gradients[name] = dense if known is None else known.to_dense().reshape(-1) + dense
            if gradients:
                merged[unit.name] = gradients
        return merged, products

    def _decode_rows(self, unit: FactorUnit, rows: Sequence[tuple[Any, float]]) -> list[FactorPayload]:
        """Return what the sites of a commit have sent of a unit."""
        wire, device, dtype = unit.wire(self._options), unit.lead.device, unit.lead.dtype
        payloads = []
        for (left, right, bias), _ in rows:
            right = right if unit.form is not None and unit.form.table_rows else wire.decode(right)
            bias = None if bias is None else wire.decode(bias[None])[0]
            payloads.append(FactorPayload(wire.decode(left), right, bias).to(device, dtype))
        return payloads

    def _sum_dense(self, unit: Unit, name: str, parts: Sequence[tuple[Tensor, float]]) -> Tensor:
        """Return the sum of formed gradients, each times its factor, in the order of the commit."""
        parameter, wire = unit.parameters[name], unit.wire(self._options)
        total: Tensor | None = None
        for encoded, scale in parts:
            value = wire.decode_flat(encoded, parameter.numel())
            value = value.to(parameter.device, torch.promote_types(value.dtype, torch.float32))
            value = value * scale if scale != 1.0 else value
            total = value.clone() if total is None else total.add_(value)
        assert total is not None
        return total.to(parameter.dtype)


def not_finite(name: str) -> NonFiniteError:
    """Return the error about NaN or Inf in the gradient of a name."""
    return NonFiniteError(
        f"NaN or Inf in the gradient of {name!r} of this site. Nothing has been sent, and the other sites go on; the "
        "batch is left out if you go on, too"
    )
