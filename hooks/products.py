"""Matrix products by the faster of torch's two libraries.

torch multiplies matrices of float32 by MKL. That has AVX-512 kernels for Intel's processors only; on others it uses
those of AVX2, and copies both factors first. oneDNN, which is part of torch too, has AVX-512 kernels for all, which
are faster on AMD's. Results of the two differ by rounding; each is the same in every run. So oneDNN is for methods that
are not exact: within tens of steps, other rounding becomes a difference of percents. `allow_onednn(False)` leaves all
products to torch, and so does ``torch.backends.mkldnn.enabled = False``, which also changes convolutions.
"""

from __future__ import annotations

import functools
import platform
import threading
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEAST = 1 << 18  # multiplications; below, calls take longer than the work
_LEAST_WITH_ROOM = 1 << 22  # where MKL would write into memory that is there, and oneDNN makes a new tensor
_LEAST_ROWS = 8  # of the left factor; below, MKL reads the right one in its place, as fast as memory gives it
_PLAIN = (Tensor, nn.Parameter)
_allowed = True


class _Thread(threading.local):
    fastest = False


thread = _Thread()
"""``thread.fastest``: whether layers that compute their output in the running thread may use the faster library."""


def allow_onednn(allowed: bool) -> None:
    """Choose whether products may be computed by oneDNN in this process, or all are torch's own (MKL's)."""
    global _allowed
    _allowed = allowed


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `F.linear`, outside of autograd, by the faster library where `thread` allows it.

    Args:
        inputs: of shape (..., in).
        weight: of shape (out, in).
        bias: of shape (out,), or None.
    """
    outputs = _multiply(inputs, weight, bias) if thread.fastest else None
    if outputs is None:
        outputs = F.linear(inputs, weight, bias)
    # Of inputs of three dimensions it may be a view, which autograd lets nothing change in place; this is its memory.
    return outputs.data if outputs._is_view() else outputs


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute ``left @ right``.

    Args:
        left: of shape (..., k).
        right: of shape (k, width).
        out: where the result may be written; it is returned somewhere else if that is faster.
    """
    large = out is None or left.numel() * right.shape[1] >= _LEAST_WITH_ROOM
    found = _multiply(left, right.T, None) if large else None
    if found is not None:
        return found
    return left @ right if out is None else torch.mm(left, right, out=out)


def _multiply(left: Tensor, transposed: Tensor, bias: Tensor | None) -> Tensor | None:
    """Multiply by oneDNN, if it is faster, and whatever watches torch's operations does not matter.

    Args:
        left: the left factor.
        transposed: the transpose of the right factor.
        bias: added to each row of the product; None for none.

    Returns:
        The product; None where torch has to compute it.
    """
    numel = left.numel()
    if not _allowed or numel * transposed.shape[0] < _LEAST or numel < _LEAST_ROWS * left.shape[-1]:
        return None
    if not has_faster_kernels():
        return None
    for matrix in (left, transposed):
        if type(matrix) not in _PLAIN or not matrix.is_cpu or matrix.dtype != torch.float32:
            return None
        if not (matrix.is_contiguous() or (matrix.dim() == 2 and matrix.T.is_contiguous())):
            return None
    watched = torch.is_autocast_enabled("cpu") or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state()
    differentiated = torch.is_grad_enabled() and (left.requires_grad or transposed.requires_grad)
    if watched or differentiated or not torch.backends.mkldnn.enabled or not (bias is None or bias.dtype == left.dtype):
        return None
    made: Tensor = _onednn()(left.detach(), transposed.detach(), bias, "none", [], "")
    return made


@functools.cache
def _onednn() -> Any:
    """Return oneDNN's product of a matrix with a transposed one, and perhaps a bias; None where torch has none."""
    return getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


@functools.cache
def has_faster_kernels() -> bool:
    """Return whether oneDNN has better kernels for this processor than MKL."""
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return both and torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_amd() and _onednn() is not None


def _is_amd() -> bool:
    """Return whether the processor is one of AMD's."""
    cpus = Path("/proc/cpuinfo")
    return "AuthenticAMD" in (cpus.read_text() if cpus.exists() else platform.processor())
