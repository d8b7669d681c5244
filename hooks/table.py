"""Factors of embeddings: the distinct rows that were looked up, and the sums of their deltas.

``grad W[i] = sum of the deltas of all lookups of row i``, and zero for all other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .form import Form


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


def form_of(module: nn.Embedding | nn.EmbeddingBag) -> TableForm:
    """Return the form of a table's factors."""
    return TableForm(width=module.embedding_dim, table_rows=module.num_embeddings, sparse=module.sparse)


def why_dense(module: nn.Embedding | nn.EmbeddingBag) -> str:
    """Return the reason why a table's gradient is not the sum over its lookups; an empty string if it is."""
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq counts the lookups of one site's batch"
    if module.max_norm is not None:
        return "max_norm changes rows while they are looked up"
    return ""


def factors_of_lookups(form: TableForm, numbers: Tensor, deltas: Tensor, padding_idx: int | None) -> tuple[Any, ...]:
    """Build the factors of lookups.

    Args:
        form: form of the table.
        numbers: row numbers, of any shape.
        deltas: deltas of each lookup, of shape (…, width).
        padding_idx: row without a gradient, or None.

    Returns:
        Activations, deltas and form, the arguments of a recorder.
    """
    numbers, deltas = numbers.reshape(-1), deltas.reshape(-1, form.width)
    if padding_idx is not None:
        real = numbers != padding_idx
        numbers, deltas = numbers[real], deltas[real]
    return (*reversed(form.merge(deltas, numbers[:, None])), form)
