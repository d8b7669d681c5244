"""Choice of the kernels, and what is done with payloads by them.

On the CPU they are numba's, on the tensors' own memory with the GIL released; for CUDA tensors, and where numba cannot
run, they are torch's, with equal results. Operations on payloads: int8 rows with a scale each, largest elements of a
gradient, sums of products and merges.

Merges need the Gram matrices of the factors alone. For factors ``L`` (m x k) and ``R`` (n x k), ``L = Q T`` and
``R = P S`` with orthonormal Q and P, the singular value decomposition of ``T S^T`` (k x k) is that of ``L R^T``. T and
S follow from ``L^T L`` and ``R^T R``. So the best approximation of rank r is ``(L X) (R Y)^T`` with X and Y of k x r:
rows of L and R may be at different sites.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..support.schedules import DEFAULTS, Decoding, current
from . import portable

_VIEWS = 4096  # shapes that are cached
SCALE_SIZE = torch.float32.itemsize  # bytes of a row's scale, behind its int8 elements


class Scratch(threading.local):
    """Buffers by name, separate for each thread; they grow to the largest requested size, and are kept."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._views: dict[tuple[object, ...], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer with undefined contents; the tensor of the last call with this name is overwritten.

        Args:
            name: name of the buffer.
            shape: wanted shape.
            like: gives the device, and the type where `dtype` is None.
            dtype: wanted type.
        """
        kind, device = dtype or like.dtype, like.device
        view = self._views.get((name, kind, device, shape))
        if view is None:
            view = self._views[name, kind, device, shape] = self._view(name, shape, kind, device)
        return view

    def _view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype, device))
        if buffer is None or buffer.numel() < size:
            self._views = {key: view for key, view in self._views.items() if key[:3] != (name, dtype, device)}
            buffer = self._buffers[name, dtype, device] = torch.empty(size, dtype=dtype, device=device)
        if len(self._views) >= _VIEWS:
            self._views.clear()
        return buffer[:size].view(shape)

    def clear(self) -> None:
        """Free this thread's buffers."""
        self._buffers.clear()
        self._views.clear()


scratch = Scratch()


_EIGH_BY_LAPACK = 48  # rows from which LAPACK diagonalises faster than the kernel
_GRAM_BY_LAPACK = 80  # and from which it does so where the matrix has to be computed first


