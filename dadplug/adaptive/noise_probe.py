"""Probe of one step's backward passes: squared norms of this site's gradients, and of those of single samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..exchange.codec import register
from ..hooks import LINEAR, CapturedLayer, Form, LayerCapture, OwnHook, Recorder, capturable_layers
from ..methods.loss_scale import LossScales
from ..methods.paths import GradientPath
from ..model_sync.samples import SampleCounter
from ..units.base import Unit, matrix_shape
from ..units.factor import FactorUnit
from . import sample_norms, sketches
from .sample_norms import Call

_AS_THEY_ARE = (GradientPath.ALLREDUCE, GradientPath.FACTORS, GradientPath.ACTIVATIONS)


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

    @classmethod
    def empty(cls, samples: int, parameters: int) -> SiteNorms:
        """Return the norms of a site that has measured nothing.

        Args:
            samples: number of samples of the site.
            parameters: number of parameters.
        """
        none = torch.zeros(0, parameters, dtype=torch.float64)
        agreed = torch.full((parameters,), torch.nan, dtype=torch.float64)
        return cls(samples, [], none, none, torch.zeros(0, 0, sketches.SIZE**2, dtype=torch.float64), agreed)

    def unscaled(self, gradients: Gradients) -> SiteNorms:
        """Return these norms without loss scales, and with those of the agreed gradients.

        Args:
            gradients: the agreed gradients, and the loss scales that all of them contain.
        """
        scales = torch.tensor(gradients.scales, dtype=torch.float64)
        places = [gradients.names.index(name) for name in gradients.compressed]
        sketched = self.sketched / scales[places][:, None] if len(self.sketched) else self.sketched
        squared = scales.square()
        agreed = torch.full((len(gradients.names),), torch.nan, dtype=torch.float64)
        known = {place: value for place, value in enumerate(gradients.values) if value is not None}
        _fill(agreed, {place: square_of(value) for place, value in known.items()})
        norms, squares = self.norms / squared, self.squares / squared
        return replace(self, norms=norms, squares=squares, sketched=sketched, agreed=agreed / squared)


class Gradients(NamedTuple):
    """Agreed gradients of a step.

    Attributes:
        names: names of the parameters, sorted.
        values: the gradients; None where there is none.
        scales: the loss scales that they contain.
        compressed: names of the parameters whose agreed gradient is an approximation, sorted.
    """

    names: list[str]
    values: list[Tensor | None]
    scales: list[float]
    compressed: list[str]

    def unscaled(self) -> dict[str, Tensor | None]:
        """Return the gradients by name, without loss scales."""
        return {name: self.copy(name) for name in self.names}

    def copy(self, name: str) -> Tensor | None:
        """Return a copy of a gradient, without its loss scale."""
        place = self.names.index(name)
        value = self.values[place]
        return None if value is None else value.detach() / self.scales[place]


def gradients_of(units: Sequence[Unit], scales: LossScales) -> Gradients:
    """Return the agreed gradients of units.

    Args:
        units: the units.
        scales: the loss scales that their gradients contain.
    """
    parameters = {name: (each, unit.name) for unit in units for name, each in unit.parameters.items()}
    names = sorted(parameters)
    values = [parameters[name][0].grad for name in names]
    return Gradients(names, values, [scales.of(parameters[name][1]) for name in names], compressed_names(units))


def compressed_names(units: Sequence[Unit]) -> list[str]:
    """Return the names of the weights whose agreed gradient is an approximation, sorted."""
    return sorted(unit.name for unit in units if unit.path not in _AS_THEY_ARE)


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
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], counter: SampleCounter, step: int) -> None:
        self._counter = counter
        self._step = step
        self._parameters = {name: each for unit in units for name, each in unit.parameters.items()}
        self.names = sorted(self._parameters)
        self.compressed = compressed_names(units)
        self._unknown: set[str] = set()  # whose gradients arrived in a way that is not measured
        self._passes: dict[int, _Pass] = {}
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
        lead = inputs.shape[: _lead_dims(layer, inputs)]
        layout = sample_norms.layout_of(lead, samples)

        def receive(activations: Tensor, deltas: Tensor, form: Form = LINEAR) -> None:
            now = torch._C._current_graph_task_id()
            call = Call(activations, deltas, form, layout, forward)
            self._calls.setdefault(id(layer.weight), []).append((now, call))
            record(activations, deltas, form)

        return receive

    def _pass(self) -> _Pass:
        found = self._passes.setdefault(self._counter.backward_pass, _Pass())
        found.samples = self._counter.count
        return found

    def _measure(self, name: str, table: dict[str, Any], value: Callable[[], Any]) -> None:
        """Put a value into a table, unless there is one: then a gradient has arrived in two parts."""
        if name in table:
            self._unknown.add(name)
        else:
            table[name] = value()

    @torch.no_grad()
    def _formed(self, name: str, gradient: Tensor | None) -> None:
        """Measure a gradient that autograd has formed."""
        if gradient is None:
            return
        found = self._pass()
        self._measure(name, found.norms, lambda: square_of(gradient))
        if name in self.compressed:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            matrix = dense.to(_type(gradient)).reshape(matrix_shape(self._parameters[name]))
            self._measure(name, found.sketched, lambda: sketches.sketch_matrix(matrix, name, self._step))

    def _formed_beside(self, name: str, gradient: Tensor | None) -> None:
        """Take note of a gradient that is not that of the factors."""
        if gradient is not None:
            self._unknown.add(name)

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
        norms = sample_norms.squared_norms(calls, dtype, self._step)
        if norms.weight is not None:
            self._measure(weight, found.squares, lambda: (norms.samples, norms.weight))
        if norms.bias is not None and bias is not None:
            self._measure(bias, found.squares, lambda: (norms.samples, norms.bias))
        if formed:
            return
        total = norms.total if norms.total is not None else sample_norms.gradient_square(calls, dtype)
        self._measure(weight, found.norms, lambda: total)
        if bias is not None:
            self._measure(bias, found.norms, lambda: sample_norms.bias_square(calls, dtype))
        if weight in self.compressed:
            shape, step = matrix_shape(parameter), self._step
            self._measure(weight, found.sketched, lambda: sketches.sketch_calls(calls, shape, weight, step, dtype))

    def discard(self) -> None:
        """Forget the backward passes so far, whose gradients have been cleared."""
        self._passes.clear()
        self._calls.clear()
        self._unknown.clear()

    def detach(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            layer.wrap_recorder = None
        self._capture.detach()
        self.discard()

    # At the end of the step

    def report(self, samples: int) -> SiteNorms:
        """Return what has been measured, without the norms of agreed gradients.

        Args:
            samples: samples of this site in the step.
        """
        parts = self._parts(samples)
        found = SiteNorms.empty(samples, len(self.names))
        shape = len(parts), len(self.names)
        norms, squares = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        sketched = torch.zeros(len(parts), len(self.compressed), sketches.SIZE**2, dtype=torch.float64)
        places = {name: place for place, name in enumerate(self.names)}
        for row, (each, count) in enumerate(zip(self._passes.values(), parts, strict=True)):
            known = {name: value for name, (of, value) in each.squares.items() if of == count}
            _fill(norms[row], {places[name]: value for name, value in each.norms.items()})
            _fill(squares[row], {places[name]: value for name, value in known.items()})
            for name in each.norms.keys() - known.keys():
                squares[row, places[name]] = torch.nan
            for name, value in each.sketched.items():
                sketched[row, self.compressed.index(name)] = value.double().cpu()
        for name in self._unknown:
            norms[:, places[name]] = torch.nan
        return replace(found, parts=parts, norms=norms, squares=squares, sketched=sketched)

    def _parts(self, samples: int) -> list[float]:
        """Return the samples of each backward pass; equal parts where they are not known."""
        passes = list(self._passes.values())
        bounds = [0, *(found.samples for found in passes)]
        counts: list[float] = [after - before for before, after in pairwise(bounds)]
        if sum(counts) == samples and all(count > 0 for count in counts):
            return counts
        return [samples / len(passes) for _ in passes]


def _lead_dims(layer: CapturedLayer, inputs: Tensor) -> int:
    """Return the number of dimensions of an input before those of a single row."""
    dims: int = layer.weight.dim() - 1
    return max(inputs.dim() - dims, 0)


@torch.no_grad()
def square_of(gradient: Tensor) -> Tensor:
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
