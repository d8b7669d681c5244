"""Factors of `nn.EmbeddingBag`; see `hooks/table.py` for their form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .form import Form
from .gradient_use import gradient_use
from .registry import LayerFamily, Recorder, register_family
from .table import factors_of_lookups, form_of, why_dense


class _BagsWithFactors(torch.autograd.Function):
    """`F.embedding_bag` whose backward records the factors, and forms the table's gradient only on request.

    A lookup's delta is that of its bag, times the lookup's weight: the given one, or one over the number of the bag's
    lookups in a mean.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        numbers: Tensor,
        bags: Tensor,
        offsets: Tensor,
        scales: Tensor | None,
        module: nn.EmbeddingBag,
        record: Recorder,
        weight_gradients: bool,
    ) -> Tensor:
        ctx.save_for_backward(numbers, bags, *(() if scales is None else (scales, weight)))
        ctx.padding_idx, ctx.mean = module.padding_idx, module.mode == "mean"
        ctx.form = form_of(module)
        ctx.record = record
        ctx.weight_gradients = weight_gradients
        return F.embedding_bag(
            numbers,
            weight,
            offsets,
            mode=module.mode,
            per_sample_weights=scales,
            include_last_offset=True,
            padding_idx=module.padding_idx,
        )

    @staticmethod
    def backward(ctx: Any, deltas: Tensor) -> tuple[Tensor | None, ...]:
        numbers, bags, *weighted = ctx.saved_tensors
        of_lookups = deltas[bags]
        grad_scales = None
        if weighted:
            scales, weight = weighted
            if ctx.needs_input_grad[4]:
                grad_scales = (of_lookups * weight[numbers]).sum(1)
                if ctx.padding_idx is not None:
                    grad_scales = grad_scales * (numbers != ctx.padding_idx)
            of_lookups = of_lookups * scales[:, None]
        if ctx.mean:
            real = torch.ones_like(bags) if ctx.padding_idx is None else (numbers != ctx.padding_idx).long()
            sizes = torch.zeros(deltas.shape[0], dtype=torch.long, device=bags.device).index_add_(0, bags, real)
            of_lookups = of_lookups / sizes.clamp(min=1)[bags, None].to(deltas.dtype)
        use = gradient_use(ctx, ctx.weight_gradients, weight=0, bias=None)
        rows, sums, form = factors_of_lookups(ctx.form, numbers, of_lookups, ctx.padding_idx)
        if use.record:
            ctx.record(rows, sums.detach(), form)
        grad_weight = form.gradient(sums, rows) if use.weight else None
        return grad_weight, None, None, None, grad_scales, None, None, None


_embedding_bag: Callable[..., Tensor] = _BagsWithFactors.apply


@register_family(nn.EmbeddingBag)
class EmbeddingBag(LayerFamily):
    """Family of bags of embeddings, summed or averaged, with or without per-sample weights."""

    bias = ""

    def forward(
        self,
        module: nn.Module,
        record: Recorder,
        weight_gradients: bool,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(module, nn.EmbeddingBag)
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError("offsets must be None where the input has two dimensions, a bag a row")
            bounds = torch.arange(0, input.numel() + 1, max(1, input.shape[1]), device=input.device)
            input = input.reshape(-1)
            per_sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        elif offsets is None:
            raise ValueError("offsets are needed where the input has one dimension")
        else:
            end = offsets.new_tensor([len(input)])
            bounds = offsets if module.include_last_offset else torch.cat([offsets, end])
        sizes = bounds.diff()
        bags = torch.repeat_interleave(torch.arange(len(sizes), device=input.device), sizes)
        weight = module._parameters["weight"]
        return _embedding_bag(
            weight, input, bags, bounds.to(input.dtype), per_sample_weights, module, record, weight_gradients
        )

    def known_form(self, module: nn.Module) -> Form:
        assert isinstance(module, nn.EmbeddingBag)
        return form_of(module)

    def refuses(self, module: nn.Module) -> str:
        assert isinstance(module, nn.EmbeddingBag)
        if module.mode == "max":
            return "mode max has no factors"
        return why_dense(module)
