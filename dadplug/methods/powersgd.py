"""PowerSGD: ``G ~ P Q^T`` with P and Q summed over sites, so that the approximation is of the mean gradient itself.

Source: arXiv:1905.13727. One pass of power iteration a step, from the last step's Q, with error feedback.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from .base import Method, register_method
from .feedback import ErrorFeedback


@register_method("powersgd")
class PowerSGD(Method):
    """All-reduces r m and then r n numbers a weight; the second sum has to wait for the first.

    A weight so small that its gradient has no more numbers than that is all-reduced.
    """

    exact = False
    takes_factors = False
    keeps_state = True
    shares_state = True  # the bases Q are the same on all sites

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.max_rank: int = options.rank
        self.errors = ErrorFeedback(options.error_feedback is not False)
        self._bases: dict[str, Tensor] = {}

    def path(self, out: int, width: int) -> str:
        return "allreduce"

    def gradient_path(self, out: int, width: int) -> str:
        return "powersgd" if self.columns(out, width) * (out + width) < out * width else "allreduce"

    def rows_sent(self, rows: int, out: int, width: int) -> int:
        return 0

    def columns(self, out: int, width: int) -> int:
        """Tells the rank for a weight of this shape."""
        return min(self.options.rank, out, width)

    def basis(self, name: str, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Returns Q as rows, of shape (r, in); random ones, equal on all sites, before the first step.

        Args:
            name: name of the weight.
            shape: its shape as a matrix, (out, in).
            like: gives type and device.
        """
        rows = (self.columns(*shape), shape[1])
        basis = self._bases.get(name) if self.options.warm_start else None
        if basis is None or basis.shape != rows:
            basis = _random_basis(name, rows)
        basis = self._bases[name] = basis.to(like)
        return basis

    def keep(self, name: str, basis: Tensor) -> None:
        """Keep Q for the next step.

        A gradient of a lower rank, as of LoRA's first matrix before the second has left zero, leaves rows of zeros.
        They would stay zero in all later steps, and so are drawn anew; all sites have the same bits here.
        """
        empty = ~basis.any(1)
        if bool(empty.any()):
            basis = torch.where(empty[:, None], _random_basis(name, (basis.shape[0], basis.shape[1])).to(basis), basis)
        self._bases[name] = basis

    def state_dict(self) -> dict[str, Any]:
        bases = {name: basis.clone() for name, basis in self._bases.items()}
        return {"bases": bases, "errors": self.errors.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._bases = {name: basis.clone() for name, basis in state["bases"].items()}
        self.errors.load_state_dict(state["errors"])


def _random_basis(name: str, shape: tuple[int, int]) -> Tensor:
    """Draw the rows of a first Q, equal on all sites."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
