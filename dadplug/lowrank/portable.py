"""The kernels in torch alone: for CUDA tensors, and where numba cannot run."""

from __future__ import annotations

import torch
from torch import Tensor


def orthonormalise(rows: Tensor, dependent: float) -> int:
    """Makes rows orthonormal in place; see `kernels.orthonormalise`.

    No value is read back from a device: on CUDA dependent rows become zero where they stand, and all rows count.
    """
    lengths = rows.norm(dim=1)
    basis, triangle = torch.linalg.qr(rows.T)
    independent = ~(triangle.diagonal().abs() <= dependent * lengths)
    rows.copy_(basis.T * independent[:, None])
    if rows.is_cuda:
        return rows.shape[0]
    order = torch.argsort(independent, descending=True, stable=True)
    rows.copy_(rows[order])
    return int(independent.sum())


def align(left: Tensor, right: Tensor) -> Tensor:
    """Makes the rows of `right` orthogonal, largest first; see `kernels.align`."""
    gram = right.double() @ right.double().T
    _, vectors = torch.linalg.eigh(gram)  # ascending
    rotation = vectors.flip(1).T.to(right.dtype)
    left.copy_(rotation @ left)
    right.copy_(rotation @ right)
    return right.double().norm(dim=1)
