"""Which kernels run: numba on the CPU; torch on CUDA tensors and where numba cannot run."""

from __future__ import annotations

import functools
import logging
import time
import warnings
from typing import Protocol

import torch
from torch import Tensor

from . import portable

_log = logging.getLogger(__name__)


class Kernels(Protocol):
    """The kernels on blocks of rows that `compress` is made of."""

    def orthonormalise(self, rows: Tensor, dependent: float) -> int:
        """Makes the rows orthonormal in place; returns how many are independent."""

    def align(self, left: Tensor, right: Tensor) -> Tensor:
        """Turns ``left.T @ right`` into its singular value decomposition in place; returns the singular values."""


class NumbaKernels:
    """Hands the memory of contiguous CPU tensors to numba, without a copy."""

    def __init__(self) -> None:
        from . import kernels

        self._kernels = kernels

    def orthonormalise(self, rows: Tensor, dependent: float) -> int:
        return self._kernels.orthonormalise(rows.numpy(), dependent)

    def align(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.from_numpy(self._kernels.align(left.numpy(), right.numpy()))


def kernels_for(tensor: Tensor) -> Kernels:
    """Chooses the kernels for a tensor's device."""
    return portable if tensor.device.type != "cpu" else cpu_kernels()


@functools.cache
def cpu_kernels() -> Kernels:
    """Loads the CPU's kernels; the first use on a machine compiles them, later ones find them on disk."""
    try:
        kernels = NumbaKernels()
        start = time.perf_counter()
        for dtype in (torch.float32, torch.float64):
            block = torch.eye(2, 4, dtype=dtype)
            kernels.orthonormalise(block, 1e-5)
            kernels.align(block, block.clone())
        if (seconds := time.perf_counter() - start) > 1:
            _log.info("compiled the low-rank kernels in %.1f s; they are kept on disk for the next start", seconds)
        return kernels
    except Exception as error:
        warnings.warn(f"numba cannot run here ({error}): low-rank compression uses torch, more slowly", stacklevel=3)
        return portable


def warmup() -> None:
    """Compiles the CPU kernels, or loads them from disk, now rather than in the first step."""
    cpu_kernels()
