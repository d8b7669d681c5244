"""Low-rank compression of a weight gradient from its factors, without forming it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import portable
from .algorithms import ALGORITHMS, Algorithm, Formed, Operator, Search, choose, direct, exact
from .dispatch import kernels_for, scratch

_MOST_ELEMENTS = 1 << 20  # of a product that is formed at a time


class Carry(NamedTuple):
    """State for the next compression of the same layer, passed as ``warm_start``.

    Attributes:
        right: directions of the rows of G, of shape (c, in), the strongest first; c may exceed the rank.
    """

    right: Tensor


class Compressed:
    """Factors of ``left @ right.T``, the best approximation found of ``deltas.T @ activations``.

    Unpacks into ``left, right``.

    Attributes:
        left: of shape (out, k), columns orthonormal; k is the least of rank, rows, out and in.
        right: of shape (in, k), columns orthogonal, longest first: their lengths are the singular values.
        singular_values: of shape (k,), in double precision.
        effective_rank: number of columns kept; the others are zero in both factors.
        carry: for the next call's ``warm_start``.
    """

    __slots__ = ("_further", "effective_rank", "left", "right", "singular_values")

    def __init__(
        self, left: Tensor, right: Tensor, singular_values: Tensor, effective_rank: int, further: Tensor | None = None
    ) -> None:
        self.left = left
        self.right = right
        self.singular_values = singular_values
        self.effective_rank = effective_rank
        self._further = further

    def __iter__(self) -> Iterator[Tensor]:
        yield self.left
        yield self.right

    @property
    def carry(self) -> Carry:
        """State for the next call."""
        kept = self.right.T[: self.effective_rank]
        return Carry(kept if self._further is None else torch.cat([kept, self._further]))

    def residual(self, deltas: Tensor, activations: Tensor) -> float:
        """Compute the relative error ``|G - left right^T| / |G|`` in Frobenius norm from the norms alone.

        G is projected onto an orthonormal basis, so that the squared norms of error and approximation sum to that of
        G. Costs N^2 (out + in) multiplications, or N out in if that is less.

        Args:
            deltas: D of shape (N, out), as given to `compress`.
            activations: A of shape (N, in), as given to `compress`.

        Returns:
            The error: 0.0 for an exact result, 1.0 for an approximation by zero.
        """
        scaled = None if min(deltas.shape + activations.shape) == 0 else Operator(deltas, activations).rescaled()
        if scaled is None:
            return 0.0
        operator, scale = scaled
        whole = math.sqrt(_squared_norm(operator.deltas, operator.activations))
        kept = float(((self.singular_values[: self.effective_rank] / scale / whole) ** 2).sum()) if whole > 0 else 1.0
        return math.sqrt(max(0.0, 1.0 - kept))

    def residual_of(self, whole: float, rank: int | None = None) -> float:
        """Compute the relative error from the known squared Frobenius norm of G.

        Args:
            whole: ``|G|^2``.
            rank: number of the first columns that count, if not all.
        """
        kept = float((self.singular_values[: self.effective_rank if rank is None else rank] ** 2).sum())
        return math.sqrt(max(0.0, 1.0 - kept / whole)) if whole > 0 else 0.0


def compress(
    deltas: Tensor,
    activations: Tensor,
    rank: int,
    *,
    iterations: int = 2,
    tolerance: float = 0.0,
    warm_start: Carry | Compressed | Tensor | None = None,
    seed: int = 0,
    algorithm: str = "auto",
    out: tuple[Tensor, Tensor] | None = None,
    precise: int | None = None,
) -> Compressed:
    """Find low-rank factors of a weight gradient ``G = deltas.T @ activations`` without forming it.

    G is projected onto an orthonormal basis Q of shape (out, r), ``G ~ Q (Q^T G)``. The error of a projection is never
    larger than that of sending nothing. If r is at least the rank that G can have, the result is exact. Otherwise
    ``algorithm`` chooses how Q is found:

    - ``"gram"``: the optimum, from the N x N Gram matrices of the factors; for few rows.
    - ``"iteration"``: block power iteration on the factors, O(N r (out + in)) for a product with G; with a few
      additional columns, which are dropped at the end, and two more passes without a warm start.
    - ``"formed"``: the same on G itself, which is formed; for many rows.
    - ``"deflation"``: the vectors of the published method (rank-dAD, arXiv:2102.09631, section 4), one at a time.
    - ``"auto"``: the fastest of the first three, as predicted by a cost model.

    Thread-safe; each thread keeps its intermediate buffers for its next call.

    Args:
        deltas: D of shape (N, out), any strides, fp64, fp32, bf16 or fp16; the last two are computed in fp32.
        activations: A of shape (N, in), on the same device.
        rank: largest number of columns of a factor, at least 1.
        iterations: number of multiplications by ``G G^T``; one is enough with a warm start.
        tolerance: singular values up to this share of the largest are dropped; the rest is the effective rank.
        warm_start: an earlier call's result or its `carry`; or a basis of shape (out, columns), such as its `left`,
            or (in, columns), such as its `right`. A random basis if None.
        seed: seed of the random basis; the global random state does not change.
        algorithm: name of the algorithm.
        out: tensors of shapes (out, k) and (in, k) for the factors, k = min(rank, N, out, in); new ones if None.
        precise: number of the first columns that are to be precise; all if None.

    Returns:
        The factors, which unpack into ``left, right``, with their quality.

    Raises:
        ValueError: if a shape or an option is out of range.
        FloatingPointError: if the factors hold NaN or Inf. On CUDA the result is NaN instead, since a check would wait
            for the device.

    Example:
        >>> left, right = compress(deltas, activations, rank=8)
        >>> error = (left @ right.T - deltas.T @ activations).norm()
    """
    _check_options(rank, iterations, tolerance, algorithm)
    operator = _operator(deltas, activations)
    k = min(rank, operator.most)
    if algorithm == "auto":
        algorithm = "iteration" if deltas.is_cuda else choose(len(deltas), *operator.shape, k, iterations)
    search = Search(iterations, tolerance, *_start(warm_start, operator.shape), seed, precise)
    return _compress(operator, k, algorithm, search, out)


def compress_matrix(
    gradient: Tensor,
    rank: int,
    *,
    iterations: int = 2,
    tolerance: float = 0.0,
    warm_start: Carry | Compressed | Tensor | None = None,
    seed: int = 0,
) -> Compressed:
    """Find low-rank factors of a gradient that has been formed, by block power iteration.

    Args:
        gradient: G of shape (out, in).
        rank: as in `compress`.
        iterations: as in `compress`.
        tolerance: as in `compress`.
        warm_start: as in `compress`.
        seed: as in `compress`.

    Returns:
        The factors, as `compress` does.

    Raises:
        ValueError: if a shape or an option is out of range.
        FloatingPointError: if the gradient holds NaN or Inf.
    """
    _check_options(rank, iterations, tolerance, "auto")
    if gradient.dim() != 2:
        raise ValueError(f"gradient must be a matrix (out x in), got {tuple(gradient.shape)}")
    dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    operator = Formed(_as(dtype, gradient, "activations"))
    search = Search(iterations, tolerance, *_start(warm_start, operator.shape), seed)
    return _compress(operator, min(rank, operator.most), "formed", search, None)


def _operator(deltas: Tensor, activations: Tensor) -> Operator:
    """Return the gradient as an operator, in the type of the computation.

    Raises:
        ValueError: if the shapes do not fit.
    """
    if deltas.dim() != 2 or activations.dim() != 2 or deltas.shape[0] != activations.shape[0]:
        raise ValueError(
            "deltas (rows x out) and activations (rows x in) must be matrices with the same number of rows, got "
            f"{tuple(deltas.shape)} and {tuple(activations.shape)}"
        )
    dtype = torch.float64 if torch.float64 in (deltas.dtype, activations.dtype) else torch.float32
    return Operator(_as(dtype, deltas, "deltas"), _as(dtype, activations, "activations"))


def _compress(
    operator: Operator, k: int, algorithm: str, search: Search, out: tuple[Tensor, Tensor] | None
) -> Compressed:
    result = _result_blocks(operator, k, out)
    if k == 0:
        return Compressed(result[0].T, result[1].T, torch.zeros(0, dtype=torch.float64, device=result[0].device), 0)
    with torch.no_grad():
        further, values = _project(operator, _basis_by(operator, k, algorithm), search, result)
        if not _on_device(values) and not (_is_sound(values) and operator.kept_digits):
            further = _compress_in_double(operator, algorithm, search, result, values)
        left, right = result
        effective = _truncate(left, right, values, search.tolerance)
    return Compressed(left.T, right.T, values, effective, further if effective == k else None)


def _is_sound(values: Tensor) -> bool:
    """Return whether singular values are finite, and of a size of which no product can have left the type's range."""
    lengths = values.tolist()
    return portable.SAFE[0] < lengths[0] < portable.SAFE[1] and all(map(math.isfinite, lengths))


