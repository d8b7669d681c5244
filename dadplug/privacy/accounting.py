"""Epsilon of subsampled Gaussian steps by Opacus's accountant for privacy random variables (PRV, arXiv:2106.02848)."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

from ..signature import number

Step = tuple[float, float, int]
"""Noise multiplier, sample rate and number of steps."""

_SEARCHES = 60
_PRECISION = 1e-4  # of a noise multiplier, relative


def check_delta(delta: object) -> None:
    """Raise ValueError if a delta is not between 0 and 1."""
    number("a number above 0 and below 1", lambda value: 0 < value < 1)("delta", delta)


def epsilon_of(history: Sequence[Step], delta: float) -> float:
    """Compute the epsilon of a history of steps.

    Args:
        history: steps with the same setting, together.
        delta: probability with which the bound may fail.

    Returns:
        Infinity where a step had no noise; 0.0 before the first step.

    Raises:
        ValueError: if delta is not between 0 and 1.
        ImportError: if opacus is not installed.
    """
    check_delta(delta)
    done = tuple(step for step in history if step[2])
    if not done:
        return 0.0
    if any(not multiplier for multiplier, _, _ in done):
        return math.inf
    return _epsilon(done, delta)


@functools.lru_cache(64)
def _epsilon(history: tuple[Step, ...], delta: float) -> float:
    accountant = _accountant()
    accountant.history = list(history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta=delta))


def _accountant() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from opacus.accountants import PRVAccountant
    except ImportError as error:
        raise ImportError("epsilon is computed by opacus: pip install 'dadplug[privacy]'") from error
    return PRVAccountant()


def noise_for(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """Find the least noise multiplier that keeps the epsilon of some steps below a bound, by bisection.

    Args:
        epsilon: the bound.
        delta: probability with which the bound may fail.
        sample_rate: probability with which each record is in a batch.
        steps: number of steps.

    Raises:
        ValueError: if there is none.
    """

    def fits(multiplier: float) -> bool:
        return epsilon_of([(multiplier, sample_rate, steps)], delta) <= epsilon

    low, high = 0.0, 1.0
    while not fits(high):
        low, high = high, 2 * high
        if high > 1e6:
            raise ValueError(f"no noise multiplier up to {high:g} keeps epsilon below {epsilon:g} with delta {delta:g}")
    for _ in range(_SEARCHES):
        if high - low <= _PRECISION * high:
            break
        middle = (low + high) / 2
        # Little noise makes the accountant's grid too large: epsilon is far above any bound of use there.
        if middle < 0.1 or not fits(middle):
            low = middle
        else:
            high = middle
    return high
