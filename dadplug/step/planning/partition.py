"""Partition of a model's parameters into units of exchange, each with the path that its gradient takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from ...hooks import LINEAR, Form, LayerCapture, LayerFamily, capturable_layers, family_of, refusal_of
from ..methods import Method
from ..methods.base import GradientPath
from ..units.base import DenseUnit, Unit, matrix_shape
from ..units.factor import FactorUnit, LowrankUnit


class Partition(NamedTuple):
    """A model's parameters, each in exactly one unit or frozen.

    Attributes:
        capture: the capture of the layers whose gradients are sent as factors.
        units: the units, in the model's order.
        paths: the path of every parameter, by name.
        reasons: by name of a parameter, why it takes its path, where that is not what the method does with every layer.
    """

    capture: LayerCapture
    units: list[Unit]
    paths: dict[str, str]
    reasons: dict[str, str]


class _WeightGroup(NamedTuple):
    """A weight and its bias, with the capturable layers that own the weight.

    Attributes:
        name: name of the weight.
        bias: name of the bias; None where there is none, or where it is not trained.
        layers: the layers by name.
        separable: whether no other module owns either, and the layers are of one kind.
        tied: whether no other module owns either, and the layers are linear ones and embeddings.
    """

    name: str
    bias: str | None
    layers: dict[str, nn.Module]
    separable: bool
    tied: bool

    @property
    def layer(self) -> nn.Module:
        """The first of the layers."""
        return next(iter(self.layers.values()))


def partition_parameters(
    model: nn.Module,
    method: Method,
    keep_dense: Collection[str],
    compress_dense: bool,
    forms_all: bool = False,
    masked: bool = False,
) -> Partition:
    """Partition a model's trained parameters into units, each parameter into exactly one.

    A weight takes a path of factors if the method sends factors and if every layer that owns the weight is captured,
    all of one kind; so a matrix that is tied to an embedding, or that attention uses without calling its layer, is
    all-reduced. With `compress_dense`, a matrix that is tied to an embedding is compressed from the factors of both.

    Args:
        model: the model.
        method: chooses the path of a layer from its widths.
        keep_dense: names of weights that are all-reduced in any case.
        compress_dense: whether gradients of weights without factors are compressed, if the method compresses.
        forms_all: whether all gradients are formed before they are sent, so that none has factors.
        masked: whether gradients are summed under masks.
    """
    parameters = dict(model.named_parameters())
    reasons = _refusals(model, parameters) if method.traits.takes_factors else {}
    paths: dict[str, str] = {}
    factored: dict[str, _WeightGroup] = {}
    groups = [] if forms_all else [*_weight_groups(model, parameters)]
    for group in groups:
        path = _layer_path(group.layer, method) if group.separable else GradientPath.ALLREDUCE
        if compress_dense and group.tied and _is_compressed(parameters[group.name], method):
            path, reasons[group.name] = GradientPath.LOWRANK, "shared by a table and a layer: compressed together"
        elif not group.separable and method.traits.takes_factors:
            reasons[group.name] = "shared by layers that do not go together"
        if path != GradientPath.ALLREDUCE and group.name not in keep_dense:
            factored[group.name] = group
            paths |= dict.fromkeys([group.name] if group.bias is None else [group.name, group.bias], path)
            if not method.traits.takes_factors:
                reasons[group.name] = "sparse=True: its gradient is sent as the rows that it has"
    captured = [name for group in factored.values() for name in group.layers]
    chains, lossy = method.traits.recomputes_deltas, not method.traits.exact
    capture = LayerCapture(model, captured, weight_gradients=False, trace_chains=chains, fastest=lossy)
    units: list[Unit] = []
    for name, parameter in parameters.items():
        if name in factored:
            units.append(_factor_unit(factored[name], paths[name], parameters, capture))
        elif name in paths:  # a bias, in the unit of its weight
            continue
        elif not parameter.requires_grad:
            paths[name] = GradientPath.FROZEN
        elif not masked and compress_dense and name not in keep_dense and _is_compressed(parameter, method):
            paths[name] = GradientPath.LOWRANK
            reasons[name] = "privacy" if forms_all else reasons.get(name) or _lacks_factors(name, model)
            units.append(LowrankUnit(name, None, {name: parameter}, []))
        else:
            paths[name] = GradientPath.MASKED if masked else _dense_path(parameter, method, name in keep_dense)
            if paths[name] == GradientPath.ALLREDUCE:
                could_be = any(name == group.name for group in groups) or (compress_dense and lossy)
                reasons.setdefault(name, _why_dense(name, parameter, model, method, could_be))
            units.append(DenseUnit(name, parameter, paths[name]))
    return Partition(capture, units, paths, reasons)


def show_inputs(method: Method, units: Sequence[Unit]) -> None:
    """Give a method the layers of each weight, which it asks whether they are fed by data.

    Args:
        method: the method.
        units: the units of a new plan.
    """
    method.layers = {unit.name: unit.layers for unit in units if isinstance(unit, FactorUnit)}


def _refusals(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return why layers that look capturable are not, by name of each of their trained parameters."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    reasons: dict[str, str] = {}
    for module in model.modules():
        reason = refusal_of(module)
        for parameter in module._parameters.values():
            if reason and parameter is not None and parameter.requires_grad:
                reasons[names[id(parameter)]] = reason
    return reasons


def _weight_groups(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[_WeightGroup]:
    """Group the capturable layers of a model by their weight."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    owners: dict[int, set[str]] = defaultdict(set)
    for module_name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)].add(module_name)
    groups: dict[int, dict[str, nn.Module]] = defaultdict(dict)
    for layer_name, layer in capturable_layers(model).items():
        groups[id(_weight(layer))][layer_name] = layer
    for weight_id, layers in groups.items():
        biases = {id(_bias(layer)): _bias(layer) for layer in layers.values()}
        bias = next(iter(biases.values()))
        alone = owners[weight_id] == set(layers) and len(biases) == 1
        alone = alone and (bias is None or owners[id(bias)] == set(layers))
        separable = alone and len({(family_of(layer), _known_form(layer)) for layer in layers.values()}) == 1
        tied = alone and not separable and all(_goes_with_table(_known_form(layer)) for layer in layers.values())
        yield _WeightGroup(names[weight_id], None if bias is None else names[id(bias)], layers, separable, tied)


