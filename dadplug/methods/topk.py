"""Top-k: each site sends the largest elements of its gradient, with their places; the rest waits by error feedback.

Sources: arXiv:1704.05021 (sparse communication), arXiv:1809.07599 (sparsified SGD with memory).
"""

from __future__ import annotations

import math
from typing import Any

from .base import Method, register_method
from .feedback import ErrorFeedback

_WHOLE = 1024  # elements below which a gradient is sent as it is


@register_method("topk")
class TopK(Method):
    """Gathers k numbers and k indices a parameter, ``k = density * elements``.

    A small parameter, such as a bias, is all-reduced.
    """

    exact = False
    takes_factors = False
    keeps_state = True

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.errors = ErrorFeedback(options.error_feedback is not False)

    def path(self, out: int, width: int) -> str:
        return "allreduce"

    def gradient_path(self, out: int, width: int) -> str:
        return "topk" if out * width >= _WHOLE and self.options.density <= 0.5 else "allreduce"

    def rows_sent(self, rows: int, out: int, width: int) -> int:
        return 0

    def elements(self, numel: int) -> int:
        """Tells how many elements of a gradient are sent."""
        return max(1, math.ceil(self.options.density * numel))

    def commit(self, name: str) -> None:
        self.errors.commit(name)

    def rollback(self, name: str) -> None:
        self.errors.rollback(name)

    def state_dict(self) -> dict[str, Any]:
        return {"errors": self.errors.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.errors.load_state_dict(state["errors"])
