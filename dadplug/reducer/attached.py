"""Interface of gradients that a reduction does not send, and weights, checks and drops with those that it sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class AttachedGradients(Protocol):
    """Gradients of parameters that are managed elsewhere, such as those of rows in tables.

    Attributes:
        names: names of the parameters, in the same order on all sites.
        arrived: whether backward has added gradients since the last synchronization, cleared or not.
        cleared: whether the program has cleared all of them.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def arrived(self) -> bool: ...

    @property
    def cleared(self) -> bool: ...

    def first_not_finite(self) -> int | None:
        """Return the index of the first parameter whose gradient holds NaN or Inf; None if there is none."""

    def apply_share(self, share: float) -> None:
        """Weight the gradients that have arrived; called at the end of a synchronization.

        Args:
            share: this site's weight in the mean of the step.
        """

    def fill_with_inf(self) -> None:
        """Replace the gradients by Inf, since some site's are not finite; called instead of `apply_share`."""
