"""Low-rank compression of a weight gradient that is never formed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .algorithms import ALGORITHMS, DEPENDENT, Operator, Search, direct
from .cost import choose
from .dispatch import kernels_for

_SAFE_SCALE = (1e-6, 1e6)  # outside of it, the squares of products of many factors leave what fp32 can hold


class Compressed:
    """The factors of ``left @ right.T``, the best approximation found of ``deltas.T @ activations``.

    Unpacks into ``left, right``.

    Attributes:
        left: of shape (out, k), columns orthonormal; k is the least of rank, rows, out and in.
        right: of shape (in, k), columns orthogonal, longest first: their lengths are the singular values.
        singular_values: of shape (k,), in double precision.
        effective_rank: number of columns kept; the others are zero in both factors.
    """

    __slots__ = ("effective_rank", "left", "right", "singular_values")

    def __init__(self, left: Tensor, right: Tensor, singular_values: Tensor, effective_rank: int) -> None:
        self.left = left
        self.right = right
        self.singular_values = singular_values
        self.effective_rank = effective_rank

    def __iter__(self) -> Iterator[Tensor]:
        yield self.left
        yield self.right

    def residual(self, deltas: Tensor, activations: Tensor) -> float:
        """Measures the relative error, ``|G - left right^T| / |G|`` in Frobenius norm, from norms alone.

        `left` is an orthonormal basis onto which G is projected, so that the squares of error and approximation add
        up to that of G. Costs a product of N x N (out + in) numbers, or of N x out x in where that is less.

        Args:
            deltas: D of shape (N, out), as given to `compress`.
            activations: A of shape (N, in), as given to `compress`.

        Returns:
            The error: 0.0 is exact, 1.0 what sending nothing would have.
        """
        whole = squared_norm(deltas, activations)
        kept = float((self.singular_values[: self.effective_rank] ** 2).sum())
        return math.sqrt(max(0.0, 1.0 - kept / whole)) if whole > 0 else 0.0


def compress(
    deltas: Tensor,
    activations: Tensor,
    rank: int,
    *,
    iterations: int = 2,
    tolerance: float = 0.0,
    warm_start: Tensor | None = None,
    seed: int = 0,
    algorithm: str = "auto",
) -> Compressed:
    """Finds low-rank factors of a weight gradient ``G = deltas.T @ activations`` without forming it.

    An orthonormal basis Q (out x r) is looked for, and G projected onto it, ``G ~ Q (Q^T G)``. A projection's error
    never exceeds that of sending nothing, whatever Q is. Where r reaches the rank that G can have at all, the result
    is exact. Otherwise ``algorithm`` says how Q is found:

    - ``"gram"``: the optimum, from the N x N Gram matrices of the factors; for few rows.
    - ``"iteration"``: block power iteration on the factors, O(N r (out + in)) a product; with four columns more
      than asked for, which are dropped in the end, and two passes more where there is no warm start.
    - ``"formed"``: the same on G itself, which is formed; for many rows.
    - ``"deflation"``: the vectors of the published method (rank-dAD, arXiv:2102.09631, section 4), one at a time.
    - ``"auto"``: the first that a model of their costs finds cheapest, of the first three.

    Args:
        deltas: D of shape (N, out), any strides, fp64, fp32, bf16 or fp16; the last two are computed in fp32.
        activations: A of shape (N, in), on the same device.
        rank: largest number of columns of a factor, at least 1.
        iterations: number of multiplications by ``G G^T``; with a warm start one or two do.
        tolerance: singular values up to this share of the largest are dropped; the rest is the effective rank.
        warm_start: a basis from an earlier call, its `left`; a random one where None.
        seed: seed of the random basis; the global random state is left alone.
        algorithm: how the basis is found.

    Returns:
        The factors, which unpack into ``left, right``, with their quality.

    Raises:
        ValueError: if a shape or an option is out of range.
        FloatingPointError: if the factors hold NaN or Inf.

    Example:
        >>> left, right = compress(deltas, activations, rank=8)
        >>> error = (left @ right.T - deltas.T @ activations).norm()
    """
    _check(deltas, activations, rank, iterations, tolerance, warm_start, algorithm)
    dtype = torch.float64 if torch.float64 in (deltas.dtype, activations.dtype) else torch.float32
    D, delta_scale = _within_range(deltas.detach().to(dtype))
    A, activation_scale = _within_range(activations.detach().to(dtype))
    (rows, out), width = D.shape, A.shape[1]
    k = min(rank, rows, out, width)
    if k == 0 or delta_scale == 0.0 or activation_scale == 0.0:
        values = torch.zeros(k, dtype=torch.float64, device=D.device)
        return Compressed(D.new_zeros(out, k), D.new_zeros(width, k), values, 0)
    if algorithm == "auto":
        algorithm = "iteration" if D.is_cuda else choose(rows, out, width, k, iterations)
    find = direct if k in (rows, out, width) else ALGORITHMS[algorithm]
    operator = Operator(D, A, formed=algorithm == "formed" and find is not direct)
    kernels = kernels_for(D)
    left = find(operator, k, Search(iterations, tolerance, warm_start, seed))
    kernels.orthonormalise(left, DEPENDENT[dtype])
    right = operator.apply_transposed(left)
    values = kernels.align(left, right)
    left, right, values = left[:k], right[:k], values[:k]
    effective = _truncate(left, right, values, tolerance)
    scale = delta_scale * activation_scale
    if scale != 1.0:
        right, values = right * scale, values * scale
    return Compressed(left.T, right.T, values, effective)


def squared_norm(deltas: Tensor, activations: Tensor) -> float:
    """Computes ``|D^T A|^2`` in Frobenius norm as ``sum((D D^T) * (A A^T))``, or from the product where that is less.

    Args:
        deltas: D of shape (N, out).
        activations: A of shape (N, in).
    """
    D, A = (t.detach() if t.dtype == torch.float64 else t.detach().float() for t in (deltas, activations))
    (rows, out), width = D.shape, A.shape[1]
    if rows * (out + width) < out * width:
        return float(((D @ D.T).double() * (A @ A.T).double()).sum())
    return float((D.T @ A).double().square().sum())


def _check(
    deltas: Tensor,
    activations: Tensor,
    rank: int,
    iterations: int,
    tolerance: float,
    warm_start: Tensor | None,
    algorithm: str,
) -> None:
    if algorithm != "auto" and algorithm not in ALGORITHMS:
        names = ", ".join(map(repr, ("auto", *ALGORITHMS)))
        raise ValueError(f"unknown algorithm {algorithm!r}; valid ones are {names}")
    if deltas.dim() != 2 or activations.dim() != 2 or deltas.shape[0] != activations.shape[0]:
        raise ValueError(
            "deltas (rows x out) and activations (rows x in) must be matrices with the same number of rows, got "
            f"{tuple(deltas.shape)} and {tuple(activations.shape)}"
        )
    out = deltas.shape[1]
    if warm_start is not None and (warm_start.dim() != 2 or warm_start.shape[0] != out):
        raise ValueError(f"warm_start must be (out x columns) with out = {out}, got {tuple(warm_start.shape)}")
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    if iterations < 0:
        raise ValueError(f"iterations must be at least 0, got {iterations}")
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must lie in 0 to 1, got {tolerance}")


def _within_range(factor: Tensor) -> tuple[Tensor, float]:
    """Scales a factor whose powers would overflow or vanish.

    Returns:
        The factor and what its products are to be multiplied by: 0.0 if it is zero. On CUDA the size of the numbers
        is not asked for, since that would wait for the device.
    """
    if factor.is_cuda or factor.numel() == 0:
        return factor, 1.0
    least, most = torch.aminmax(factor)  # vectorised, where the maximum norm is not
    largest = max(-float(least), float(most))
    if not math.isfinite(largest):  # NaN, too: both ends are NaN then
        raise FloatingPointError("the deltas or activations hold NaN or Inf")
    if largest == 0.0 or _SAFE_SCALE[0] < largest < _SAFE_SCALE[1]:
        return factor, float(largest > 0.0)
    return factor / largest, largest


def _truncate(left: Tensor, right: Tensor, values: Tensor, tolerance: float) -> int:
    """Zeroes the rows of small singular values; returns how many are left (on CUDA all count, without a look)."""
    kept = values > tolerance * values[0]
    if left.is_cuda:
        left *= kept[:, None]
        right *= kept[:, None]
        return left.shape[0]
    effective = int(kept.sum())
    left[effective:] = 0
    right[effective:] = 0
    return effective
