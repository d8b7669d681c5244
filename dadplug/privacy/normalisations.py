"""Gradients by sample of layers that normalise each sample by itself: layer, group, instance and RMS normalisation.

A normalisation ``y = n(x) * weight + bias`` has the gradient ``sum over positions of delta * n(x)`` for its weight, and
that of the deltas for its bias. A further layer is a function that is registered by `register_normalisation`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
