"""Noise of the gradient, estimated while training, the same at all sites to the bit.

In a measured step, `NoiseProbe` measures this site's backward passes, sites exchange their `SiteNorms`, and
`GradientNoise` averages the estimates that follow from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..exchange import Transport
from ..exchange.codec import register
from ..exchange.fields import COUNT, checked, fits
from ..hooks import LINEAR, CapturedLayer, Form, LayerCapture, OwnHook, Recorder, capturable_layers
from ..step.methods.base import GradientPath
from ..step.methods.feedback import LossScales
from ..step.model_sync.samples import SampleCounter
from ..step.reducer.handler import StepHeader
from ..step.units.base import Unit, matrix_shape
from ..step.units.factor import FactorUnit
from ..support.signature import whole_number
from . import noise_formulas as formulas
from .noise_formulas import NO_ESTIMATE, SKETCH, Call, NoiseEstimate, Part

_EVERY = 32  # a measured step may take up to twice as long as others
_MEMORY = 300.0  # steps over which estimates are averaged, about
_MOST_PARTS = 256  # micro-batches of a site, whose products take a time that grows with the square of their number
_LARGEST = 1e150  # estimate that counts
_AS_THEY_ARE = (GradientPath.ALLREDUCE, GradientPath.FACTORS, GradientPath.ACTIVATIONS)


class GradientNoise:
    """Noise of the gradient of the mean loss; an attribute of `dadplug.GradientReduction`.

    With the gradients of single samples of expectation G and covariance Sigma, a batch of B samples has a gradient of
    expectation G and covariance Sigma / B. The estimates are averages over about the last 300 steps, are made every
    `every` steps, and are the same at all sites.

    Reading ``reduction.noise`` at one site or more turns the estimates on at all of them, for the steps to come.

    Attributes:
        base_batch: samples of all sites in a step for which the learning rate has been chosen, which `gain` refers to;
            None before it is set. Set it to the same number at all sites.
        batch: samples of all sites in the last step; 0 before the first.
        wish: `every` as this site asks for it; 0 where it does not ask.

    Example:
        >>> noise = reduction.noise
        >>> for inputs, targets in loader:
        ...     train(inputs, targets)
        >>> noise.scale, noise.layers["fc1.weight"].variance
    """

    def __init__(self) -> None:
        self.base_batch: int | None = None
        self.batch = self.wish = 0
        self._agreed_every = 0
        self._next = -1  # step of the next estimate
        self._averages: dict[str, _Average] = {}
        self._total = NO_ESTIMATE
        self._seen: set[str] = set()  # parameters that have had a gradient in the last estimate
        self._probe: NoiseProbe | None = None
        self._pair: _Pair | None = None  # that waits for the next step

    # Results

    @property
    def variance(self) -> float:
        """Trace of the covariance of the gradients of single samples, tr(Sigma); NaN before the first estimate."""
        return self._total.variance

    @property
    def squared_norm(self) -> float:
        """Squared norm of the gradient's expectation, ``|G|^2``; NaN before the first estimate.

        The estimate has no bias, so it may be negative where the noise is much larger than the gradient.
        """
        return self._total.squared_norm

    @property
    def scale(self) -> float:
        """The simple noise scale ``tr(Sigma) / |G|^2``, in samples; NaN before the first estimate.

        A batch of this many samples has a gradient whose noise is as large as the gradient. Infinite where
        `squared_norm` is not positive.
        """
        return self._total.scale

    @property
    def layers(self) -> dict[str, NoiseEstimate]:
        """Variance, squared norm and scale by name of the parameter."""
        return {name: average.value for name, average in sorted(self._averages.items())}

    @property
    def every(self) -> int:
        """Number of steps from one estimate to the next; 32 by default. Of several sites' numbers the smallest counts.

        Raises:
            ValueError: if it is set to something else than a whole number of at least 1.
        """
        return self._agreed_every or self.wish or _EVERY

    @every.setter
    def every(self, steps: int) -> None:
        whole_number(1)("noise.every", steps)
        self.wish = steps

    def gain(self, batch: int | None = None, base_batch: int | None = None) -> float:
        """Compute AdaScale's gain: the steps with the base batch that one step with a batch is worth.

        Args:
            batch: samples of all sites in a step; those of the last step where None.
            base_batch: samples of a step for which the learning rate has been chosen; `base_batch` of this object
                where None.

        Returns:
            A number between 1 and ``batch / base_batch``; 1.0 without a base batch or an estimate.
        """
        batch, base_batch = batch or self.batch, base_batch or self.base_batch
        return formulas.gain(self._total, batch, base_batch) if batch and base_batch else 1.0

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, the time of the next estimate, and what this site has asked for."""
        return {
            "base_batch": self.base_batch,
            "batch": self.batch,
            "asked": self.wish,
            "every": self._agreed_every,
            "next": self._next,
            "averages": {name: list(average) for name, average in self._averages.items()},
            "seen": sorted(self._seen),
            "pair": None if self._pair is None else (sorted(self._pair.gradients), self._pair.samples),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: the state.

        Raises:
            ValueError: if it has an entry of another type, or a number out of range.
        """
        counts = [state[name] or 0 for name in ("base_batch", "batch", "asked", "every")]
        plain = fits(counts, list[int]) and fits(state["next"], int) and all(0 <= each <= COUNT for each in counts)
        if not (plain and fits(state["averages"], dict[str, list[float]]) and fits(state["seen"], list[str])):
            raise ValueError("the state of the noise has an entry of another type, or a number out of range")
        self.base_batch, self.batch = state["base_batch"], state["batch"]
        self.wish, self._agreed_every, self._next = state["asked"] or 0, state["every"], state["next"]
        self._averages = {name: _Average(*values) for name, values in state["averages"].items()}
        self._seen = set(state["seen"])
        names, samples = state["pair"] or ([], 0.0)
        self._pair = _Pair(dict.fromkeys(names), samples) if names else None
        self._sum_up()

    # A step, called by the reduction

    def turn_on(self) -> None:
        """Ask all sites for estimates from the next step on."""
        self.wish = self.wish or _EVERY

    def prepare(self, model: nn.Module, units: Sequence[Unit], counter: SampleCounter, step: int) -> None:
        """Install the probe if the gradients of a step that begins are to be measured.

        Args:
            model: the model.
            units: the units of the present plan.
            counter: counts the samples of the step.
            step: number of the step.
        """
        if step == self._next and self._probe is None:
            self._probe = NoiseProbe(model, units, counter, step)

    def discard(self) -> None:
        """Forget the backward passes of the step so far, whose gradients have been cleared."""
        if self._probe is not None:
            self._probe.discard()

    def end_probe(self) -> None:
        """Remove the probe, at the end of a step or when the plan changes."""
        if self._probe is not None:
            self._probe.detach()
            self._probe = None

    def measure(
        self,
        step: int,
        headers: Sequence[StepHeader],
        samples: int,
        units: Sequence[Unit],
        transport: Transport,
        scales: LossScales,
    ) -> None:
        """Update the estimates at the end of a step, where it is time to; all sites must call it.

        Args:
            step: number of the step.
            headers: the headers of all sites.
            samples: samples of this site.
            units: the units of the plan, with agreed gradients in ``.grad``.
            transport: the transport.
            scales: the loss scales that gradients contain.

        Raises:
            DroppedError: if the other sites have gone on without this one.
        """
        weights = {rank: header.samples for rank, header in enumerate(headers) if header.samples}
        if weights:
            total, due = sum(weights.values()), step == self._next
            self.batch = sum(headers[rank].batch or 1 for rank in weights)
            shares = {rank: count / total for rank, count in weights.items()}
            if due or self._pair is not None:
                own = _Gradients.of(units, scales)
                if self._pair is not None:
                    self._estimate_pair(step, shares, samples, own, transport)
                if due:
                    self._estimate(step, shares, samples, own, transport)
        # When the next estimate is due:
        wishes = [header.noise_every for header in headers if header.noise_every]
        every = min(wishes, default=self._agreed_every)
        if every != self._agreed_every:
            self._agreed_every, self._next = every, step + 1
        elif every and self._next <= step:
            self._next = step + every

    def _estimate(
        self, step: int, shares: Mapping[int, float], samples: int, own: _Gradients, transport: Transport
    ) -> None:
        """Update the averages by what all sites have measured in this step."""
        probe = self._probe if self._probe is not None and self._probe.names == [*own.values] else None
        report = _report(probe, samples, own)
        every = checked(transport.gather_present(report), SiteNorms, "report", transport, lambda each: [each.samples])
        if not shares.keys() <= every.keys():
            return  # a site has left in the meantime
        sites = [(shares[rank], every[rank]) for rank in sorted(shares)]
        counts = [(share, site.samples) for share, site in sites]
        alike = [report, *(each for _, each in sites)]
        if len({(each.norms.shape[1:], each.sketched.shape[1:], each.agreed.shape) for each in alike}) > 1:
            return  # they have measured other parameters
        if not all(site.parts for _, site in sites):
            return  # a site has begun its plan anew, and measured nothing
        estimates = _in_range(lambda: estimate_step(sites, [*own.values], own.compressed))
        self._averages = {name: each for name, each in self._averages.items() if name in estimates}
        self._seen = set(estimates)
        self._add(step, estimates)
        left = [name for name, estimate in estimates.items() if math.isnan(estimate.squared_norm)]
        if left:
            self._pair = _Pair({name: own.copy(name) for name in left}, _effective_samples(counts))

    def _estimate_pair(
        self, step: int, shares: Mapping[int, float], samples: int, own: _Gradients, transport: Transport
    ) -> None:
        """Update the averages by the agreed gradients of this step and the one before."""
        pair, self._pair = self._pair, None
        assert pair is not None
        report, kind = (samples, pair.norms(own)), tuple[int, Tensor]
        every = checked(transport.gather_present(report), kind, "report", transport, lambda each: each[:1])
        if shares.keys() <= every.keys():
            counts = [(shares[rank], every[rank][0]) for rank in sorted(shares)]
            norms = [every[rank][1] for rank in sorted(shares)]
            if len({(each.shape, each.dtype) for each in (report[1], *norms)}) > 1:
                return  # they have measured other parameters
            self._add(step, _in_range(lambda: pair.estimate(_effective_samples(counts), norms)))

    def _add(self, step: int, estimates: Mapping[str, NoiseEstimate]) -> None:
        """Add estimates to the averages; those out of range do not count."""
        for name, estimate in estimates.items():
            if abs(estimate.variance) < _LARGEST and abs(estimate.squared_norm) < _LARGEST:
                before = self._averages.get(name)
                self._averages[name] = _Average.after(before, step, estimate, max(1, self._agreed_every))
        self._sum_up()

    def _sum_up(self) -> None:
        values = [average.value for _, average in sorted(self._averages.items())]
        if not values or len(values) < len(self._seen):
            self._total = NO_ESTIMATE
        else:
            sums = (math.fsum(numbers) for numbers in zip(*values, strict=True))
            self._total = NoiseEstimate(*sums)


class _Average(NamedTuple):
    """Average of estimates, in which older ones count less.

    Attributes:
        variance: weighted sum of the variances.
        squared_norm: weighted sum of the squared norms.
        weight: sum of the weights.
        step: step of the last estimate.
    """

    variance: float
    squared_norm: float
    weight: float
    step: int

    @classmethod
    def after(cls, before: _Average | None, step: int, estimate: NoiseEstimate, every: int) -> _Average:
        """Return the average with one more estimate; the first one counts as one that comes `every` steps after it."""
        if before is None:
            before = cls(0.0, 0.0, 0.0, step - every)
        keep = _MEMORY / (_MEMORY + step - before.step)
        variance = keep * before.variance + (1.0 - keep) * estimate.variance
        squared_norm = keep * before.squared_norm + (1.0 - keep) * estimate.squared_norm
        return cls(variance, squared_norm, keep * before.weight + (1.0 - keep), step)

    @property
    def value(self) -> NoiseEstimate:
        """The average."""
        return NoiseEstimate(self.variance / self.weight, self.squared_norm / self.weight)


# Agreed gradients


class _Gradients(NamedTuple):
    """Agreed gradients of a step.

    Attributes:
        values: the gradients by name of the parameter, sorted; None where there is none.
        scales: the loss scales that they contain, by name.
        compressed: names of the parameters whose agreed gradient is an approximation, sorted.
    """

    values: dict[str, Tensor | None]
    scales: dict[str, float]
    compressed: list[str]

    @classmethod
    def of(cls, units: Sequence[Unit], scales: LossScales) -> _Gradients:
        """Return the agreed gradients of units, which contain loss scales."""
        parameters = {name: (each, unit.name) for unit in units for name, each in unit.parameters.items()}
        found = {name: parameters[name] for name in sorted(parameters)}
        values = {name: each.grad for name, (each, _) in found.items()}
        return cls(values, {name: scales.of(unit) for name, (_, unit) in found.items()}, _compressed(units))

    def copy(self, name: str) -> Tensor | None:
        """Return a copy of a gradient, without its loss scale."""
        value = self.values.get(name)
        return None if value is None else value.detach() / self.scales[name]


def _compressed(units: Sequence[Unit]) -> list[str]:
    """Return the names of the weights whose agreed gradient is an approximation, sorted."""
    return sorted(unit.name for unit in units if unit.path not in _AS_THEY_ARE)


@dataclass
class _Pair:
    """Agreed gradients that wait for those of the next step, to be compared with them.

    Attributes:
        gradients: by name of the parameter; None at a site that does not have it.
        samples: number of samples of a batch with the same noise.
    """

    gradients: Mapping[str, Tensor | None]
    samples: float

    def norms(self, gradients: _Gradients) -> Tensor:
        """Return the squared norms of each first and second gradient, and of their difference.

        Args:
            gradients: the second ones.

        Returns:
            A tensor of shape (parameters in the order of their names, 3); NaN where a gradient is missing.
        """
        rows = []
        for name, first in sorted(self.gradients.items()):
            second = gradients.copy(name)
            if first is None or second is None or first.is_sparse != second.is_sparse:
                rows.append(torch.full((3,), torch.nan, dtype=torch.float64))
            else:
                rows.append(torch.stack([_square_of(first), _square_of(second), _square_of(second - first)]).cpu())
        return torch.stack(rows)

    def estimate(self, samples: float, norms: Sequence[Tensor]) -> dict[str, NoiseEstimate]:
        """Estimate the noise, by name of the parameter.

        Args:
            samples: number of samples of a batch with the noise of the second gradients.
            norms: what `norms` returned at each site.
        """
        estimates = {}
        total = self.samples + samples
        known = [_first_known([each[:, column] for each in norms]) for column in range(3)]
        for name, first, second, difference in zip(sorted(self.gradients), *known, strict=True):
            parts = [
                Part(self.samples, self.samples / total, first, math.nan),
                Part(samples, samples / total, second, math.nan),
            ]
            product = 0.5 * (first + second - difference)
            norm = formulas.norm_of_mean(parts, [[0.0, product], [product, 0.0]])
            estimates[name] = NO_ESTIMATE if math.isnan(difference) else formulas.between_parts(parts, norm)
        return estimates


# What a site measures


@register
@dataclass(frozen=True)
class SiteNorms:
    """Squared norms of the gradients of one site in one step, as it sends them to the others.

    Attributes:
        samples: number of samples of the site.
        parts: samples of each micro-batch.
        norms: of shape (micro-batches, parameters), squared norms of the gradients; NaN where they are not known.
        squares: of the same shape, sums over samples of the squared norms of their gradients.
        sketched: of shape (micro-batches, parameters that are compressed, numbers of a sketch).
        agreed: of shape (parameters,), squared norms of the agreed gradients; NaN where there is none.
    """

    samples: int
    parts: list[float]
    norms: Tensor
    squares: Tensor
    sketched: Tensor
    agreed: Tensor

    def __post_init__(self) -> None:
        """Check that the numbers belong together, as they may come from another site.

        Raises:
            ValueError: if they do not.
        """
        tensors = (self.norms, self.squares, self.sketched, self.agreed)
        rows, shapes = len(self.parts), [[*each.shape] for each in tensors]
        places, sketches = shapes[3][:1], shapes[2][1:2]
        expected = [[rows, *places], [rows, *places], [rows, *sketches, SKETCH**2], places]
        if shapes != expected or rows > _MOST_PARTS or any(each.dtype != torch.float64 for each in tensors):
            raise ValueError(f"norms of {rows} micro-batches have the shapes {shapes}")


@dataclass
class _Pass:
    """Measurements of one backward pass.

    Attributes:
        samples: samples of the step up to this pass.
        norms: squared norm of the gradient by parameter.
        squares: number of samples, and sum of squared norms over them, by parameter.
        sketched: sketch by parameter.
    """

    samples: int = 0
    norms: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    sketched: dict[str, Tensor] = field(default_factory=dict)


class NoiseProbe:
    """Probe of the backward passes of one step.

    Layers that have factors are measured by them: those whose factors are sent, and by a capture of its own those whose
    gradients autograd forms. Of all other gradients only the norm is measured.

    Args:
        model: the model.
        units: the units of the present plan.
        counter: counts the samples of the step.
        step: number of the step.

    Attributes:
        names: names of the parameters, the same at all sites.
        compressed: names of the weights whose agreed gradient is an approximation.
        passes: measurements of the backward passes, by number.
        unknown: names of parameters whose gradients arrived in a way that is not measured.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], counter: SampleCounter, step: int) -> None:
        self._counter = counter
        self._step = step
        self._parameters = {name: each for unit in units for name, each in unit.parameters.items()}
        self.names = sorted(self._parameters)
        self.compressed = _compressed(units)
        self.unknown: set[str] = set()
        self.passes: dict[int, _Pass] = {}
        self._calls: dict[int, list[tuple[int, Call]]] = {}  # by weight: backward pass and call
        self._forward = 0, 0  # number and samples of the last forward pass
        self._layers: list[CapturedLayer] = []
        self._hooks: list[Any] = []
        self._capture = self._watch(model, units)

    def _watch(self, model: nn.Module, units: Sequence[Unit]) -> LayerCapture:
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        factored: set[str] = set()
        for unit in units:
            if isinstance(unit, FactorUnit) and unit.layers:
                factored.update(unit.parameters)
                self._watch_layers(unit.name, unit.bias, unit.layers, formed=False)
                for name, parameter in unit.parameters.items():
                    self._hooks.append(parameter.register_hook(OwnHook(partial(self._formed_beside, name))))
        free = {name: layer for name, layer in capturable_layers(model).items() if self._is_own(model, layer, names)}
        capture = LayerCapture(model, free, weight_gradients=True)
        for layer in capture.layers.values():
            bias = None if layer.bias is None else names.get(id(layer.bias))
            self._watch_layers(names[id(layer.weight)], bias, [layer], formed=True)
        for name, parameter in self._parameters.items():
            if name not in factored:
                self._hooks.append(parameter.register_hook(OwnHook(partial(self._formed, name))))
        return capture

    @staticmethod
    def _is_own(model: nn.Module, layer: nn.Module, names: dict[int, str]) -> bool:
        """Return whether no other module has the layer's parameters, and a unit has its weight."""
        own = {id(parameter) for parameter in layer._parameters.values() if parameter is not None}
        others = (each for module in model.modules() if module is not layer for each in module._parameters.values())
        return bool(own & names.keys()) and not any(id(each) in own for each in others)

    def _watch_layers(self, weight: str, bias: str | None, layers: Sequence[CapturedLayer], formed: bool) -> None:
        parameter = self._parameters[weight]
        for layer in layers:
            layer.wrap_recorder = self._recorder
            self._layers.append(layer)
        hook = partial(self._arrived, weight, bias, layers if formed else ())
        self._hooks.append(parameter.register_post_accumulate_grad_hook(OwnHook(hook)))

    # During forward and backward

    def _recorder(self, layer: CapturedLayer, inputs: Tensor, record: Recorder) -> Recorder:
        """Return a recorder that also keeps the factors of a call for this probe."""
        counter = self._counter
        if counter.current:
            self._forward = counter.forwards, counter.current
        known = self._forward[0] == counter.forwards  # a checkpointed part runs again, outside of the model's forward
        forward, samples = self._forward if known else (counter.forwards, 0)
        row_dims = layer.weight.dim() - 1
        layout = formulas.layout_of(inputs.shape[: max(inputs.dim() - row_dims, 0)], samples)

        def receive(activations: Tensor, deltas: Tensor, form: Form = LINEAR) -> None:
            now = torch._C._current_graph_task_id()
            call = Call(activations, deltas, form, layout, forward)
            self._calls.setdefault(id(layer.weight), []).append((now, call))
            record(activations, deltas, form)

        return receive

    def _pass(self) -> _Pass:
        found = self.passes.setdefault(self._counter.backward_pass, _Pass())
        found.samples = self._counter.reached
        return found

    def _measure(self, name: str, table: dict[str, Any], value: Callable[[], Any]) -> None:
        """Put a value into a table, unless there is one: then a gradient has arrived in two parts."""
        if name in table:
            self.unknown.add(name)
        else:
            table[name] = value()

    @torch.no_grad()
    def _formed(self, name: str, gradient: Tensor | None) -> None:
        """Measure a gradient that autograd has formed."""
        if gradient is None:
            return
        found = self._pass()
        self._measure(name, found.norms, lambda: _square_of(gradient))
        if name in self.compressed:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            matrix = dense.to(_type(gradient)).reshape(matrix_shape(self._parameters[name]))
            self._measure(name, found.sketched, lambda: formulas.sketch_matrix(matrix, name, self._step))

    def _formed_beside(self, name: str, gradient: Tensor | None) -> None:
        """Take note of a gradient that is not that of the factors."""
        if gradient is not None:
            self.unknown.add(name)

    @torch.no_grad()
    def _arrived(self, weight: str, bias: str | None, formed: Sequence[CapturedLayer], parameter: Tensor) -> None:
        """Measure the factors of a backward pass.

        Args:
            weight: name of the weight.
            bias: name of the bias, or None.
            formed: the layers whose gradients autograd has formed as well, and whose factors nobody else takes.
            parameter: the weight.
        """
        now = torch._C._current_graph_task_id()
        calls = [call for task, call in self._calls.pop(id(parameter), []) if task == now]
        for layer in formed:
            layer.clear()
        if not calls:
            return
        dtype, found = _type(parameter), self._pass()
        norms = formulas.squared_norms(calls, dtype, self._step)
        if norms is not None:
            self._measure(weight, found.squares, lambda: (norms.samples, norms.weight))
            if bias is not None:
                self._measure(bias, found.squares, lambda: (norms.samples, norms.bias))
        if formed:
            return
        total = None if norms is None else norms.total
        self._measure(weight, found.norms, lambda: formulas.gradient_square(calls, dtype) if total is None else total)
        if bias is not None:
            self._measure(bias, found.norms, lambda: formulas.bias_square(calls, dtype))
        if weight in self.compressed:
            shape, step = matrix_shape(parameter), self._step
            self._measure(weight, found.sketched, lambda: formulas.sketch_calls(calls, shape, weight, step, dtype))

    def discard(self) -> None:
        """Forget the backward passes so far, whose gradients have been cleared."""
        self.passes.clear()
        self._calls.clear()
        self.unknown.clear()

    def detach(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            layer.wrap_recorder = None
        self._capture.detach()
        self.discard()

    # At the end of the step

    def parts(self, samples: int) -> list[float]:
        """Return the samples of each backward pass; equal parts where they are not known.

        Args:
            samples: samples of this site in the step.
        """
        bounds = [0, *(found.samples for found in self.passes.values())]
        counts: list[float] = [after - before for before, after in pairwise(bounds)]
        if sum(counts) == samples and all(count > 0 for count in counts):
            return counts
        return [samples / len(counts) for _ in counts]


def _report(probe: NoiseProbe | None, samples: int, own: _Gradients) -> SiteNorms:
    """Return what this site has measured in a step, without loss scales.

    Args:
        probe: the probe of the step; None at a site that has measured nothing.
        samples: samples of this site.
        own: the agreed gradients.
    """
    places = {name: place for place, name in enumerate(own.values)}
    scales = torch.tensor([*own.scales.values()], dtype=torch.float64)
    parts = [] if probe is None else probe.parts(samples)
    norms, squares = torch.zeros(2, len(parts), len(places), dtype=torch.float64)
    sketched = torch.zeros(len(parts), len(own.compressed), SKETCH**2, dtype=torch.float64)
    if probe is not None:
        for row, (each, count) in enumerate(zip(probe.passes.values(), parts, strict=True)):
            known = {name: value for name, (of, value) in each.squares.items() if of == count}
            _fill(norms[row], {places[name]: value for name, value in each.norms.items()})
            _fill(squares[row], {places[name]: value for name, value in known.items()})
            for name in each.norms.keys() - known.keys():
                squares[row, places[name]] = torch.nan
            for name, value in each.sketched.items():
                sketched[row, own.compressed.index(name)] = value.double().cpu()
        norms[:, [places[name] for name in probe.unknown]] = torch.nan
    sketched /= scales[[places[name] for name in own.compressed]][:, None]
    agreed = torch.full((len(places),), torch.nan, dtype=torch.float64)
    _fill(agreed, {places[name]: _square_of(value) for name, value in own.values.items() if value is not None})
    squared = scales.square()
    return SiteNorms(samples, parts, norms / squared, squares / squared, sketched, agreed / squared)


@torch.no_grad()
def _square_of(gradient: Tensor) -> Tensor:
    """Return the squared norm of a gradient, dense or sparse."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm: Tensor = torch.linalg.vector_norm(values.to(_type(gradient)))
    return norm.double().square()


def _type(tensor: Tensor) -> torch.dtype:
    """Return the type to compute in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _fill(row: Tensor, values: dict[int, Tensor]) -> None:
    """Put scalars into a row, with one copy from each device."""
    by_device: dict[torch.device, list[int]] = {}
    for place, value in values.items():
        by_device.setdefault(value.device, []).append(place)
    for places in by_device.values():
        row[places] = torch.stack([values[place].double() for place in places]).cpu()


# Estimates from what all sites have measured


def _in_range(estimate: Callable[[], dict[str, NoiseEstimate]]) -> dict[str, NoiseEstimate]:
    """Return estimates; none where a site has sent numbers from which they cannot be computed."""
    try:
        return estimate()
    except (ArithmeticError, ValueError):
        return {}


def _effective_samples(sites: Sequence[tuple[float, int]]) -> float:
    """Return the number of samples of a batch whose mean gradient has the noise of the weighted mean over sites.

    Args:
        sites: weight in the mean and number of samples of each site that has any.
    """
    return 1.0 / math.fsum(weight * weight / samples for weight, samples in sites)


def estimate_step(
    sites: Sequence[tuple[float, SiteNorms]], names: Sequence[str], compressed: Sequence[str]
) -> dict[str, NoiseEstimate]:
    """Estimate the noise of every parameter's gradient from one step.

    Args:
        sites: weight in the mean and norms of each site that has samples.
        names: names of the parameters.
        compressed: names of those whose agreed gradients are approximations, so that their norms do not count.

    Returns:
        The estimates by name, without parameters that have no gradient; NaN where this step does not suffice.
    """
    agreed = _first_known([norms.agreed for _, norms in sites])
    estimates = {}
    for place, name in enumerate(names):
        norm = agreed[place]
        if math.isnan(norm):
            continue
        parts = _parts(sites, place)
        if name in compressed:
            norm = _norm_by_sketches(parts, sites, compressed.index(name))
        within = formulas.within_parts(parts, norm)
        estimates[name] = formulas.between_parts(parts, norm) if math.isnan(within.squared_norm) else within
    return estimates


def _first_known(columns: Sequence[Tensor]) -> list[float]:
    """Return in each place the first number that is not NaN; NaN where there is none.

    Args:
        columns: of shape (places,), those of each site.
    """
    lists = [column.tolist() for column in columns]
    return [next((value for value in values if not math.isnan(value)), math.nan) for values in zip(*lists, strict=True)]


def _parts(sites: Sequence[tuple[float, SiteNorms]], place: int) -> list[Part]:
    """Return the micro-batches of all sites, with the norms of one parameter's gradients."""
    parts = []
    for weight, site in sites:
        total = float(site.samples)
        for row, samples in enumerate(site.parts):
            norm, squares = float(site.norms[row, place]), float(site.squares[row, place])
            scale = total / samples
            parts.append(Part(samples, weight / scale, norm * scale * scale, squares * total * total))
        if not site.parts:
            parts.append(Part(math.nan, math.nan, math.nan, math.nan))
    return parts


def _norm_by_sketches(parts: Sequence[Part], sites: Sequence[tuple[float, SiteNorms]], index: int) -> float:
    """Return the squared norm of the mean of gradients that only their own site knows."""
    if any(math.isnan(part.norm) for part in parts):
        return math.nan
    sketches = torch.stack(
        [
            site.sketched[row, index] * (site.samples / samples)
            for _, site in sites
            for row, samples in enumerate(site.parts)
        ]
    )
    lists = sketches.tolist()
    products = [[math.fsum(map(float.__mul__, one, other)) for other in lists] for one in lists]
    return formulas.norm_of_mean(parts, products)
