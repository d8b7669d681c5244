"""Kernels in torch, for CUDA tensors, half precision, and where numba cannot run; see `kernels` for the rest."""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor

LinAlgError: type[RuntimeError] = vars(torch.linalg)["LinAlgError"]  # its own module does not export it to mypy
# Below, the inverse of a scale of int8 rows may leave the range of single precision: such rows are shifted, and their
# scales, which have few digits, are rounded up by the smallest number, so that no multiple is beyond 127.
INVERTIBLE, SHIFT, SMALLEST = 1e-36, 2.0**100, 2.0**-149
SAFE = (1e-12, 1e12)  # largest singular values outside may come from products that leave the range of single precision
TINY, HUGE = 1e-30, 1e20  # squared lengths of rows, of which one is tiny and the other huge: the tiny may have vanished
DEPENDENT = {torch.float32: 1e-5, torch.float64: 1e-13}  # what is left of a unit row when it is rounding error


def orthonormalise(rows: Tensor) -> int:
    """Orthonormalise rows in place; return their number.

    Rows that depend on others become zero and move to the end, and do not count. With NaN or Inf among them, and on
    CUDA, all count. There no value is read back: a dependent row becomes some direction orthogonal to the others.
    """
    lengths = rows.double().norm(dim=1, keepdim=True)
    rows.div_(torch.where(lengths > 0, lengths, 1.0))
    basis, triangle = torch.linalg.qr(rows.T)
    if rows.is_cuda or not bool((triangle.diagonal().abs() <= DEPENDENT[rows.dtype]).any()):  # NaN is not
        rows.copy_(basis.T)
        return rows.shape[0]
    # The directions that QR has put in the place of dependent rows would take their part of the rows behind these.
    independent = gram_schmidt(rows)
    rows.copy_(rows[torch.argsort(independent, descending=True, stable=True)])
    return int(independent.sum())