def _compress_in_double(
    operator: Operator, algorithm: str, search: Search, result: tuple[Tensor, Tensor], values: Tensor
) -> Tensor | None:
    """Fill the results anew, from scaled factors in double precision, and by LAPACK if the algorithm fails.

    Args:
        operator: the gradient.
        algorithm: the algorithm that is tried first.
        search: its parameters.
        result: blocks for the factors.
        values: place for the singular values.

    Returns:
        Further rows for the next start, or None.

    Raises:
        FloatingPointError: if the gradient holds NaN or Inf, its factors are beyond the range of their type, or all
            algorithms fail.
    """
    for part in (*result, values):
        part.zero_()
    scaled = operator.rescaled()
    if scaled is None:
        return None
    operator, scale = scaled
    left, right = (torch.empty_like(part, dtype=torch.float64) for part in result)
    search = replace(search, left=None, right=None)  # which may be of another scale, or not finite
    for find in (_basis_by(operator, len(left), algorithm), exact):
        with suppress(portable.LinAlgError):
            further, found = _project(operator, find, search, (left, right))
            if bool(found.isfinite().all()) and (found[0] > 0 or find is exact):  # rows may cancel to zero
                break
    else:
        raise FloatingPointError("the gradient cannot be decomposed: neither the algorithm nor LAPACK has converged")
    values.copy_(found * scale)
    result[0].copy_(left)
    result[1].copy_(right * scale)
    if not bool(result[1].isfinite().all()):
        raise FloatingPointError(
            f"the gradient's singular value {values[0]:.2g} is out of the range of {result[1].dtype}"
        )
    return None if further is None else (further * scale).to(result[1].dtype)


