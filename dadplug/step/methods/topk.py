"""Top-k: each site sends the elements of largest magnitude of its gradient, with their indices.

The other elements are added to the next step's gradient by error feedback.

Sources: arXiv:1704.05021 (sparse communication), arXiv:1809.07599 (sparsified SGD with memory).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...lowrank import top_k
from .base import Method, MethodOptions, Traits, register_method
from .feedback import ErrorFeedback

_WHOLE = 1024  # elements below which a gradient is sent as it is


def accumulate(gradient: Tensor | None, weight: float, error: Tensor | None, loss_scale: float, out: Tensor) -> None:
    """Compute ``weight / loss_scale * gradient + error``, from which `encode` selects.

    Args:
        gradient: of shape (n,), with the loss scale; None counts as zero.
        weight: the site's weight in the mean.
        error: error memory of shape (n,), without the loss scale; None counts as zero.
        loss_scale: the factor that the gradient contains.
        out: room for the result, of shape (n,); must not overlap the others.
    """
    if gradient is None:
        out.zero_() if error is None else out.copy_(error)
    elif error is None:
        torch.mul(gradient, weight / loss_scale, out=out)
    else:
        torch.add(error, gradient, alpha=weight / loss_scale, out=out)


def encode(whole: Tensor, count: int, loss_scale: float) -> tuple[Tensor, Tensor]:
    """Select the elements of largest magnitude.

    Args:
        whole: what `accumulate` computed, of shape (n,), without the loss scale.
        count: number k of elements to select.
        loss_scale: the factor that the values sent contain.

    Returns:
        Indices, int64 of shape (k,), ascending, and values of shape (k,), times the loss scale.
    """
    indices, values = top_k(whole, count)
    return indices, values.mul_(loss_scale)


def decode(selected: Iterable[tuple[Tensor, Tensor]], scale: float, out: Tensor) -> None:
    """Compute the agreed gradient: the sum over sites of the values at their indices, times a scale.

    Args:
        selected: indices and values of each site, by rank, all of shape (k,).
        scale: what the sum is multiplied by to make the mean.
        out: the gradient, of shape (n,); overwritten.
    """
    out.zero_()
    for indices, values in selected:
        out.index_add_(0, indices.to(out.device), values.to(out))
    out.mul_(scale)


def subtract_sent(whole: Tensor, indices: Tensor, values: Tensor, loss_scale: float) -> None:
    """Subtract what was sent, in place; the result is the next error memory.

    Args:
        whole: what `accumulate` computed, of shape (n,), without the loss scale.
        indices: of shape (k,).
        values: of shape (k,), after rounding to the wire format, with the loss scale.
        loss_scale: the factor that the values contain.
    """
    whole.index_add_(0, indices, values.to(whole), alpha=-1 / loss_scale)


@register_method("topk")
class TopK(Method):
    """Gathering of k values and k indices a parameter, ``k = density * elements``.

    A small parameter, such as a bias, is all-reduced.
    """

    traits = Traits(exact=False, takes_factors=False, keeps_state=True, reads=("density", "error_feedback"))

    def __init__(self, options: MethodOptions) -> None:
        super().__init__(options)
        self.errors = ErrorFeedback(options.error_feedback is not False)

    def gradient_path(self, out: int, width: int) -> str:
        return "topk" if out * width >= _WHOLE and self.options.density <= 0.5 else "allreduce"

    def elements(self, numel: int) -> int:
        """Return the number k of elements that are sent of a gradient of `numel` elements."""
        return max(1, math.ceil(self.options.density * numel))

    def rollback(self, name: str) -> None:
        self.errors.rollback(name)

    def state_dict(self) -> dict[str, Any]:
        return {"errors": self.errors.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.errors.load_state_dict(state["errors"])
