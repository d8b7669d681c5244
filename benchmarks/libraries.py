"""The library that multiplies the matrices of linear layers, the same for every method that a benchmark compares.

torch multiplies by MKL, which has AVX-512 kernels for Intel's processors only; oneDNN, in the same wheel, has them for
AMD's, too. On those `rankdad` computes linear layers by oneDNN. That would help any method, so that a comparison of
methods has one library in all rows, and rows of their own for the other: ``rankdad:library=onednn``,
``ddp:library=onednn``, ``alone:library=onednn``. Elsewhere both are MKL.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from dadplug.hooks import products
from torch import Tensor

LIBRARIES = ("mkl", "onednn")
LAYERS_OF_TORCH = ("alone", "ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd", "diloco", "mean")
_linear = F.linear


class _Linear(torch.autograd.Function):
    """`F.linear` whose three products are computed by oneDNN where it is faster."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        made = products.product(inputs, weight.T)
        return made if bias is None else made.add_(bias)

    @staticmethod
    def backward(ctx: Any, deltas: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        rows = deltas.flatten(0, -2).contiguous()
        to_inputs = products.product(deltas.contiguous(), weight) if ctx.needs_input_grad[0] else None
        to_weight = products.product(rows.T, inputs.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return to_inputs, to_weight, rows.sum(0) if ctx.has_bias else None


def _by_onednn(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.is_grad_enabled() and weight.requires_grad and inputs.dtype == weight.dtype == torch.float32:
        return _Linear.apply(inputs, weight, bias)
    return _linear(inputs, weight, bias)


def use_library(method: str, library: str) -> None:
    """Compute linear layers by a library from now on.

    Args:
        method: the mode or peer. Modes of dadplug compute their layers themselves; exact ones leave them to torch.
        library: "mkl" or "onednn".

    Raises:
        ValueError: if there is no such library.
    """
    if library not in LIBRARIES:
        raise ValueError(f"library must be one of {', '.join(LIBRARIES)}, got {library!r}")
    products.allow_onednn(library == "onednn")
    F.linear = _by_onednn if library == "onednn" and method in LAYERS_OF_TORCH else _linear
