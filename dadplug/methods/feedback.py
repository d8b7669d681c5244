"""Error feedback: what a lossy method did not send in one step is added to the next step's gradient.

Source: arXiv:1901.09847 (error feedback fixes sign descent and other compression), section 4.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor


class ErrorFeedback:
    """Error memory: the part of each weight's gradients that has not been sent yet, without the loss scale.

    A step may prepare the next memory beside the present one: `prepare` returns a buffer for it, `commit` makes it the
    present one, `rollback` drops it.

    Args:
        enabled: whether anything is kept at all.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._errors: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}
        self._reference = 0

    def refer(self, reference: int) -> None:
        """Set the number of samples whose mean gradient the memory is in units of, and rescale the memory to it."""
        if self._reference not in (0, reference):
            for error in self._errors.values():
                error.mul_(self._reference / reference)
        self._reference = reference

    def of(self, name: str, like: Tensor) -> Tensor:
        """Return the memory of a weight, of the shape of `like`, to be changed in place; zeros where there is none."""
        error = self.find(name, like)
        if error is None:
            error = self._errors[name] = torch.zeros_like(like, memory_format=torch.contiguous_format)
        return error

    def find(self, name: str, like: Tensor) -> Tensor | None:
        """Return the memory of a weight, the staged one where there is one; None where nothing is kept."""
        kept = self._staged if name in self._staged else self._errors
        error = kept.get(name) if self.enabled else None
        if error is None or error.shape != like.shape or error.dtype != like.dtype:
            return None
        if error.device != like.device:
            error = kept[name] = error.to(like.device)
        return error

    def prepare(self, name: str, like: Tensor) -> Tensor:
        """Return a buffer for the next memory of a weight, of the shape of `like`, to be filled by the caller."""
        staged = self._staged.get(name)
        if staged is None:
            staged = self._spare.pop(name, None)
        if staged is None or staged.shape != like.shape or staged.dtype != like.dtype or staged.device != like.device:
            staged = torch.empty_like(like, memory_format=torch.contiguous_format)
        self._staged[name] = staged
        return staged

    def commit(self, name: str) -> None:
        """Make the staged memory of a weight the present one."""
        staged = self._staged.pop(name, None)
        if staged is None:
            return
        before = self._errors.get(name)
        if self.enabled:
            self._errors[name] = staged
        else:
            before = staged
        if before is not None:
            self._spare[name] = before

    def rollback(self, name: str) -> None:
        """Drop the staged memory of a weight."""
        staged = self._staged.pop(name, None)
        if staged is not None:
            self._spare[name] = staged

    def forget(self, name: str) -> None:
        """Drop the memory of a weight, and its buffers."""
        for kept in (self._errors, self._staged, self._spare):
            kept.pop(name, None)

    def retain(self, names: Container[str]) -> None:
        """Drop the memory of all other weights."""
        for name in [name for name in self._errors if name not in names]:
            self.forget(name)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the memory."""
        return {"reference": self._reference, "errors": {name: error.clone() for name, error in self._errors.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        current, self._reference = self._reference, state["reference"]
        self._errors = {name: error.clone() for name, error in state["errors"].items()}
        if current:
            self.refer(current)
