"""Gradients by sample of layers that normalise each sample by itself: layer, group, instance and RMS normalisation.

A normalisation ``y = n(x) * weight + bias`` has the gradient ``sum over positions of delta * n(x)`` for its weight, and
that of the deltas for its bias. A further layer is a function that is registered by `register_normalisation`.
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


def normalisation_of(module: nn.Module) -> Normalise | None:
    """Return the function of a layer, or None for other layers and for subclasses with a forward of their own."""
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


class NormalisationBySample(ForwardOverride):
    """Forward of a normalisation whose backward hands over the gradients of each sample, and forms no sum of them.

    So a gradient of its parameters that autograd forms has come from somewhere else.

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
        self._parameters = [module._parameters.get(name) for name in ("weight", "bias")]

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        parameters = [self.module._parameters.get(name) for name in ("weight", "bias")]
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
