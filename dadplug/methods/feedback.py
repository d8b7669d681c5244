"""Error feedback: what a lossy method did not send in one step is added to the next step's gradient.

Source: arXiv:1901.09847 (error feedback fixes sign descent and other compression), section 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ErrorFeedback:
    """What has not been sent yet, by name of the weight.

    Args:
        enabled: whether anything is kept at all.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._errors: dict[str, Tensor] = {}
        self._reference = 0

    def refer(self, reference: int) -> None:
        """Says how many samples' sum of gradients a number here is one of; what is kept is scaled to it."""
        if self._reference not in (0, reference):
            for error in self._errors.values():
                error.mul_(self._reference / reference)
        self._reference = reference

    def of(self, name: str, like: Tensor) -> Tensor:
        """Returns what is left of a weight's gradients, of the shape of `like`; zeros where nothing is.

        The caller adds to it and takes from it in place.
        """
        if not self.enabled:
            return torch.zeros_like(like, memory_format=torch.contiguous_format)
        error = self._errors.get(name)
        if error is None or error.shape != like.shape or error.dtype != like.dtype:
            error = self._errors[name] = torch.zeros_like(like, memory_format=torch.contiguous_format)
        elif error.device != like.device:
            error = self._errors[name] = error.to(like.device)
        return error

    def forget(self, name: str) -> None:
        """Drops what is left of one weight's gradients, as after NaN or Inf."""
        self._errors.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of all that is left."""
        return {"reference": self._reference, "errors": {name: error.clone() for name, error in self._errors.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        current, self._reference = self._reference, state["reference"]
        self._errors = {name: error.clone() for name, error in state["errors"].items()}
        if current:
            self.refer(current)
