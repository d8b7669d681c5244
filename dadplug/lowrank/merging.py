"""Best approximation of a sum of products, from Gram matrices of the factors alone.

For factors ``L`` (m x k) and ``R`` (n x k), ``L = Q T`` and ``R = P S`` with orthonormal Q and P, the singular value
decomposition of ``T S^T`` (k x k) is that of ``L R^T``. T and S follow from ``L^T L`` and ``R^T R``. So the best
approximation of rank r is ``(L X) (R Y)^T`` with X and Y of k x r: rows of L and R may be at different sites.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CUTOFF = {torch.float64: 1e-13, torch.float32: 1e-6}  # eigenvalues up to this share of the largest are rounding errors


def merge_coefficients(
    left: Tensor, right: Tensor, rank: int, precision: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Compute X and Y such that ``(L X) (R Y)^T`` is the best approximation of ``L R^T`` of a rank.

    Args:
        left: ``L^T L``, of shape (k, k).
        right: ``R^T R``, of shape (k, k).
        rank: the rank r.
        precision: type to which the matrices have been rounded; None for their own.

    Returns:
        X and Y, of shape (k, r), in double precision; columns beyond the rank of the product are zero, and all are NaN
        where a Gram matrix has NaN or Inf.
    """
    size = left.shape[0]
    if not bool(left.isfinite().all() and right.isfinite().all()):
        nothing = left.new_full((size, rank), torch.nan, dtype=torch.float64)
        return nothing, nothing
    cutoff = _CUTOFF[precision or left.dtype]
    root_left, inverse_left = _roots(left, cutoff)
    root_right, inverse_right = _roots(right, cutoff)
    heads, values, tails = torch.linalg.svd(root_left @ root_right.T)
    scales = values[:rank].sqrt()
    found = min(rank, len(scales))
    x, y = left.new_zeros(2, size, rank, dtype=torch.float64)
    x[:, :found] = inverse_left @ (heads[:, :found] * scales)
    y[:, :found] = inverse_right @ (tails[:found].T * scales)
    return x, y


def _roots(gram: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
    """Return T with ``T^T T`` the Gram matrix, and its pseudo-inverse, without the directions that are rounding errors.

    Columns are scaled to norm one before, so that small ones are not taken for rounding errors.
    """
    norms = gram.diagonal().double().clamp_min(0.0).sqrt()
    shrink = torch.where(norms > 0, 1 / norms.clamp_min(1e-300), 0.0)
    values, vectors = torch.linalg.eigh(gram.double() * shrink * shrink[:, None])
    kept = values > cutoff * values[-1].clamp_min(0.0)
    values = torch.where(kept, values, 1.0).sqrt()
    root = torch.where(kept, values, 0.0)[:, None] * vectors.T * norms
    inverse = shrink[:, None] * vectors * torch.where(kept, 1 / values, 0.0)
    return root, inverse


def part_size(width: int, sites: int) -> int:
    """Return the number of columns in a part of a divided matrix; the last part is padded."""
    return -(-width // sites)


def divide_columns(matrix: Tensor, sites: int) -> list[Tensor]:
    """Return the columns of a matrix in parts of equal width, the last ones padded with zeros."""
    size = part_size(matrix.shape[1], sites)
    return list(torch.nn.functional.pad(matrix, (0, size * sites - matrix.shape[1])).split(size, 1))
