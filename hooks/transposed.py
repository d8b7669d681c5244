"""Factors of linear layers with a weight of shape (in, out): ``Y = A W + b`` has ``grad W = A^T D``.

transformers' `Conv1D`, of which GPT-2 is built, is such a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .form import Form
from .gradient_use import gradient_use
from .libraries import LibraryLinear
from .products import linear, product, uses_fastest
from .registry import Recorder, register_family


@dataclass(frozen=True)
class TransposedForm(Form):
    """Form of linear layers whose weight has the shape (in, out)."""

    transposed: ClassVar[bool] = True

    def widths(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape[1], shape[0]

    def gradient(self, deltas: Tensor, activations: Tensor) -> Tensor:
        return activations.T @ deltas

    def add_to(self, gradient: Tensor, deltas: Tensor, activations: Tensor) -> Tensor:
        return gradient.addmm_(activations.T, deltas)

    def unfold(self, deltas: Tensor, activations: Tensor) -> tuple[Tensor, Tensor]:
        return activations, deltas


TRANSPOSED = TransposedForm()


class _TransposedLinearWithFactors(torch.autograd.Function):
    """``A W + b`` whose backward records the factors, and forms the weight gradient only on request."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, record: Recorder, weight_gradients: bool
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.record = record
        ctx.weight_gradients = weight_gradients
        ctx.fast = uses_fastest()
        return linear(inputs, weight.T, bias)

    @staticmethod
    def backward(ctx: Any, deltas: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        use = gradient_use(ctx, ctx.weight_gradients)
        rows_in, rows_out = inputs.reshape(-1, weight.shape[0]), deltas.reshape(-1, weight.shape[1])
        if use.record:
            ctx.record(rows_in.detach(), rows_out.detach(), TRANSPOSED)
        grad_inputs = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:  # under autocast the deltas come in a narrower type than weight or input
            grad_inputs = product(deltas, weight.to(deltas.dtype).T, fast=ctx.fast).to(inputs.dtype)
        if use.weight:
            grad_weight = rows_in.to(weight.dtype).T @ rows_out.to(weight.dtype)
        if use.bias:
            grad_bias = rows_out.sum(0).to(weight.dtype)
        return grad_inputs, grad_weight, grad_bias, None, None


_transposed_linear: Callable[..., Tensor] = _TransposedLinearWithFactors.apply


@register_family("transformers.pytorch_utils.Conv1D")
class TransposedLinear(LibraryLinear):
    """Family of linear layers with a weight of shape (in, out)."""

    in_dimension = 0

    def known_form(self, module: nn.Module) -> Form:
        return TRANSPOSED

    def forward(self, module: nn.Module, record: Recorder, weight_gradients: bool, x: Tensor) -> Tensor:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        return _transposed_linear(x, weight, bias, record, weight_gradients)
