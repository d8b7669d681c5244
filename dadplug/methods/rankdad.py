"""rank-dAD: sites exchange low-rank factors of their gradients, ``G ~ sum over sites of w_s L_s R_s^T``.

Source: arXiv:2102.09631, section 4. Published with deflation, one vector at a time; here block power iteration with
orthonormalisation, which projects the gradient and so never does worse than sending nothing.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from ..hooks import Factor
from ..lowrank import Carry, compress, compress_matrix, rounded, squared_norm
from ..share import Share
from .base import Method, Quality, register_method
from .feedback import ErrorFeedback

_MEASURE_EVERY = 10  # steps between measurements of the residual, which cost about as much as a compression


@register_method("rankdad")
class RankDAD(Method):
    """Sends r (m + n) numbers a layer, whatever its rows, and a bias gradient as it is.

    A layer so small that its gradient has no more numbers than that is all-reduced.
    """

    exact = False
    sends_bias = True
    finds_what_is_not_finite = True

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.max_rank: int = options.rank
        self._carried: dict[str, Carry] = {}
        self.errors = ErrorFeedback(bool(options.error_feedback))
        self._sent: dict[str, Share] = {}
        self._calls: dict[str, int] = {}
        self._quality: dict[str, Quality] = {}

    def path(self, out: int, width: int) -> str:
        rank = min(self.options.rank, out, width)
        return "lowrank" if rank * (out + width) < out * width else "allreduce"

    def rows_sent(self, rows: int, out: int, width: int) -> int:
        return min(self.max_rank, rows, out, width)

    def encode(self, name: str, factor: Factor, with_bias: bool) -> Share:
        start = self._carried.get(name) if self.options.warm_start else None
        how: dict[str, Any] = {
            "iterations": self.options.iterations,
            "tolerance": self.options.tolerance,
            "warm_start": start,
        }
        seed = zlib.crc32(name.encode())
        measure = self._calls.get(name, 0) % _MEASURE_EVERY == 0 or name not in self._quality
        self._calls[name] = self._calls.get(name, 0) + 1
        if self.errors.enabled:
            whole = self.errors.of(name, factor.deltas.new_empty(factor.deltas.shape[1], factor.activations.shape[1]))
            whole.addmm_(factor.deltas.T, factor.activations)
            try:
                compressed = compress_matrix(whole, self.max_rank, seed=seed, **how)
            except FloatingPointError:
                self.errors.forget(name)
                raise
            size = float(whole.double().square().sum()) if measure else 0.0
        else:
            deltas, activations = self._with_lost(name, factor)
            compressed = compress(deltas, activations, self.max_rank, seed=seed, **how)
            size = squared_norm(deltas, activations) if measure else 0.0
        kept = compressed.effective_rank
        if kept and self.options.warm_start:
            self._carried[name] = compressed.carry
        residual = compressed.residual_of(size) if measure else self._quality[name].residual
        self._quality[name] = Quality(kept, residual)
        left, right = compressed.left.T[:kept], compressed.right.T[:kept]
        share = Share(left, right, factor.bias_gradient() if with_bias else None)
        if self.errors.enabled:
            left, right = (self._on_the_wire(part) for part in (left, right))
            whole.addmm_(left.T, right, alpha=-1)
        elif self.options.wire == "int8":
            self._sent[name] = share
        return share

    def _on_the_wire(self, part: Tensor) -> Tensor:
        """Tells what is left of numbers once they have travelled."""
        if self.options.wire == "int8":
            return rounded(part).to(part)
        return part.bfloat16().to(part) if self.options.wire == "bf16" else part

    def _with_lost(self, name: str, factor: Factor) -> tuple[Tensor, Tensor]:
        """Adds, as further rows of both factors, what rounding to int8 took away from the last step's share."""
        if (last := self._sent.pop(name, None)) is None:
            return factor.deltas, factor.activations
        left, right = self._on_the_wire(last.left), self._on_the_wire(last.right)
        return torch.cat([factor.deltas, last.left, -left]), torch.cat([factor.activations, last.right, right])

    def quality(self) -> dict[str, Quality]:
        return dict(self._quality)

    def state_dict(self) -> dict[str, Any]:
        return {
            "carried": {name: carry.right.clone() for name, carry in self._carried.items()},
            "sent": {name: (share.left.clone(), share.right.clone()) for name, share in self._sent.items()},
            "errors": self.errors.state_dict(),
            "calls": dict(self._calls),
            "rank": self.max_rank,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._carried = {name: Carry(right.clone()) for name, right in state["carried"].items()}
        self._sent = {name: Share(*(part.clone() for part in parts)) for name, parts in state["sent"].items()}
        self.errors.load_state_dict(state["errors"])
        self._calls = dict(state["calls"])
        self.max_rank = state.get("rank", self.max_rank)
