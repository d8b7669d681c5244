"""Participation of sites with different numbers of batches in the steps of an epoch."""

from __future__ import annotations


def batches_before(step: int, own: int, steps: int) -> int:
    """Return the number of batches that a site has used before a step of an epoch.

    A site with fewer batches than steps skips steps that are spread over the epoch: it uses batch i in step
    ``i (steps - 1) // (own - 1)``, the first batch in the first step and the last one in the last. If it skipped the
    last steps of the epoch instead, the model would end the epoch on the data of some sites alone.

    Args:
        step: number of the step, from 0; the number of steps for the whole epoch.
        own: number of the site's batches.
        steps: number of steps, at least as many.
    """
    if own < 2 or steps < 2:
        return min(step, own)
    return min(own, -(-step * (own - 1) // (steps - 1)))


def takes_part(step: int, own: int, steps: int) -> bool:
    """Return whether a site participates in a step with a batch of its own; see `batches_before`."""
    return batches_before(step + 1, own, steps) > batches_before(step, own, steps)