def _goes_with_table(form: Form | None) -> bool:
    """Return whether factors of a form can be compressed together with rows of a table of the same weight."""
    return form is not None and (form == LINEAR or bool(form.table_rows)) and not form.sparse


def _factor_unit(
    group: _WeightGroup, path: str, parameters: Mapping[str, nn.Parameter], capture: LayerCapture
) -> FactorUnit:
    own = {name: parameters[name] for name in (group.name, group.bias) if name is not None}
    layers = [capture.layers[name] for name in group.layers]
    if path == GradientPath.LOWRANK:
        return LowrankUnit(group.name, group.bias, own, layers)
    form = layers[0].family.known_form(layers[0].module)
    return FactorUnit(group.name, group.bias, own, layers, path, form)


def _layer_path(layer: nn.Module, method: Method) -> str:
    """Return the path of a captured layer's weight."""
    weight, form = _weight(layer), _known_form(layer)
    if form is not None and not form.encoded:
        return GradientPath.FACTORS if method.traits.takes_factors or form.sparse else GradientPath.ALLREDUCE
    return method.path_of(*matrix_shape(weight), weight.dtype) if weight.numel() else GradientPath.ALLREDUCE


def _dense_path(parameter: nn.Parameter, method: Method, kept: bool) -> str:
    """Return the path of a parameter whose gradient autograd forms."""
    if kept or not parameter.is_floating_point() or parameter.dim() < 2:
        return GradientPath.ALLREDUCE
    return method.gradient_path(*matrix_shape(parameter))


def _why_dense(name: str, parameter: nn.Parameter, model: nn.Module, method: Method, could_be: bool) -> str:
    """Return why a parameter is all-reduced; an empty string where the method all-reduces all.

    Args:
        name: its name.
        parameter: the parameter.
        model: the model.
        method: the method.
        could_be: whether the method would compress or factor a larger gradient in its place.
    """
    by_gradient = type(method).gradient_path is not Method.gradient_path
    if not (method.traits.takes_factors or by_gradient):
        return ""
    if parameter.dim() < 2:
        return "a vector"
    if not parameter.is_floating_point():
        return "complex numbers"
    if could_be or by_gradient:
        return "compressed, it would save few bytes or none"
    return _lacks_factors(name, model)


def _lacks_factors(name: str, model: nn.Module) -> str:
    return f"its layer ({type(model.get_submodule(name.rpartition('.')[0])).__name__}) sends no factors"


def _is_compressed(parameter: nn.Parameter, method: Method) -> bool:
    """Return whether the method compresses gradients of this parameter's size, if they are formed."""
    if parameter.dim() < 2 or not parameter.is_floating_point() or not parameter.numel():
        return False
    return method.path_of(*matrix_shape(parameter), parameter.dtype) == GradientPath.LOWRANK


def _family(layer: nn.Module) -> LayerFamily:
    """Return the family of a capturable layer."""
    family = family_of(layer)
    assert family is not None
    return family


def _known_form(layer: nn.Module) -> Form | None:
    return _family(layer).known_form(layer)


def _weight(layer: nn.Module) -> nn.Parameter:
    weight = getattr(layer, _family(layer).weight)
    assert isinstance(weight, nn.Parameter)
    return weight


def _bias(layer: nn.Module) -> nn.Parameter | None:
    bias: nn.Parameter | None = getattr(layer, _family(layer).bias, None)
    return bias if bias is not None and bias.requires_grad else None
