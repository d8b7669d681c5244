"""Divides a model's parameters into units: which of them go by factors, and which by their gradients."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from torch import nn

from ..hooks import Form, LayerCapture, capturable_layers, family_of, refusal_of
from ..methods import Method
from ..units.base import DenseUnit, Unit, matrix_shape
from ..units.factor import FactorUnit
from ..units.lowrank import LowrankUnit


class Partition(NamedTuple):
    """How a model's parameters are divided.

    Attributes:
        capture: the capture of the layers that go by factors.
        units: the units, in the model's order.
        paths: the path of every parameter.
        reasons: why a parameter takes its path, where that is not what the method does with every layer.
    """

    capture: LayerCapture
    units: list[Unit]
    paths: dict[str, str]
    reasons: dict[str, str]


def partition_parameters(model: nn.Module, method: Method, keep_dense: set[str], compress_dense: bool) -> Partition:
    """Divides a model's trained parameters into units, each parameter into exactly one.

    A weight goes by factors if the method wants it to and if every layer that owns it is captured, and of one kind; so
    a matrix that is tied to an embedding, or that attention uses without calling its layer, is all-reduced.

    Args:
        model: the model.
        method: chooses the path of a layer from its widths.
        keep_dense: names of weights that are to be all-reduced in any case.
        compress_dense: whether gradients of weights without factors are compressed, if the method compresses.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, set[str]] = defaultdict(set)
    reasons: dict[str, str] = {}
    for module_name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)].add(module_name)
                if parameter.requires_grad and method.takes_factors and (reason := refusal_of(module)):
                    reasons[names[id(parameter)]] = reason
    groups: dict[int, dict[str, nn.Module]] = defaultdict(dict)  # by weight: the layers that may be captured
    for layer_name, layer in capturable_layers(model).items():
        groups[id(_weight(layer))][layer_name] = layer
    paths: dict[str, str] = {}
    factored: list[tuple[nn.Parameter, nn.Parameter | None, dict[str, nn.Module]]] = []
    for layers in groups.values():
        weight = _weight(next(iter(layers.values())))
        biases = {id(_bias(layer)): _bias(layer) for layer in layers.values()}
        bias = next(iter(biases.values()))
        alone = owners[id(weight)] == set(layers) and len(biases) == 1
        alone = alone and (bias is None or owners[id(bias)] == set(layers))
        alone = alone and len({(family_of(layer), _known_form(layer)) for layer in layers.values()}) == 1
        path = _path(next(iter(layers.values())), method) if alone else "allreduce"
        if not alone and method.takes_factors:
            reasons[names[id(weight)]] = "shared by layers that do not go together"
        if path != "allreduce" and names[id(weight)] not in keep_dense:
            factored.append((weight, bias, layers))
            paths[names[id(weight)]] = path
            if bias is not None:
                paths[names[id(bias)]] = path
            if not method.takes_factors:
                reasons[names[id(weight)]] = "sparse=True: its gradient is sent as the rows that it has"
    captured_names = [name for *_, layers in factored for name in layers]
    capture = LayerCapture(model, captured_names, weight_gradients=False, trace_chains=method.chains)
    by_lead: dict[str, Unit] = {}
    for weight, bias, layers in factored:
        weight_name, bias_name = names[id(weight)], None if bias is None else names[id(bias)]
        parameters = {weight_name: weight} if bias is None else {weight_name: weight, str(bias_name): bias}
        captured = [capture.layers[name] for name in layers]
        if paths[weight_name] == "lowrank":
            by_lead[weight_name] = LowrankUnit(weight_name, bias_name, parameters, captured)
        else:
            form = captured[0].family.known_form(captured[0].module)
            by_lead[weight_name] = FactorUnit(weight_name, bias_name, parameters, captured, paths[weight_name], form)
    units: list[Unit] = []
    for name, parameter in model.named_parameters():
        if name in by_lead:
            units.append(by_lead[name])
        elif name not in paths:
            if not parameter.requires_grad:
                paths[name] = "frozen"
            elif compress_dense and name not in keep_dense and _can_be_compressed(parameter, method):
                paths[name] = "lowrank"
                reasons[name] = "dense='lowrank'"
                units.append(LowrankUnit(name, None, {name: parameter}, []))
            else:
                may = name not in keep_dense and parameter.is_floating_point() and parameter.dim() > 1
                paths[name] = method.gradient_path(*matrix_shape(parameter)) if may else "allreduce"
                units.append(DenseUnit(name, parameter, paths[name]))
    return Partition(capture, units, paths, reasons)


def _path(layer: nn.Module, method: Method) -> str:
    weight, form = _weight(layer), _known_form(layer)
    if form is not None and not form.encoded:
        return "factors" if method.takes_factors or form.sparse else "allreduce"
    out = weight.shape[0]
    return method.path(out, weight.numel() // out) if weight.numel() else "allreduce"


def _can_be_compressed(parameter: nn.Parameter, method: Method) -> bool:
    if parameter.dim() < 2 or not parameter.is_floating_point() or not parameter.numel():
        return False
    return method.path(parameter.shape[0], parameter.numel() // parameter.shape[0]) == "lowrank"


def _known_form(layer: nn.Module) -> Form | None:
    family = family_of(layer)
    assert family is not None
    return family.known_form(layer)


def _weight(layer: nn.Module) -> nn.Parameter:
    family = family_of(layer)
    assert family is not None
    return getattr(layer, family.weight)


def _bias(layer: nn.Module) -> nn.Parameter | None:
    family = family_of(layer)
    assert family is not None
    bias = getattr(layer, family.bias, None)
    return bias if bias is not None and bias.requires_grad else None
