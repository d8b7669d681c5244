"""Kernels on rows in torch: for CUDA tensors, half precision, and where numba cannot run."""

from __future__ import annotations

import torch
from torch import Tensor


def first_outside(rows: Tensor, count: int) -> int:
    """Find the first row outside of a table; see `sparse_kernels.first_outside`."""
    outside = ((rows < 0) | (rows >= count)).nonzero()
    return int(outside[0]) if outside.numel() else -1


def gather(table: Tensor, rows: Tensor, out: Tensor) -> None:
    """Copy rows; see `sparse_kernels.gather`."""
    torch.index_select(table, 0, rows, out=out)


def scatter_add(table: Tensor, rows: Tensor, deltas: Tensor, scale: float) -> None:
    """Add to rows; see `sparse_kernels.scatter_add`."""
    table.index_add_(0, rows, deltas if scale == 1 else deltas * scale)


def unique(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Number distinct keys by their first occurrence; see `sparse_kernels.unique`."""
    ordered, inverse = torch.unique(keys, return_inverse=True)
    places = torch.arange(keys.numel(), device=keys.device)
    first = places.new_full((ordered.numel(),), keys.numel()).scatter_reduce_(0, inverse, places, "amin")
    order = torch.argsort(first)
    return ordered[order], torch.argsort(order)[inverse]


def sum_by(inverse: Tensor, deltas: Tensor, sums: Tensor) -> None:
    """Sum rows; see `sparse_kernels.sum_by`."""
    sums.zero_().index_add_(0, inverse, deltas)


def adagrad(weights: Tensor, sums: Tensor, rows: Tensor, gradients: Tensor, lr: float, eps: float) -> None:
    """Step rows; see `sparse_kernels.adagrad`."""
    total = sums[rows] + gradients * gradients
    sums[rows] = total
    weights[rows] = weights[rows] - lr * (gradients / (total.sqrt() + eps))


def rowwise_adagrad(weights: Tensor, sums: Tensor, rows: Tensor, gradients: Tensor, lr: float, eps: float) -> None:
    """Step rows; see `sparse_kernels.rowwise_adagrad`."""
    total = sums[rows] + gradients.double().square().mean(1).to(sums.dtype)
    sums[rows] = total
    weights[rows] = weights[rows] - (lr / (total.sqrt() + eps))[:, None] * gradients


def adam(
    weights: Tensor,
    averages: Tensor,
    squares: Tensor,
    rows: Tensor,
    gradients: Tensor,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Step rows; see `sparse_kernels.adam`."""
    m = averages[rows]
    m = m + (1 - beta1) * (gradients - m)
    v = squares[rows]
    v = v + (1 - beta2) * (gradients * gradients - v)
    averages[rows], squares[rows] = m, v
    weights[rows] = weights[rows] - rate * (m / (v.sqrt() + eps))
