"""Gradients by sample of layers that have no factors: by a formula, or by running a layer on one sample at a time.

The formula is that of layers that end in a scale and a shift: normalisations of each sample, and biases alone.

A normalisation ``y = n(x) * weight + bias`` has the gradient ``sum over positions of delta * n(x)`` for its weight, and
that of the deltas for its bias. A further layer is a function that is registered by `register_normalisation`. A linear
layer or convolution whose weight is frozen is ``n(x) + bias``.

Recurrent layers, attention, bilinear ones and PReLU are run on one sample after the other, so that autograd gives the
gradient of each. That takes as many small calls as the batch has samples, and room for their gradients. Dropout within
the layer draws for each sample as before. A further layer is a function that is registered by `register_one_by_one`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..errors import PrivacyError
from ..hooks import ForwardOverride, eager
from ..support.registry import Registry

Normalise = Callable[[nn.Module, Tensor], tuple[Tensor, int]]
"""Function of the layer and its input that returns ``n(x)``, and the first dimension of the parameters in it; the
parameters have that dimension and those after it, or that one alone for channels."""

NORMALISATIONS: Registry[type[nn.Module], Normalise] = Registry("normalisation")


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _registering(
    registry: Registry[type[nn.Module], _Function], kinds: Sequence[type[nn.Module]]
) -> Callable[[_Function], _Function]:
    def decorate(function: _Function) -> _Function:
        for kind in kinds:
            registry.register(kind)(function)
        return function

    return decorate


def _registered(registry: Registry[type[nn.Module], _Function], module: nn.Module) -> _Function | None:
    """Return the function of a layer, or None for other layers and for subclasses with a forward of their own."""
    for kind, function in registry.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return function
    return None


def _captures(now: Sequence[nn.Parameter | None], given: Sequence[nn.Parameter | None]) -> bool:
    """Return whether a forward pass is captured: its parameters are those of before, some of which are trained.

    `torch.func.functional_call` puts other tensors in their place.
    """
    own = len(now) == len(given) and all(each is kept for each, kept in zip(now, given, strict=True))
    if not own or not any(each is not None and each.requires_grad for each in now):
        return False
    return torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None


def register_normalisation(*kinds: type[nn.Module]) -> Callable[[Normalise], Normalise]:
    """Register the function of layer types; a decorator."""
    return _registering(NORMALISATIONS, kinds)


@register_normalisation(nn.LayerNorm)
def _layer_norm(module: nn.Module, inputs: Tensor) -> tuple[Tensor, int]:
    assert isinstance(module, nn.LayerNorm)
    shape = list(module.normalized_shape)
    return F.layer_norm(inputs, shape, None, None, module.eps), inputs.dim() - len(shape)


@register_normalisation(nn.RMSNorm)
def _rms_norm(module: nn.Module, inputs: Tensor) -> tuple[Tensor, int]:
    assert isinstance(module, nn.RMSNorm)
    shape = list(module.normalized_shape)
    return F.rms_norm(inputs, shape, None, module.eps), inputs.dim() - len(shape)


@register_normalisation(nn.GroupNorm)
def _group_norm(module: nn.Module, inputs: Tensor) -> tuple[Tensor, int]:
    assert isinstance(module, nn.GroupNorm)
    return F.group_norm(inputs, module.num_groups, None, None, module.eps), 1


@register_normalisation(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def _instance_norm(module: nn.Module, inputs: Tensor) -> tuple[Tensor, int]:
    assert isinstance(module, (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d))
    return F.instance_norm(inputs, None, None, None, None, True, 0.0, module.eps), 1


@register_normalisation(nn.Linear)
def _frozen_linear(module: nn.Module, inputs: Tensor) -> tuple[Tensor, int]:
    assert isinstance(module, nn.Linear)
    return F.linear(inputs, module.weight), inputs.dim() - 1


@register_normalisation(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def _frozen_convolution(module: nn.Module, inputs: Tensor) -> tuple[Tensor, int]:
    assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    return module._conv_forward(inputs, module.weight, None), 1


_WITH_FACTORS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # their weights are no scale behind n(x)


def _affine_parameters(module: nn.Module) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """Return the parameters of a layer that are a scale and a shift behind n(x)."""
    scale = None if isinstance(module, _WITH_FACTORS) else module._parameters.get("weight")
    return scale, module._parameters.get("bias")


def normalisation_of(module: nn.Module) -> Normalise | None:
    """Return the function of a layer that has trained parameters and no others than a scale and a shift, else None.

    Subclasses with a forward of their own have none.
    """
    trained = {id(each) for each in module._parameters.values() if each is not None and each.requires_grad}
    if not trained or not trained <= {id(each) for each in _affine_parameters(module)}:
        return None
    return _registered(NORMALISATIONS, module)


def by_sample(values: Tensor, parameter: Tensor, first: int) -> Tensor:
    """Return values summed over the positions of each sample.

    Args:
        values: of the shape of the layer's output, (samples, …).
        parameter: the parameter.
        first: dimension of `values` that the parameter's first one is.

    Returns:
        Of shape (samples, …), with the parameter's shape behind that.
    """
    kept = {0, *range(first, first + parameter.dim())}
    summed = [dim for dim in range(values.dim()) if dim not in kept]
    return torch.sum(values, summed) if summed else values


Arrived = Callable[[dict[str, Tensor]], None]
"""Function that receives the gradients of a layer's parameters by sample, by the name in the layer, in backward."""


