"""Factors of embeddings: the distinct rows that were looked up, and the sums of their deltas.

``grad W[i] = sum of the deltas of all lookups of row i``, and zero for all other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .factor import Form
from .registry import LayerFamily, Recorder, gradient_use, register_family


@dataclass(frozen=True, kw_only=True)
class TableForm(Form):
    """Form of a table's gradient: activations are row numbers, of shape (rows, 1), deltas have shape (rows, width).

    Attributes:
        width: width of the table's rows.
        table_rows: their number.
        sparse: whether the gradient is a sparse tensor.
    """

    encoded: ClassVar[bool] = False

    width: int
    table_rows: int  # type: ignore[misc]
    sparse: bool  # type: ignore[misc]

    def widths(self, shape: tuple[int, int]) -> tuple[int, int]:
        return self.width, 1

    @property
    def may_be_dense(self) -> bool:
        return not self.sparse

    def gradient(self, deltas: Tensor, activations: Tensor) -> Tensor:
        numbers, shape = activations[:, 0].long(), (self.table_rows, self.width)
        if not self.sparse:
            return deltas.new_zeros(shape).index_add_(0, numbers, deltas)
        numbers, deltas = _sum_by_number(numbers, deltas)
        return torch.sparse_coo_tensor(numbers[None], deltas, shape, is_coalesced=True, check_invariants=False)

    def add_to(self, gradient: Tensor, deltas: Tensor, activations: Tensor) -> Tensor:
        if not self.sparse:
            return gradient.index_add_(0, activations[:, 0].long(), deltas)
        numbers = torch.cat([gradient._indices()[0], activations[:, 0].long()])
        return self.gradient(torch.cat([gradient._values(), deltas]), numbers[:, None])

    def by_row(self, deltas: Tensor, activations: Tensor) -> None:
        return None  # lookups of one row of the table by several samples have been added up

    def unfold(self, deltas: Tensor, activations: Tensor) -> tuple[Tensor, Tensor]:
        one_hot = deltas.new_zeros(len(deltas), self.table_rows)
        return one_hot.scatter_(1, activations[:, :1].long(), 1), deltas

    def merge(self, deltas: Tensor, activations: Tensor) -> tuple[Tensor, Tensor]:
        numbers, deltas = _sum_by_number(activations[:, 0], deltas)
        return deltas, numbers[:, None]


def _sum_by_number(numbers: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor]:
    """Add up the deltas of equal row numbers; return the numbers in ascending order, and the sums."""
    unique, places = torch.unique(numbers, return_inverse=True)
    return unique, deltas.new_zeros(len(unique), deltas.shape[1]).index_add_(0, places, deltas)


def _table_gradient(ctx: Any, numbers: Tensor, deltas: Tensor) -> Tensor | None:
    """Record the factors of lookups, or form the table's gradient, as the running backward pass needs them.

    Args:
        ctx: context of the layer's `torch.autograd.Function`, whose first input is the table.
        numbers: row numbers, of any shape.
        deltas: deltas of each lookup, of shape (…, width).
    """
    form: TableForm = ctx.form
    use = gradient_use(ctx, ctx.weight_gradients, weight=0, bias=None)
    numbers, deltas = numbers.reshape(-1), deltas.reshape(-1, form.width)
    if ctx.padding_idx is not None:
        real = numbers != ctx.padding_idx
        numbers, deltas = numbers[real], deltas[real]
    sums, rows = form.merge(deltas, numbers[:, None])
    if use.record:
        ctx.record(rows, sums.detach(), form)
    return form.gradient(sums, rows) if use.weight else None


class _Table(LayerFamily):
    """Base of the families of tables."""

    bias = ""

    def known_form(self, module: nn.Module) -> TableForm:
        assert isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        return TableForm(width=module.embedding_dim, table_rows=module.num_embeddings, sparse=module.sparse)

    def refuses(self, module: nn.Module) -> str:
        assert isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq counts the lookups of one site's batch"
        if module.max_norm is not None:
            return "max_norm changes rows while they are looked up"
        return ""


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
        return _table_gradient(ctx, numbers, deltas), None, None, None, None, None


_embedding: Callable[..., Tensor] = _EmbeddingWithFactors.apply


@register_family(nn.Embedding)
class Embedding(_Table):
    """Family of embeddings, sparse or dense."""

    def forward(self, module: nn.Module, record: Recorder, weight_gradients: bool, input: Tensor) -> Tensor:
        assert isinstance(module, nn.Embedding)
        weight, form = module._parameters["weight"], self.known_form(module)
        return _embedding(weight, input, module.padding_idx, form, record, weight_gradients)


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
        form: TableForm,
        record: Recorder,
        weight_gradients: bool,
    ) -> Tensor:
        ctx.save_for_backward(numbers, bags, *(() if scales is None else (scales, weight)))
        ctx.padding_idx, ctx.mean = module.padding_idx, module.mode == "mean"
        ctx.form = form
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
        return _table_gradient(ctx, numbers, of_lookups), None, None, None, grad_scales, None, None, None, None


_embedding_bag: Callable[..., Tensor] = _BagsWithFactors.apply


@register_family(nn.EmbeddingBag)
class EmbeddingBag(_Table):
    """Family of bags of embeddings, summed or averaged, with or without per-sample weights."""

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
        input, bounds, per_sample_weights = self.bags(module, input, offsets, per_sample_weights)
        sizes = bounds.diff()
        bags = torch.repeat_interleave(torch.arange(len(sizes), device=input.device), sizes)
        weight, form = module._parameters["weight"], self.known_form(module)
        return _embedding_bag(
            weight, input, bags, bounds.to(input.dtype), per_sample_weights, module, form, record, weight_gradients
        )

    @staticmethod
    def bags(
        module: nn.EmbeddingBag, input: Tensor, offsets: Tensor | None, scales: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the row numbers of all lookups, the bounds of the bags among them, and the lookups' weights."""
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError("offsets must be None where the input has two dimensions, a bag a row")
            count, size = input.shape
            bounds = size * torch.arange(count + 1, device=input.device)
            return input.reshape(-1), bounds, None if scales is None else scales.reshape(-1)
        if offsets is None:
            raise ValueError("offsets are needed where the input has one dimension")
        end = offsets.new_tensor([len(input)])
        return input, offsets if module.include_last_offset else torch.cat([offsets, end]), scales

    def refuses(self, module: nn.Module) -> str:
        return "mode max has no factors" if module.mode == "max" else super().refuses(module)
