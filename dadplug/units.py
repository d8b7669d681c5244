"""The units of exchange: a weight with its factors, or a parameter with its dense gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from torch import Tensor, nn

from .hooks import CapturedLayer, Factor, LayerCapture, capturable_layers, family_of
from .methods import Method


class Unit:
    """What is exchanged as one.

    Attributes:
        name: name of the parameter that leads it.
        arrivals: times its gradient has arrived since the last synchronisation.
        expected: the most that ever arrived in one step; with so many it is taken to be complete.
        sent: whether its share has gone to a bucket in this step.
        dense: whether a gradient has arrived that its bucket does not carry, so that it has to be all-reduced.
    """

    def __init__(self, name: str, parameters: dict[str, nn.Parameter]) -> None:
        self.name = name
        self.parameters = parameters
        self.arrivals = 0
        self.expected = 0
        self.sent = False
        self.dense = False
        self._hooks: list = []

    @property
    def lead(self) -> nn.Parameter:
        """The parameter that leads the unit."""
        return self.parameters[self.name]

    def watch(self, on_arrival: Callable[[Unit], None]) -> None:
        """Calls back whenever autograd has delivered all of a backward pass's gradient for the leading parameter."""
        self._hooks.append(self.lead.register_post_accumulate_grad_hook(lambda _: on_arrival(self)))

    def begin_step(self) -> None:
        """Forgets the step that is over."""
        self.expected = max(self.expected, self.arrivals)
        self.arrivals = 0
        self.sent = False
        self.dense = False

    def release(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class DenseUnit(Unit):
    """A parameter whose gradient is all-reduced."""


class FactorUnit(Unit):
    """A weight, and perhaps a bias, whose gradients are sent as factors.

    Several layers share one unit where they share the weight; their rows stack.

    Args:
        weight: name of the weight.
        bias: name of the bias, or None.
        parameters: both, by name.
        layers: the captured layers that use them.
    """

    def __init__(
        self, weight: str, bias: str | None, parameters: dict[str, nn.Parameter], layers: list[CapturedLayer]
    ) -> None:
        super().__init__(weight, parameters)
        self.bias = bias
        self.layers = layers
        for parameter in parameters.values():
            self._hooks.append(parameter.register_hook(self._on_dense))

    def _on_dense(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # the weight was used outside of its layer too, or in a second derivative
            self.dense = True

    @property
    def shape(self) -> tuple[int, int]:
        """Widths of output and input."""
        return self.lead.shape[0], self.lead.shape[1]

    @property
    def fed_by_data(self) -> bool:
        """Whether a layer has had an input that needs no gradient."""
        return any(layer.fed_by_data for layer in self.layers)

    @property
    def rows(self) -> int:
        """Number of rows that have arrived."""
        return sum(factor.rows for layer in self.layers for factor in layer.peek())

    def take(self) -> Factor | None:
        """Hands over the factors that have arrived, stacked and in the weight's type; None where none have."""
        factors = [factor for layer in self.layers for factor in layer.take()]
        if not factors:
            return None
        factor, dtype = Factor.stack(factors), self.lead.dtype
        return Factor(factor.activations.to(dtype), factor.deltas.to(dtype))

    def keep_inputs(self) -> None:
        """Protects held factors from a loader that reuses its buffers."""
        for layer in self.layers:
            layer.keep_inputs()

    def form_gradients(self) -> None:
        """Adds the gradients of what has arrived to ``.grad``, as autograd would have."""
        factor = self.take()
        if factor is None:
            return
        add_gradient(self.lead, factor.gradient())
        if self.bias is not None:
            add_gradient(self.parameters[self.bias], factor.bias_gradient())


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Accumulates a gradient as autograd does."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def find_units(model: nn.Module, method: Method, keep_dense: set[str]) -> tuple[LayerCapture, list[Unit], dict]:
    """Divides a model's trained parameters into units, each parameter into exactly one.

    A weight goes by factors if the method wants it to and if every layer that owns it is captured; so a matrix that
    is tied to an embedding, or that attention uses without calling its layer, is all-reduced.

    Args:
        model: the model.
        method: chooses the path of a layer from its widths.
        keep_dense: names of weights that are to be all-reduced in any case.

    Returns:
        The capture of the layers that go by factors, the units in the model's order, and the path of every parameter.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, set[str]] = defaultdict(set)
    for module_name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)].add(module_name)
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
        path = method.path(*weight.shape) if alone and weight.dim() == 2 else "allreduce"
        if path != "allreduce" and names[id(weight)] not in keep_dense:
            factored.append((weight, bias, layers))
            paths[names[id(weight)]] = path
            if bias is not None:
                paths[names[id(bias)]] = path
    capture = LayerCapture(model, [name for *_, layers in factored for name in layers], weight_gradients=False)
    by_lead: dict[str, Unit] = {}
    for weight, bias, layers in factored:
        weight_name, bias_name = names[id(weight)], None if bias is None else names[id(bias)]
        parameters = {weight_name: weight} if bias is None else {weight_name: weight, str(bias_name): bias}
        captured = [capture.layers[name] for name in layers]
        by_lead[weight_name] = FactorUnit(weight_name, bias_name, parameters, captured)
    units: list[Unit] = []
    for name, parameter in model.named_parameters():
        if name in by_lead:
            units.append(by_lead[name])
        elif name not in paths:
            paths[name] = "allreduce" if parameter.requires_grad else "frozen"
            if parameter.requires_grad:
                units.append(DenseUnit(name, {name: parameter}))
    return capture, units, paths


def _weight(layer: nn.Module) -> nn.Parameter:
    family = family_of(layer)
    assert family is not None
    return getattr(layer, family.weight)


def _bias(layer: nn.Module) -> nn.Parameter | None:
    family = family_of(layer)
    assert family is not None
    bias = getattr(layer, family.bias, None)
    return bias if bias is not None and bias.requires_grad else None
