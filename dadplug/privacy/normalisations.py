"""Gradients by sample of layers that end in a scale and a shift: normalisations of each sample, and biases alone.

A normalisation ``y = n(x) * weight + bias`` has the gradient ``sum over positions of delta * n(x)`` for its weight, and
that of the deltas for its bias. A further layer is a function that is registered by `register_normalisation`. A linear
layer or convolution whose weight is frozen is ``n(x) + bias``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..hooks import ForwardOverride, eager
from ..registry import Registry

Normalise = Callable[[nn.Module, Tensor], tuple[Tensor, int]]
"""Function of the layer and its input that returns ``n(x)``, and the first dimension of the parameters in it; the
parameters have that dimension and those after it, or that one alone for channels."""

NORMALISATIONS: Registry[type[nn.Module], Normalise] = Registry("normalisation")


def register_normalisation(*kinds: type[nn.Module]) -> Callable[[Normalise], Normalise]:
    """Register the function of layer types; a decorator."""

    def decorate(function: Normalise) -> Normalise:
        for kind in kinds:
            NORMALISATIONS.register(kind)(function)
        return function

    return decorate


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
    for kind, function in NORMALISATIONS.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return function
    return None


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
        # `torch.func.functional_call` puts other tensors in their place.
        own = all(each is kept for each, kept in zip(parameters, self._parameters, strict=True))
        trained = own and any(each is not None and each.requires_grad for each in parameters)
        if not trained or not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
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
        return outputs.view_as(outputs) if bias is None else outputs + _aligned(bias, inputs, first)

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
