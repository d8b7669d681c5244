"""Factors of `nn.Linear`: ``Y = A W^T + b`` has ``grad W = D^T A`` and ``grad b = D^T 1``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .form import LINEAR, Form
from .gradient_use import gradient_use
from .registry import LayerFamily, Recorder, register_family


class _LinearWithFactors(torch.autograd.Function):
    """`F.linear` whose backward records the factors, and forms the weight gradient only on request."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, record: Recorder, weight_gradients: bool
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.record = record
        ctx.weight_gradients = weight_gradients
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, deltas: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        use = gradient_use(ctx, ctx.weight_gradients)
        rows_in, rows_out = inputs.reshape(-1, weight.shape[1]), deltas.reshape(-1, weight.shape[0])
        if use.record:
            ctx.record(rows_in.detach(), rows_out.detach())
        grad_inputs = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:  # under autocast the deltas come in a narrower type than weight or input
            grad_inputs = (deltas @ weight.to(deltas.dtype)).to(inputs.dtype)
        if use.weight:
            grad_weight = rows_out.to(weight.dtype).T @ rows_in.to(weight.dtype)
        if use.bias:
            grad_bias = rows_out.sum(0).to(weight.dtype)
        return grad_inputs, grad_weight, grad_bias, None, None


_linear: Callable[..., Tensor] = _LinearWithFactors.apply


@register_family(nn.Linear)
class Linear(LayerFamily):
    """Family of fully connected layers; inputs may have any number of leading dimensions."""

    def known_form(self, module: nn.Module) -> Form:
        return LINEAR

    def forward(self, module: nn.Module, record: Recorder, weight_gradients: bool, input: Tensor) -> Tensor:
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        return _linear(input, weight, bias, record, weight_gradients)
