"""The kernels in torch alone: for CUDA tensors, and where numba cannot run; see `kernels` and `dispatch.Kernels`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_DEPENDENT = {torch.float32: 1e-5, torch.float64: 1e-13}


def orthonormalise(rows: Tensor) -> tuple[Tensor, int]:
    """Makes rows orthonormal in place, by QR.

    No value is read back from a device: on CUDA dependent rows become zero where they stand, and all rows count.
    """
    lengths = rows.double().norm(dim=1, keepdim=True)
    rows.div_(torch.where(lengths > 0, lengths, 1.0))
    basis, triangle = torch.linalg.qr(rows.T)
    independent = ~(triangle.diagonal().abs() <= _DEPENDENT[rows.dtype])  # NaN counts
    rows.copy_(basis.T * independent[:, None])
    if rows.is_cuda:
        return rows, rows.shape[0]
    order = torch.argsort(independent, descending=True, stable=True)
    rows.copy_(rows[order])
    return rows, int(independent.sum())


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonalises a small symmetric matrix by LAPACK."""
    matrix = matrix.double()
    if not bool(torch.isfinite(matrix).all()):
        return matrix.new_full(matrix.shape[:1], math.nan), torch.eye(len(matrix), dtype=matrix.dtype)
    values, vectors = torch.linalg.eigh(matrix)  # ascending
    return values.flip(0), vectors.flip(1).T


def gram_vectors(of_deltas: Tensor, of_activations: Tensor, jitter: float, found: Tensor) -> float:
    """Finds the rows whose products with D are the leading left singular vectors; see `kernels.gram_vectors`."""
    of_deltas, of_activations = of_deltas.double(), of_activations.double()
    added = jitter * float(of_activations.diagonal().max())
    failed = True
    while failed and 0.0 < added < math.inf:  # rows that depend on others may fall below zero by rounding
        of_activations.diagonal().add_(added)
        root, info = torch.linalg.cholesky_ex(of_activations)
        failed, added = bool(info), 10 * added
    if failed:
        return added
    values, vectors = eigh(root.T @ of_deltas @ root)
    if math.isnan(float(values[0])):
        return math.nan
    k = found.shape[0]
    found.copy_(vectors[:k] @ root.T)
    return math.sqrt(max(0.0, float(values[k - 1])) / float(values[0])) if values[0] > 0 else 0.0
