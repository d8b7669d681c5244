"""Sites with different numbers of batches: who takes part in which step."""

from __future__ import annotations


def batches_before(step: int, own: int, steps: int) -> int:
    """Counts the batches that a site has used before a step of an epoch.

    A site with fewer batches than steps leaves out steps that are spread over the epoch: its batch i has its turn in
    step ``i (steps - 1) // (own - 1)``, the first batch in the first step and the last one in the last. Were the steps
    left out all at the end, the model would end the epoch on the data of some sites alone, and forget that of others.

    Args:
        step: number of the step, from 0; the number of steps for the whole epoch.
        own: number of the site's batches.
        steps: number of steps, at least as many.
    """
    if own < 2 or steps < 2:
        return min(step, own)
    return min(own, -(-step * (own - 1) // (steps - 1)))


def has_turn(step: int, own: int, steps: int) -> bool:
    """Says whether a site uses a batch in a step; see `batches_before`."""
    return batches_before(step + 1, own, steps) > batches_before(step, own, steps)