class NumbaKernels:
    """Kernels by numba, on the memory of contiguous CPU tensors without a copy; large products by BLAS.

    Attributes:
        compiled: the kernels themselves, which take arrays.

    The module `portable` has the same functions, which say what the kernels do. Those that are not among the methods
    are functions of the module `kernels`, called with tensors.

    Raises:
        Exception: if numba cannot run here.
    """

    def __init__(self) -> None:
        from . import kernels, rows

        self.compiled = kernels
        self._rows = rows
        kernels.unit_rows(torch.ones(1, 1).numpy())

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self.compiled, name, None) or getattr(self._rows, name)

        def on_tensors(*args: Any) -> Any:
            # What is written to has been checked to be contiguous, so that only arguments that are read are copied.
            return kernel(*(arg.detach().contiguous().numpy() if isinstance(arg, Tensor) else arg for arg in args))

        setattr(self, name, on_tensors)
        return on_tensors

    def orthonormalise(self, rows: Tensor) -> int:
        count: int = self.compiled.orthonormalise(rows.numpy(), portable.DEPENDENT[rows.dtype])
        return count

    def diagonalise(self, basis: Tensor, projected: Tensor, left: Tensor, right: Tensor, further: Tensor) -> Tensor:
        if len(basis) < _EIGH_BY_LAPACK:
            values = torch.empty(len(left), dtype=torch.float64)
            parts = (basis, projected, left, right, further, values)
            if self.compiled.diagonalise(*(part.numpy() for part in parts)):
                return values
        return portable.diagonalise(basis, projected, left, right, further)

    def gram_vectors(self, of_deltas: Tensor, of_activations: Tensor, jitter: float, found: Tensor) -> float:
        cut = math.nan
        if len(of_deltas) < _GRAM_BY_LAPACK:
            cut = self.compiled.gram_vectors(of_deltas.numpy(), of_activations.numpy(), jitter, found.numpy())
        return portable.gram_vectors(of_deltas, of_activations, jitter, found) if math.isnan(cut) else cut

    # In every step, and given contiguous tensors: without the calls of `__getattr__`.

    def quantise(self, rows: Tensor, payload: Tensor, rounded: Tensor, rest: Tensor) -> None:
        self.compiled.quantise(rows.numpy(), payload.numpy(), rounded.numpy(), rest.numpy())

    def dequantise(self, payload: Tensor, rows: Tensor) -> None:
        self.compiled.dequantise(payload.numpy(), rows.numpy())

    def product(self, left: Tensor, right: Tensor, result: Tensor, strip: int) -> None:
        self.compiled.product(left.numpy(), right.numpy(), result.numpy(), strip)

    def top_k(self, values: Tensor, indices: Tensor, found: Tensor) -> None:
        if values.dtype == torch.float32:
            self.compiled.top_k(values.numpy(), indices.numpy(), found.numpy(), current().encoding.coarse)
        else:
            portable.top_k(values, indices, found)

    def unique(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        found, inverse = keys.new_empty(keys.shape), keys.new_empty(keys.shape)
        count = self._rows.unique(keys.contiguous().numpy(), inverse.numpy(), found.numpy())
        return found[:count], inverse


def kernels_for(tensor: Tensor) -> Any:
    """Choose the kernels for a tensor's device."""
    return portable if tensor.device.type != "cpu" else cpu_kernels()


@functools.cache
def cpu_kernels() -> Any:
    """Load the kernels of the CPU; each is compiled at its first call on a machine, and cached on disk."""
    try:
        return NumbaKernels()
    except Exception as error:
        warnings.warn(f"numba cannot run here ({error}): torch takes its place, more slowly", stacklevel=3)
        return portable


def warmup() -> None:
    """Compile the CPU kernels, or load them from disk, before they are first needed."""
    kernels = cpu_kernels()
    for dtype in (torch.float32, torch.float64):
        block = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 1e-3]], dtype=dtype)  # by Cholesky, then Gram-Schmidt
        kernels.orthonormalise(block)
        gram = torch.eye(4, dtype=dtype)
        kernels.gram_vectors(gram, gram, 0.0, gram.clone())
        kernels.product(gram, gram, gram.clone(), 4)
        kernels.diagonalise(gram, gram, gram[:2].clone(), gram[:2].clone(), gram[2:].clone())
    values, payload = torch.ones(1, 1), torch.zeros(1, 1 + SCALE_SIZE, dtype=torch.int8)
    kernels.quantise(values, payload, values[:0], values[:0])
    kernels.dequantise(payload, values)
    kernels.top_k(values[0], torch.zeros(1, dtype=torch.int64), values[0].clone())


def quantise(rows: Tensor, quantised: Tensor, scales: Tensor) -> None:
    """Round each row to whole multiples, -127 to 127, of its scale.

    The error of an element is at most half the scale, a 254th of the row's largest magnitude. The values of a row with
    NaN or Inf become NaN.

    Args:
        rows: of shape (k, width), float32.
        quantised: int8 of the same shape, contiguous; filled.
        scales: float32 of shape (k,), contiguous; filled.
    """
    payload = quantised.new_empty(len(rows), rows.shape[1] + SCALE_SIZE)
    rows = rows.detach().contiguous()
    kernels_for(rows).quantise(rows, payload, rows[:0], rows[:0])
    quantised.copy_(payload[:, :-SCALE_SIZE])
    scales[:, None].view(torch.int8).copy_(payload[:, -SCALE_SIZE:])


def dequantise(quantised: Tensor, scales: Tensor, rows: Tensor) -> None:
    """Compute the values of quantised rows.

    Args:
        quantised: int8 of shape (k, width), contiguous.
        scales: float32 of shape (k,).
        rows: float32 of shape (k, width), contiguous; filled.
    """
    kernels_for(rows).dequantise(torch.cat([quantised, scales[:, None].view(torch.int8)], 1), rows)