def gram_schmidt(rows: Tensor) -> Tensor:
    """Make rows of length 1 or zero orthonormal in place, by classical Gram-Schmidt done twice.

    Dependent rows become zero where they stand. No value is read back from a device.

    Returns:
        For each row, whether it is independent of those before; a row with NaN or Inf counts as independent.
    """
    independent = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for i, row in enumerate(rows):
        before = row.dot(row)
        for _ in range(2):
            row -= (rows[:i] @ row) @ rows[:i]
        after = row.dot(row)
        independent[i] = ~(after <= DEPENDENT[rows.dtype] ** 2 * before)
        row *= torch.where(independent[i], 1 / after.sqrt(), 0.0)
    return independent


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonalise a small symmetric matrix by LAPACK: eigenvalues in double, largest first, and eigenvectors as rows.

    With NaN or Inf in the matrix, or if LAPACK does not converge, both are NaN.
    """
    matrix = matrix.double()
    if bool(torch.isfinite(matrix).all()):
        with suppress(LinAlgError):
            values, vectors = torch.linalg.eigh(matrix)  # ascending
            return values.flip(0), vectors.flip(1).T
    return matrix.new_full(matrix.shape[:1], math.nan), torch.full_like(matrix, math.nan)


def diagonalise(basis: Tensor, projected: Tensor, left: Tensor, right: Tensor, further: Tensor) -> Tensor:
    """Turn a basis so that a projection onto it has orthogonal rows; return their lengths. See `kernels.diagonalise`.

    On CUDA they stay as they are, since a decomposition would wait for the device; orthogonal iteration aligns them
    over steps.
    """
    (count, k), dtype = (len(basis), len(left)), basis.dtype
    if basis.is_cuda:
        turn = torch.eye(count, dtype=dtype, device=basis.device)
    else:
        turn = eigh(projected @ projected.T)[1].to(dtype)
    torch.mm(turn[:k], basis, out=left[:count])
    torch.mm(turn[:k], projected, out=right[:count])
    left[count:], right[count:] = 0, 0  # where there are less than k independent columns
    if len(further):
        torch.mm(turn[k:], projected, out=further)
    return right.square().sum(1).sqrt().double()  # many times as fast as torch.linalg.vector_norm


def gram_vectors(of_deltas: Tensor, of_activations: Tensor, jitter: float, found: Tensor) -> float:
    """Find the rows whose products with D are the leading left singular vectors; see `kernels.gram_vectors`."""
    of_deltas, of_activations = of_deltas.double(), of_activations.double()
    squares = torch.stack([of_deltas.diagonal(), of_activations.diagonal()])
    if bool(((squares < TINY) & (squares.flip(0) > HUGE)).any()):
        return math.nan
    lengths = squares.sqrt()
    scale = torch.where((squares > 0).all(0), (lengths[0] / lengths[1]).sqrt(), 0.0)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    of_activations = of_activations * scale * scale[:, None]
    of_deltas = of_deltas * inverse * inverse[:, None]
    added = jitter * float(of_activations.diagonal().max())
    if added == 0.0:
        found.zero_()
        return 0.0
    while 0.0 < added < math.inf:  # rows that depend on others may fall below zero by rounding
        of_activations.diagonal().add_(added)
        root, info = torch.linalg.cholesky_ex(of_activations)
        if not info:
            break
        added *= 10
    else:
        return math.nan
    values, vectors = eigh(root.T @ of_deltas @ root)
    if math.isnan(float(values[0])):
        return math.nan
    k = found.shape[0]
    found.copy_(vectors[:k] @ root.T * inverse)
    return math.sqrt(max(0.0, float(values[k - 1])) / float(values[0])) if values[0] > 0 else 0.0


def quantise(rows: Tensor, payload: Tensor, rounded: Tensor, rest: Tensor) -> None:
    """Round rows to int8, each followed by the bytes of its scale; see `kernels.quantise`."""
    single = rows.float()
    largest = single.abs().amax(1) if rows.shape[1] else single.new_zeros(len(rows))
    spoilt = ~torch.isfinite(single).all(1)
    small = (largest > 0) & (largest < INVERTIBLE)
    scales = torch.where(spoilt, math.nan, torch.where(small, largest / 127.0 + SMALLEST, largest / 127.0))
    inverse = torch.where(small, 1.0 / (scales * SHIFT), torch.where(largest > 0, 127.0 / largest, 0.0))
    shifted = single * torch.where(small, SHIFT, 1.0)[:, None]
    payload[:, : rows.shape[1]] = torch.where(spoilt[:, None], 0.0, shifted * inverse[:, None]).round()
    payload[:, rows.shape[1] :] = scales[:, None].view(torch.int8)
    values = torch.mul(payload[:, : rows.shape[1]], scales[:, None])
    for place, result in ((rounded, values), (rest, rows - values)):
        if len(place):
            place.copy_(result)


def dequantise(payload: Tensor, rows: Tensor) -> None:
    """Compute the values of int8 rows that `quantise` has made."""
    scales = payload[:, rows.shape[1] :].clone(memory_format=torch.contiguous_format).view(torch.float32)
    torch.mul(payload[:, : rows.shape[1]], scales, out=rows)


def top_k(values: Tensor, indices: Tensor, found: Tensor) -> None:
    """Find the elements of largest magnitude; see `dispatch.top_k`."""
    whole, mask = (torch.int64, 2**63 - 1) if values.dtype == torch.float64 else (torch.int32, 2**31 - 1)
    exact = values if values.dtype in (torch.float32, torch.float64) else values.float()
    order = torch.argsort(exact.view(whole) & mask, descending=True, stable=True)
    indices.copy_(order[: len(indices)].sort().values)
    torch.index_select(values, 0, indices, out=found)


def product(left: Tensor, right: Tensor, result: Tensor, strip: int) -> None:
    """Compute ``left.T @ right``; see `kernels.product`."""
    torch.mm(left.T, right, out=result)


def first_outside(rows: Tensor, count: int) -> int:
    """Find the first row outside of a table; see `kernels.first_outside`."""
    outside = ((rows < 0) | (rows >= count)).nonzero()
    return int(outside[0]) if outside.numel() else -1


def gather(table: Tensor, rows: Tensor, out: Tensor) -> None:
    """Copy rows; see `kernels.gather`."""
    torch.index_select(table, 0, rows, out=out)


def scatter_add(table: Tensor, rows: Tensor, deltas: Tensor, scale: float) -> None:
    """Add to rows; see `kernels.scatter_add`."""
    table.index_add_(0, rows, deltas if scale == 1 else deltas * scale)


def unique(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Number distinct keys by their first occurrence; see `kernels.unique`."""
    ordered, inverse = torch.unique(keys, return_inverse=True)
    places = torch.arange(keys.numel(), device=keys.device)
    first = places.new_full((ordered.numel(),), keys.numel()).scatter_reduce_(0, inverse, places, "amin")
    order = torch.argsort(first)
    return ordered[order], torch.argsort(order)[inverse]


def sum_by(inverse: Tensor, deltas: Tensor, sums: Tensor) -> None:
    """Sum rows; see `kernels.sum_by`."""
    sums.zero_().index_add_(0, inverse, deltas)


def adagrad(weights: Tensor, sums: Tensor, rows: Tensor, gradients: Tensor, lr: float, eps: float) -> None:
    """Step rows; see `kernels.adagrad`."""
    total = sums[rows] + gradients * gradients
    sums[rows] = total
    weights[rows] = weights[rows] - lr * (gradients / (total.sqrt() + eps))


def rowwise_adagrad(weights: Tensor, sums: Tensor, rows: Tensor, gradients: Tensor, lr: float, eps: float) -> None:
    """Step rows; see `kernels.rowwise_adagrad`."""
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
    """Step rows; see `kernels.adam`."""
    m = averages[rows]
    m = m + (1 - beta1) * (gradients - m)
    v = squares[rows]
    v = v + (1 - beta2) * (gradients * gradients - v)
    averages[rows], squares[rows] = m, v
    weights[rows] = weights[rows] - rate * (m / (v.sqrt() + eps))
