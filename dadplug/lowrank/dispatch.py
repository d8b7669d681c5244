"""Which kernels run: numba on the CPU; torch on CUDA tensors and where numba cannot run."""

from __future__ import annotations

import functools
import logging
import math
import time
import warnings
from typing import Protocol

import torch
from torch import Tensor

from . import portable
from .scratch import scratch

_log = logging.getLogger(__name__)
DEPENDENT = {torch.float32: 1e-5, torch.float64: 1e-13}
_CHOLESKY = 1e-4  # least square of what is left of a row for which Cholesky's factor is precise enough
_ONCE = 0.1  # and for which one turn is


class Kernels(Protocol):
    """The kernels on blocks of rows that `compress` is made of."""

    def orthonormalise(self, rows: Tensor) -> tuple[Tensor, int]:
        """Makes rows orthonormal; returns the block that holds them, the given one or scratch, and their number.

        Rows that depend on others become zero and move to the end; with NaN or Inf among them all are returned.
        """

    def eigh(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Diagonalises a small symmetric matrix: eigenvalues in double, largest first, and eigenvectors as rows.

        With NaN or Inf in the matrix the eigenvalues are NaN.
        """

    def gram_vectors(self, of_deltas: Tensor, of_activations: Tensor, jitter: float, found: Tensor) -> float:
        """See `kernels.gram_vectors`."""


class NumbaKernels:
    """Hands the memory of contiguous CPU tensors to numba, without a copy; large products go to BLAS."""

    def __init__(self) -> None:
        from . import kernels

        self._kernels = kernels

    def orthonormalise(self, rows: Tensor) -> tuple[Tensor, int]:
        self._kernels.unit_rows(rows.numpy())
        count = rows.shape[0]
        gram, turn = (scratch.take(name, (count, count), rows) for name in ("gram", "turn"))
        spare = scratch.take("spare", tuple(rows.shape), rows)
        for source, target in ((rows, spare), (spare, rows)):
            least = self._kernels.inverse_triangle(torch.mm(source, source.T, out=gram).numpy(), turn.numpy())
            if math.isnan(least):
                return source, count
            if least < _CHOLESKY:
                return source, self._kernels.gram_schmidt(source.numpy(), DEPENDENT[rows.dtype])
            torch.mm(turn, source, out=target)
            if least > _ONCE:
                break
        return target, count

    def eigh(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        size = matrix.shape[0]
        whole, vectors = (scratch.take(name, (size, size), matrix, torch.float64) for name in ("matrix", "vectors"))
        values = scratch.take("values", (size,), matrix, torch.float64)
        if not self._kernels.eigh(whole.copy_(matrix).numpy(), values.numpy(), vectors.numpy()):
            values.fill_(math.nan)
        return values, vectors

    def gram_vectors(self, of_deltas: Tensor, of_activations: Tensor, jitter: float, found: Tensor) -> float:
        return self._kernels.gram_vectors(of_deltas.numpy(), of_activations.numpy(), jitter, found.numpy())


def kernels_for(tensor: Tensor) -> Kernels:
    """Chooses the kernels for a tensor's device."""
    return portable if tensor.device.type != "cpu" else cpu_kernels()


@functools.cache
def cpu_kernels() -> Kernels:
    """Loads the CPU's kernels; the first use on a machine compiles them, later ones find them on disk."""
    try:
        start = time.perf_counter()
        kernels = NumbaKernels()
        for dtype in (torch.float32, torch.float64):
            block = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 1e-3]], dtype=dtype)  # by Cholesky, then Gram-Schmidt
            kernels.orthonormalise(block)
            gram = torch.eye(2, dtype=dtype)
            kernels.gram_vectors(gram, gram, 0.0, gram.clone())
        kernels.eigh(torch.eye(2))
        if (seconds := time.perf_counter() - start) > 1:
            _log.info("compiled the low-rank kernels in %.1f s; they are kept on disk for the next start", seconds)
        return kernels
    except Exception as error:
        warnings.warn(f"numba cannot run here ({error}): low-rank compression uses torch, more slowly", stacklevel=3)
        return portable


def warmup() -> None:
    """Compiles the CPU kernels, or loads them from disk, now rather than in the first step."""
    cpu_kernels()