def top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the k elements of largest magnitude; the first of equal ones count, and NaN counts as largest.

    Args:
        values: of shape (n,).
        k: number of elements, 0 to n.

    Returns:
        Their indices, int64, ascending, and the elements.

    Raises:
        ValueError: if k is out of its range, or the shape.
    """
    if values.dim() != 1 or not 0 <= k <= values.numel():
        raise ValueError(f"k must lie in 0 to the number of values, of shape (n,); got {k} of {tuple(values.shape)}")
    values = values.detach().contiguous()
    indices, found = torch.empty(k, dtype=torch.int64, device=values.device), values.new_empty(k)
    kernels_for(values).top_k(values, indices, found)
    return indices, found


def orthonormalise(rows: Tensor) -> Tensor:
    """Orthonormalise rows; rows that depend on others become zero. The argument may be overwritten.

    Args:
        rows: of shape (k, width), k at most width, contiguous.

    Returns:
        The orthonormal rows, in new memory.
    """
    exact = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    if exact.is_cuda:  # where compression fills up with arbitrary directions, which may differ between sites
        lengths = torch.linalg.vector_norm(exact, dim=1, keepdim=True, dtype=torch.float64)
        result = exact.div_(torch.where(lengths > 0, lengths, 1.0))
        portable.gram_schmidt(result)
    else:
        result = exact
        kernels_for(exact).orthonormalise(result)
    return result.to(rows.dtype, copy=True)


def sum_of_products(
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    weights: Sequence[float],
    constants: Decoding = DEFAULTS.decoding,
    stack: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute ``sum over s of weights[s] * lefts[s].T @ rights[s]``, all rows in one product.

    Args:
        lefts: a block a site, of shape (k_s, out).
        rights: a block a site, of shape (k_s, in).
        weights: a weight a site.
        constants: sizes of blocks; the same at all sites, since the last bits depend on them.
        stack: the blocks of all sites as two, if they lie one behind the other, and room for the first one.

    Returns:
        The sum, of shape (out, in).
    """
    like, count = lefts[0], sum([block.shape[0] for block in lefts]) if stack is None else stack[0].shape[0]
    out, width = like.shape[1], rights[0].shape[1]
    own = (
        like.device.type == "cpu"
        and 0 < count <= constants.few
        and out >= 4
        and like.dtype in (torch.float32, torch.float64)
    )
    rows = -(-count // 4) * 4 if own else count
    left = scratch.take("lefts", (rows, out), like) if stack is None or rows != count else stack[2]
    if stack is not None and min(weights) == max(weights):
        torch.mul(stack[0], weights[0], out=left[:count])
    else:
        start = 0
        for block, weight in zip(lefts, weights, strict=True):
            end = start + block.shape[0]
            torch.mul(block, weight, out=left[start:end])
            start = end
    if stack is not None and rows == count:
        right = stack[1]
    else:
        right = scratch.take("rights", (rows, width), like)
        torch.cat(list(rights), out=right[:count])
        left[count:], right[count:] = 0, 0
    if not own:
        return left.T @ right
    result = like.new_empty(out, width)
    kernels_for(like).product(left, right, result, constants.strip)
    return result


def sum_one_by_one(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], constants: Decoding = DEFAULTS.decoding
) -> Tensor:
    """Compute ``sum over s of lefts[s].T @ rights[s]`` by adding one product after the other in place.

    Large results are computed in blocks that stay in the cache.

    Args:
        lefts: a block of rows a site, of shape (k_s, out).
        rights: a block of rows a site, of shape (k_s, in).
        constants: sizes of blocks, as `sum_of_products` takes them.

    Returns:
        The sum, of shape (out, in).
    """
    out, width = lefts[0].shape[1], rights[0].shape[1]
    if len(lefts) == 1 or lefts[0].is_cuda or out * width <= constants.block:
        result = lefts[0].T @ rights[0]
        for left, right in zip(lefts[1:], rights[1:], strict=True):
            result.addmm_(left.T, right)
        return result
    result = lefts[0].new_empty(out, width)
    height = max(constants.align, constants.block // width // constants.align * constants.align)
    for start in range(0, out, height):
        block = result[start : start + height]
        torch.mm(lefts[0].T[start : start + height], rights[0], out=block)
        for left, right in zip(lefts[1:], rights[1:], strict=True):
            block.addmm_(left.T[start : start + height], right)
    return result


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