def _basis_by(operator: Operator, k: int, algorithm: str) -> Algorithm:
    return direct if k == operator.most else ALGORITHMS[algorithm]


def _project(
    operator: Operator, find: Algorithm, search: Search, result: tuple[Tensor, Tensor]
) -> tuple[Tensor | None, Tensor]:
    """Find a basis, project G onto it, and rotate both so that they are a singular value decomposition.

    Returns:
        Further rows for the next start, or None, and the singular values.
    """
    left, right = result
    k = left.shape[0]
    block = find(operator, k, search)
    kernels = kernels_for(block)
    basis = block[: kernels.orthonormalise(block)]
    projected = operator.apply_transposed(basis)
    further = projected.new_empty(max(0, len(basis) - k), projected.shape[1])
    values = kernels.diagonalise(basis, projected, left, right, further)
    return further if len(further) else None, values


def _on_device(tensor: Tensor) -> bool:
    """Return whether reading the tensor's values would wait for a device."""
    return tensor.is_cuda


def _result_blocks(operator: Operator, k: int, out: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return blocks of k rows for the factors: new ones, or those given by the caller."""
    like = operator.activations
    if out is None:
        return like.new_empty(k, operator.shape[0]), like.new_empty(k, operator.shape[1])
    for name, place, width in zip(("left", "right"), out, operator.shape, strict=True):
        if place.shape != (width, k) or place.dtype != like.dtype or place.device != like.device:
            raise ValueError(
                f"out: {name} must be of shape {(width, k)} and type {like.dtype} on {like.device}, got "
                f"{tuple(place.shape)}, {place.dtype} on {place.device}"
            )
    return out[0].detach().T, out[1].detach().T


def _as(dtype: torch.dtype, factor: Tensor, name: str) -> Tensor:
    """Return a factor in the type of the computation; a converted one lies in scratch."""
    factor = factor.detach()
    return factor if factor.dtype == dtype else scratch.take(name, tuple(factor.shape), factor, dtype).copy_(factor)


def _start(
    warm_start: Carry | Compressed | Tensor | None, shape: tuple[int, int]
) -> tuple[Tensor | None, Tensor | None]:
    """Return rows of length out, or of length in, to start from."""
    if warm_start is None:
        return None, None
    if isinstance(warm_start, Compressed):
        warm_start = warm_start.carry
    if isinstance(warm_start, Carry):
        rows = warm_start.right
        if rows.dim() == 2 and rows.shape[1] == shape[1]:
            return None, rows
        raise ValueError(f"warm_start is of a layer with other widths: {tuple(rows.shape)} for in = {shape[1]}")
    if warm_start.dim() == 2 and warm_start.shape[0] in shape:
        rows = warm_start.detach().T
        return (rows, None) if warm_start.shape[0] == shape[0] else (None, rows)
    raise ValueError(
        f"warm_start must be (out x columns) with out = {shape[0]}, or (in x columns) with in = {shape[1]}, got "
        f"{tuple(warm_start.shape)}"
    )


def squared_norm(deltas: Tensor, activations: Tensor) -> float:
    """Compute the squared Frobenius norm ``|D^T A|^2`` as ``sum((D D^T) * (A A^T))``, or from the product if cheaper.

    Args:
        deltas: D of shape (N, out).
        activations: A of shape (N, in).
    """
    D, A = (t.detach() if t.dtype == torch.float64 else t.detach().float() for t in (deltas, activations))
    found = _squared_norm(D, A)
    if portable.SAFE[0] ** 2 < found < portable.SAFE[1] ** 2 or 0 in (*D.shape, *A.shape):
        return found
    scaled = Operator(D, A).rescaled()
    return 0.0 if scaled is None else _squared_norm(scaled[0].deltas, scaled[0].activations) * scaled[1] * scaled[1]


def squared_norm_of(gradient: Tensor) -> float:
    """Compute the squared Frobenius norm of a gradient that has been formed.

    Args:
        gradient: of any shape.
    """
    flat = gradient.detach().reshape(-1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    found = float(torch.dot(flat, flat))
    if portable.SAFE[0] ** 2 < found < portable.SAFE[1] ** 2:
        return found
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64).square())


def _squared_norm(D: Tensor, A: Tensor) -> float:
    (rows, out), width = D.shape, A.shape[1]
    if rows * (out + width) < out * width:
        return float(((D @ D.T).double() * (A @ A.T).double()).sum())
    block = max(1, _MOST_ELEMENTS // max(1, width))
    parts = (D[:, start : start + block].T @ A for start in range(0, out, block))
    return float(sum(torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts))


def _check_options(rank: int, iterations: int, tolerance: float, algorithm: str) -> None:
    if algorithm != "auto" and algorithm not in ALGORITHMS:
        names = ", ".join(map(repr, ("auto", *ALGORITHMS)))
        raise ValueError(f"unknown algorithm {algorithm!r}; valid ones are {names}")
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    if iterations < 0:
        raise ValueError(f"iterations must be at least 0, got {iterations}")
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must lie in 0 to 1, got {tolerance}")


def _truncate(left: Tensor, right: Tensor, values: Tensor, tolerance: float) -> int:
    """Set rows of small singular values to zero; return how many are left. On CUDA all are counted, without a check."""
    if _on_device(left):
        kept = values > tolerance * values[0]
        left *= kept[:, None]
        right *= kept[:, None]
        return left.shape[0]
    lengths: list[float] = values.tolist()
    effective = len([length for length in lengths if length > tolerance * lengths[0]])
    if effective < len(lengths):
        left[effective:] = 0
        right[effective:] = 0
    return effective
