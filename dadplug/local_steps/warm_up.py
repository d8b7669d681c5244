"""Synchronous steps before the local ones, at a site that has run out of batches."""

from __future__ import annotations

from collections.abc import Callable

from ..reduction import GradientReduction


class _Over(Exception):
    """The last synchronous step has been taken."""


def join_until(reduction: GradientReduction, step: Callable[[], bool]) -> bool:
    """Take part in the steps of the other sites, without data, until all have finished or the steps are over.

    Args:
        reduction: the reduction of the synchronous steps.
        step: takes the optimizer's step after each synchronization; returns whether it was the last one.

    Returns:
        Whether the last synchronous step has been taken.
    """

    def take_step() -> None:
        if step():
            raise _Over

    try:
        reduction.join(take_step)
    except _Over:
        return True
    return False