class AffineBySample(ForwardOverride):
    """Forward of a layer that ends in a scale and a shift, whose backward hands over their gradients by sample.

    It forms no sum of them, so that a gradient of its parameters that autograd forms has come from somewhere else.

    Args:
        module: the layer.
        recorder: called in each forward pass with the layer's input; returns the function for its backward.
    """

    def __init__(self, module: nn.Module, recorder: Callable[[Tensor], Arrived]) -> None:
        super().__init__(module)
        self._recorder = recorder
        normalise = normalisation_of(module)
        assert normalise is not None
        self._normalise = normalise
        self._parameters = _affine_parameters(module)

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        parameters = _affine_parameters(self.module)
        if not _captures(parameters, self._parameters):
            return self.plain(*args, **kwargs)
        (inputs,) = (*args, *kwargs.values())
        normalised, first = self._normalise(self.module, inputs)
        return _affine(normalised, *parameters, first, self._recorder(inputs))


class _Affine(torch.autograd.Function):
    """``x * weight + bias``, whose backward hands over the gradients of weight and bias by sample."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, first: int, arrived: Arrived
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight, bias)
        ctx.first, ctx.arrived = first, arrived
        outputs = inputs if weight is None else inputs * _aligned(weight, inputs, first)
        return outputs if bias is None else outputs + _aligned(bias, inputs, first)

    @staticmethod
    def backward(ctx: Any, deltas: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, bias = ctx.saved_tensors
        found = {}
        if ctx.needs_input_grad[1]:
            found["weight"] = by_sample(deltas * inputs, weight, ctx.first).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            found["bias"] = by_sample(deltas, bias, ctx.first).to(bias.dtype)
        if found:
            ctx.arrived(found)
        of_inputs = deltas if weight is None else deltas * _aligned(weight, inputs, ctx.first)
        return of_inputs.to(inputs.dtype), None, None, None, None


def _aligned(parameter: Tensor, inputs: Tensor, first: int) -> Tensor:
    """Return a parameter in a shape that is broadcast to that of the inputs, in their type."""
    behind = inputs.dim() - first - parameter.dim()
    return parameter.view(*parameter.shape, *[1] * behind).to(inputs.dtype)


_affine: Callable[..., Tensor] = _Affine.apply


class Layout(NamedTuple):
    """Places of the samples in a call of a layer.

    Attributes:
        inputs: the dimension of each argument that is that of the samples, in the structure of `arguments`; None for
            one that all samples share. A pair (dimension, number) says that each sample has so many rows.
        arguments: the arguments as keywords.
        outputs: the dimension of each output that is a tensor, in order.
    """

    inputs: dict[str, Any]
    arguments: dict[str, Any]
    outputs: tuple[int, ...]


Places = Callable[..., Layout]
"""Function of the layer and the arguments of its call that returns the places of the samples."""

ONE_BY_ONE: Registry[type[nn.Module], Places] = Registry("layer that is run sample by sample")


def register_one_by_one(*kinds: type[nn.Module]) -> Callable[[Places], Places]:
    """Register the function of layer types; a decorator."""
    return _registering(ONE_BY_ONE, kinds)


@register_one_by_one(nn.RNN, nn.LSTM, nn.GRU)
def _recurrent(module: nn.Module, input: Any, hx: Any = None) -> Layout:
    assert isinstance(module, nn.RNNBase)
    if not isinstance(input, Tensor):
        raise PrivacyError("privacy: a packed sequence has no dimension of samples; give the layer a padded tensor")
    _need_batch(module, input, 3)
    dimension = 0 if module.batch_first else 1
    states = (1, 1) if isinstance(module, nn.LSTM) else (1,)
    of_hx = None if hx is None else states if isinstance(module, nn.LSTM) else 1
    return Layout({"input": dimension, "hx": of_hx}, {"input": input, "hx": hx}, (dimension, *states))


@register_one_by_one(nn.MultiheadAttention)
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Layout:
    assert isinstance(module, nn.MultiheadAttention)
    _need_batch(module, query, 3)
    dimension = 0 if module.batch_first else 1
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "key_padding_mask": key_padding_mask,
        "need_weights": need_weights,
        "attn_mask": attn_mask,
        "average_attn_weights": average_attn_weights,
        "is_causal": is_causal,
    }
    places: dict[str, Any] = dict.fromkeys(arguments)
    places |= dict.fromkeys(("query", "key", "value"), dimension)
    if key_padding_mask is not None:
        places["key_padding_mask"] = 0
    if attn_mask is not None and attn_mask.dim() == 3:
        places["attn_mask"] = (0, module.num_heads)
    return Layout(places, arguments, (dimension, 0))


@register_one_by_one(nn.Bilinear)
def _bilinear(module: nn.Module, input1: Tensor, input2: Tensor) -> Layout:
    return Layout({"input1": 0, "input2": 0}, {"input1": input1, "input2": input2}, (0,))


@register_one_by_one(nn.PReLU)
def _prelu(module: nn.Module, input: Tensor) -> Layout:
    return Layout({"input": 0}, {"input": input}, (0,))


def _need_batch(module: nn.Module, input: Tensor, dimensions: int) -> None:
    if input.dim() != dimensions:
        raise PrivacyError(
            f"privacy needs a batch: {type(module).__name__} was given an input of {input.dim()} dimensions, where one "
            f"of {dimensions} holds samples"
        )


def places_of(module: nn.Module) -> Places | None:
    """Return the function of a layer, or None for other layers and for subclasses with a forward of their own."""
    return _registered(ONE_BY_ONE, module)


class OneByOne(ForwardOverride):
    """Forward of a layer that runs it on each sample alone, and whose backward hands over the gradients of each.

    Args:
        module: the layer.
        recorder: called in each forward pass with the layer's input, and the dimension of its samples; returns the
            function for its backward.
    """

    def __init__(self, module: nn.Module, recorder: Callable[[Tensor, int], Arrived]) -> None:
        super().__init__(module)
        self._recorder = recorder
        places = places_of(module)
        assert places is not None
        self._places = places
        self._parameters = list(module.parameters())

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters = list(self.module.parameters())
        if not _captures(parameters, self._parameters):
            return self.plain(*args, **kwargs)
        layout = self._places(self.module, *args, **kwargs)
        first = next(iter(layout.arguments))
        arrived = self._recorder(layout.arguments[first], layout.inputs[first])
        call = _Call(self.module, layout)
        outputs = _one_by_one(call, arrived, len(call.tensors), *call.tensors, *parameters)
        return call.rebuilt(outputs)


class _Call:
    """A call of a layer, which is made with one sample after the other.

    Args:
        module: the layer.
        layout: the places of the samples.

    Attributes:
        tensors: the tensors among the arguments that gradients may be needed of, each once.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self._module, self._outputs = module, layout.outputs
        self._leaves, self._structure = tree_flatten(layout.arguments)
        self._dimensions = _broadcast(layout.inputs, layout.arguments)
        self._samples = int(self._leaves[0].shape[_dimension(self._dimensions[0])])  # by the first argument
        self.tensors: list[Tensor] = []
        for leaf in self._leaves:
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not any(leaf is each for each in self.tensors):
                self.tensors.append(leaf)
        self._numbers = [
            next((number for number, each in enumerate(self.tensors) if each is leaf), -1) for leaf in self._leaves
        ]
        self._places = [self._dimensions[self._numbers.index(number)] for number in range(len(self.tensors))]
        self._output_spec: TreeSpec | None = None
        self._kept: list[tuple[list[Tensor], list[Tensor]]] = []  # inputs and outputs of each sample
        self._shadow: nn.Module = module

    def forward(self) -> tuple[Tensor, ...]:
        """Run the layer on each sample; return its outputs for all, without gradient."""
        self._shadow = _shadow(self._module)
        found: list[list[Tensor]] = []
        for sample in range(max(1, self._samples)):
            with torch.enable_grad():
                inputs = [
                    self._slice(each, place, sample).detach().requires_grad_(each.requires_grad)
                    for each, place in zip(self.tensors, self._places, strict=True)
                ]
                leaves = [
                    inputs[number] if number >= 0 else self._slice(leaf, place, sample)
                    for leaf, number, place in zip(self._leaves, self._numbers, self._dimensions, strict=True)
                ]
                result = type(self._module).forward(self._shadow, **tree_unflatten(leaves, self._structure))
            outputs, self._output_spec = tree_flatten(result)
            self._kept.append((inputs, [each for each in outputs if isinstance(each, Tensor)]))
            self._absent = [not isinstance(each, Tensor) for each in outputs]
            found.append([each.detach() for each in self._kept[-1][1]])
        return tuple(
            torch.cat(parts, dimension)
            for parts, dimension in zip(zip(*found, strict=True), self._outputs, strict=False)
        )

    def backward(self, deltas: Sequence[Tensor]) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Return the gradients of `tensors`, and those of the parameters by sample, from those of the outputs."""
        if not self._kept:
            raise PrivacyError("a second backward pass through one forward pass, by which a sample counts twice")
        parameters = {name: each for name, each in self._shadow.named_parameters() if each.requires_grad}
        of_tensors: list[list[Tensor]] = [[] for _ in self.tensors]
        of_parameters: dict[str, list[Tensor]] = {name: [] for name in parameters}
        for sample, (inputs, outputs) in enumerate(self._kept):
            wanted = [each for each in inputs if each.requires_grad]
            parts = [
                self._slice(delta, dimension, sample) for delta, dimension in zip(deltas, self._outputs, strict=False)
            ]
            through = [(output, part) for output, part in zip(outputs, parts, strict=True) if output.requires_grad]
            found = torch.autograd.grad(
                [output for output, _ in through],
                [*wanted, *parameters.values()],
                [part for _, part in through],
                allow_unused=True,
                materialize_grads=True,
            )
            numbers = [number for number, each in enumerate(inputs) if each.requires_grad]
            for number, gradient in zip(numbers, found, strict=False):
                of_tensors[number].append(gradient)
            for name, gradient in zip(parameters, found[len(wanted) :], strict=True):
                of_parameters[name].append(gradient)
        self._kept.clear()
        joined = [
            None if not parts else sum(parts[1:], parts[0]) if place is None else torch.cat(parts, _dimension(place))
            for parts, place in zip(of_tensors, self._places, strict=True)
        ]
        return joined, {name: torch.stack(parts) for name, parts in of_parameters.items()}

    def rebuilt(self, outputs: Sequence[Tensor]) -> Any:
        """Return outputs in the structure in which the layer returns them."""
        assert self._output_spec is not None
        remaining = iter(outputs)
        return tree_unflatten([None if absent else next(remaining) for absent in self._absent], self._output_spec)

    def _slice(self, leaf: Any, place: Any, sample: int) -> Any:
        if place is None or not isinstance(leaf, Tensor) or not self._samples:
            return leaf
        each = place[1] if isinstance(place, tuple) else 1
        return leaf.narrow(_dimension(place), sample * each, each)


def _dimension(place: Any) -> int:
    dimension: int = place[0] if isinstance(place, tuple) else place
    return dimension


def _broadcast(places: dict[str, Any], arguments: dict[str, Any]) -> list[Any]:
    """Return the place of each leaf of the arguments."""
    found: list[Any] = []
    for name, argument in arguments.items():
        leaves, _ = tree_flatten(argument)
        place = places[name]
        several = isinstance(argument, (tuple, list))
        found += list(place) if several and place is not None else [place] * len(leaves)
    return found


def _shadow(module: nn.Module) -> nn.Module:
    """Return a copy of a module with leaves of its own that share the memory of its parameters."""
    copied = copy.copy(module)
    vars(copied).pop("forward", None)
    vars(copied)["_parameters"] = {
        name: None if each is None else each.detach().requires_grad_(each.requires_grad)
        for name, each in module._parameters.items()
    }
    copied._modules = {name: None if each is None else _shadow(each) for name, each in module._modules.items()}
    if isinstance(copied, nn.RNNBase):
        vars(copied)["_flat_weights"] = [copied._parameters.get(name) for name in copied._flat_weights_names]
    return copied


_once_differentiable: Callable[..., Any] = torch.autograd.function.once_differentiable


class _OneByOne(torch.autograd.Function):
    """Call of a layer with one sample after the other, whose backward hands over the parameters' gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, arrived: Arrived, tensors: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.arrived, ctx.tensors = call, arrived, tensors
        return call.forward()

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Tensor | None, ...]:
        of_tensors, of_parameters = ctx.call.backward(deltas)
        ctx.arrived(of_parameters)
        return None, None, None, *of_tensors, *[None] * (len(ctx.needs_input_grad) - 3 - ctx.tensors)


_one_by_one: Callable[..., tuple[Tensor, ...]] = _OneByOne.apply
