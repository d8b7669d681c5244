"""Gradients that a reduction does not send, and that have to be weighted, checked and dropped with those it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class AttachedGradients(Protocol):
    """Gradients of parameters that are managed elsewhere, as those of rows in tables.

    Attributes:
        names: names of the parameters, in the same order on all sites.
        arrived: whether backward has brought gradients since the last synchronization, cleared or not.
        cleared: whether the program has cleared all those.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def arrived(self) -> bool: ...

    @property
    def cleared(self) -> bool: ...

    def first_not_finite(self) -> int | None:
        """Return the number of the first parameter whose gradient holds NaN or Inf; None if there is none."""

    def apply_share(self, share: float) -> None:
        """Weight the gradients that have arrived; called at the end of a synchronization.

        Args:
            share: this site's weight in the mean of the step.
        """

    def fill_with_inf(self) -> None:
        """Make the gradients Inf, as those of some site are; replaces `apply_share`."""
