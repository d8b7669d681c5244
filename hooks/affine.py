"""Per-sample gradients of scale and shift in normalisation layers, ``Y = X w + b`` with X normalised sample by sample.

``grad w_i = sum over positions of D_i X_i`` and ``grad b_i = sum over positions of D_i``: vectors as long as the
parameters, one for each sample, so that they are formed as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .capture import ForwardOverride, eager

SampleGradients = Callable[[Tensor | None, Tensor | None], None]
"""Function that receives the gradients of scale and shift, of shape (samples, …); None for what is not there."""


class _Affine(torch.autograd.Function):
    """Scale and shift that hand over the gradients of each sample in backward, in place of their sum."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, scale: Tensor | None, shift: Tensor | None, shape: list[int], record: SampleGradients
    ) -> Tensor:
        ctx.save_for_backward(inputs, scale)
        ctx.shape, ctx.record, ctx.has_shift = shape, record, shift is not None
        ctx.parameter_shape = (scale if scale is not None else shift).shape  # type: ignore[union-attr]
        outputs = inputs if scale is None else inputs * scale.view(shape)
        return outputs + shift.view(shape) if shift is not None else outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, deltas: Tensor) -> tuple[Tensor | None, ...]:
        inputs, scale = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        of_scale = _by_sample(deltas * inputs, ctx) if wanted[1] else None
        of_shift = _by_sample(deltas, ctx) if wanted[2] else None
        if wanted[1] or wanted[2]:
            ctx.record(of_scale, of_shift)
        of_inputs = deltas if scale is None else deltas * scale.view(ctx.shape)
        return of_inputs, None, None, None, None


def _by_sample(values: Tensor, ctx: Any) -> Tensor:
    """Add up over all dimensions but the first, and those of the parameter."""
    shape = [1] * (values.dim() - len(ctx.shape)) + list(ctx.shape)
    summed = [dim for dim in range(1, values.dim()) if shape[dim] == 1]
    sums = values.sum(summed) if summed else values
    return sums.reshape(len(values), *ctx.parameter_shape).detach()


_affine: Callable[..., Tensor] = _Affine.apply


def _layer_norm(module: Any, inputs: Tensor) -> tuple[Tensor, list[int]]:
    return F.layer_norm(inputs, module.normalized_shape, None, None, module.eps), list(module.normalized_shape)


def _rms_norm(module: Any, inputs: Tensor) -> tuple[Tensor, list[int]]:
    return F.rms_norm(inputs, module.normalized_shape, None, module.eps), list(module.normalized_shape)


def _group_norm(module: Any, inputs: Tensor) -> tuple[Tensor, list[int]]:
    shape = [module.num_channels, *[1] * (inputs.dim() - 2)]
    return F.group_norm(inputs, module.num_groups, None, None, module.eps), shape


def _instance_norm(module: Any, inputs: Tensor) -> tuple[Tensor, list[int]]:
    shape = [module.num_features, *[1] * (inputs.dim() - 2)]
    return F.instance_norm(inputs, eps=module.eps), shape


_NORMALISED: dict[type[nn.Module], Callable[[Any, Tensor], tuple[Tensor, list[int]]]] = {
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
    nn.InstanceNorm1d: _instance_norm,
    nn.InstanceNorm2d: _instance_norm,
    nn.InstanceNorm3d: _instance_norm,
}


def has_sample_gradients(module: nn.Module) -> bool:
    """Return whether a layer is a normalisation with scale or shift, whose gradients can be had sample by sample.

    Args:
        module: the layer.
    """
    kind = next((kind for kind in _NORMALISED if isinstance(module, kind)), None)
    if kind is None or type(module).forward is not kind.forward or getattr(module, "track_running_stats", False):
        return False
    return any(isinstance(module._parameters.get(name), nn.Parameter) for name in ("weight", "bias"))


class SampleNorm(ForwardOverride):
    """Forward of a normalisation layer that hands over the gradients of each sample.

    Args:
        module: the layer.
        recorder: called in each forward pass with the layer's input; returns what receives the gradients in backward.
    """

    def __init__(self, module: nn.Module, recorder: Callable[[nn.Module, Tensor], SampleGradients]) -> None:
        super().__init__(module)
        self._recorder = recorder
        kind = next(kind for kind in _NORMALISED if isinstance(module, kind))
        self._normalised = _NORMALISED[kind]

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        (inputs,) = (*args, *kwargs.values())
        weight, bias = self.module._parameters.get("weight"), self.module._parameters.get("bias")
        trained = any(each is not None and each.requires_grad for each in (weight, bias))
        if not trained or not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            return self.plain(*args, **kwargs)
        normalised, shape = self._normalised(self.module, inputs)
        return _affine(normalised, weight, bias, shape, self._recorder(self.module, inputs))
