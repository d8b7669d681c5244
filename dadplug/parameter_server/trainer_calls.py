"""Calls of trainers that a parameter server answers without doing anything."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


class TrainerCalls:
    """Calls that trainers make around a backward pass; `step` sends the gradients later."""

    @property
    def syncing(self) -> bool:
        """Always False: `synchronize` is not due after a backward pass."""
        return False

    def synchronize(self) -> None:
        """Do nothing: `step` sends the gradients. For trainers that call it after each backward pass."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return an empty context: gradients accumulate until `step` in any case."""
        return nullcontext()
