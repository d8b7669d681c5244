"""Choice of the kernels: numba on the CPU; torch for CUDA tensors and where numba cannot run."""

from __future__ import annotations

import functools
import math
import threading
import warnings
from typing import Any

import torch
from torch import Tensor

from ..schedules import current
from . import portable

_VIEWS = 4096  # shapes that are cached


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


_CHOLESKY = 1e-4  # least square of what is left of a row for which Cholesky's factor is precise enough
_ONCE = 0.5  # and for which one turn is
_EIGH_BY_LAPACK = 48  # rows from which LAPACK diagonalises faster than the kernel
_GRAM_BY_LAPACK = 80  # and from which it does so where the matrix has to be computed first


class NumbaKernels:
    """Kernels by numba, on the memory of contiguous CPU tensors without a copy; large products by BLAS.

    The module `portable` has the same functions, which say what the kernels do. Those that are not among the methods
    are functions of the module `kernels`, called with tensors.

    Raises:
        Exception: if numba cannot run here.
    """

    def __init__(self) -> None:
        from . import kernels

        self._kernels = kernels
        kernels.unit_rows(torch.ones(1, 1).numpy())

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)

        def on_tensors(*args: Any) -> Any:
            # What is written to has been checked to be contiguous, so that only arguments that are read are copied.
            return kernel(*(arg.detach().contiguous().numpy() if isinstance(arg, Tensor) else arg for arg in args))

        setattr(self, name, on_tensors)
        return on_tensors

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
                return source, self._kernels.gram_schmidt(source.numpy(), portable.DEPENDENT[rows.dtype])
            torch.mm(turn, source, out=target)
            if least > _ONCE:
                break
        return target, count

    def eigh(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        size = matrix.shape[0]
        if size >= _EIGH_BY_LAPACK:
            return portable.eigh(matrix)
        whole, vectors = (scratch.take(name, (size, size), matrix, torch.float64) for name in ("matrix", "vectors"))
        values = scratch.take("values", (size,), matrix, torch.float64)
        if not self._kernels.eigh(whole.copy_(matrix).numpy(), values.numpy(), vectors.numpy()):
            return portable.eigh(matrix)
        return values, vectors

    def gram_vectors(self, of_deltas: Tensor, of_activations: Tensor, jitter: float, found: Tensor) -> float:
        cut = math.nan
        if len(of_deltas) < _GRAM_BY_LAPACK:
            cut = self._kernels.gram_vectors(of_deltas.numpy(), of_activations.numpy(), jitter, found.numpy())
        return portable.gram_vectors(of_deltas, of_activations, jitter, found) if math.isnan(cut) else cut

    # In every step, and given contiguous tensors: without the calls of `__getattr__`.

    def quantise(self, rows: Tensor, quantised: Tensor, scales: Tensor) -> None:
        self._kernels.quantise(rows.numpy(), quantised.numpy(), scales.numpy())

    def dequantise(self, quantised: Tensor, scales: Tensor, rows: Tensor) -> None:
        self._kernels.dequantise(quantised.numpy(), scales.numpy(), rows.numpy())

    def product(self, left: Tensor, right: Tensor, result: Tensor, strip: int) -> None:
        self._kernels.product(left.numpy(), right.numpy(), result.numpy(), strip)

    def top_k(self, values: Tensor, indices: Tensor, found: Tensor) -> None:
        if values.dtype == torch.float32:
            self._kernels.top_k(values.numpy(), indices.numpy(), found.numpy(), current().encoding.coarse)
        else:
            portable.top_k(values, indices, found)

    def unique(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        found, inverse = keys.new_empty(keys.shape), keys.new_empty(keys.shape)
        count = self._kernels.unique(keys.contiguous().numpy(), inverse.numpy(), found.numpy())
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
    kernels.eigh(gram)
    rows, quantised, scales = torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.int8), torch.zeros(1)
    kernels.quantise(rows, quantised, scales)
    kernels.dequantise(quantised, scales, rows)
    kernels.top_k(scales, torch.zeros(1, dtype=torch.int64), scales.clone())
