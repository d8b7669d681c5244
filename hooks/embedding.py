"""Factors of `nn.Embedding`; see `hooks/table.py` for their form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .form import Form
from .gradient_use import gradient_use
from .registry import LayerFamily, Recorder, register_family
from .table import TableForm, factors_of_lookups, form_of, why_dense


class _EmbeddingWithFactors(torch.autograd.Function):
    """`F.embedding` whose backward records the factors, and forms the table's gradient only on request."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        numbers: Tensor,
        padding_idx: int | None,
        form: TableForm,
        record: Recorder,
        weight_gradients: bool,
    ) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.padding_idx = padding_idx
        ctx.form = form
        ctx.record = record
        ctx.weight_gradients = weight_gradients
        return F.embedding(numbers, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, deltas: Tensor) -> tuple[Tensor | None, ...]:
        (numbers,) = ctx.saved_tensors
        use = gradient_use(ctx, ctx.weight_gradients, weight=0, bias=None)
        rows, sums, form = factors_of_lookups(ctx.form, numbers, deltas, ctx.padding_idx)
        if use.record:
            ctx.record(rows, sums.detach(), form)
        grad_weight = form.gradient(sums, rows) if use.weight else None
        return grad_weight, None, None, None, None, None


_embedding: Callable[..., Tensor] = _EmbeddingWithFactors.apply


@register_family(nn.Embedding)
class Embedding(LayerFamily):
    """Family of embeddings, sparse or dense."""

    bias = ""

    def forward(self, module: nn.Module, record: Recorder, weight_gradients: bool, input: Tensor) -> Tensor:
        assert isinstance(module, nn.Embedding)
        return _embedding(
            module._parameters["weight"], input, module.padding_idx, form_of(module), record, weight_gradients
        )

    def known_form(self, module: nn.Module) -> Form:
        assert isinstance(module, nn.Embedding)
        return form_of(module)

    def refuses(self, module: nn.Module) -> str:
        assert isinstance(module, nn.Embedding)
        return why_dense(module)
