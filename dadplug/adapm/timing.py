"""When to act on an intent: early enough for its keys to arrive, and no earlier."""

from __future__ import annotations

import math

QUANTILE = 0.9999
SMOOTHING = 0.1
START = 10.0  # ticks a round, before any have been counted


class ActionTiming:
    """Estimates how many ticks of the clock may pass before what is decided now takes effect.

    As in AdaPM (Renz-Wieland et al., arXiv:2206.00470): a key asked for in this round is here by the end of the next,
    so an intent is due once it starts within the 0.9999 quantile of ``Poisson(2 x ticks a round)``. The rate is the
    larger of the last round's and a smoothed one.
    """

    def __init__(self) -> None:
        self._smoothed = START
        self._clock = 0
        self.window = poisson_quantile(2 * START)

    def end_round(self, clock: int) -> None:
        """Takes the clock at the end of a round into account.

        Args:
            clock: the worker's clock.
        """
        ticks = clock - self._clock
        self._clock = clock
        if ticks > 0:  # a worker at rest (validation, a pause) says nothing about how fast it is
            self._smoothed += SMOOTHING * (ticks - self._smoothed)
        self.window = poisson_quantile(2 * max(ticks, self._smoothed))


def poisson_quantile(rate: float, quantile: float = QUANTILE) -> int:
    """Returns the least k for which a Poisson variable of this rate is at most k with the given probability."""
    if rate > 1000:  # the normal distribution is as good there, and exp(-rate) would vanish
        return math.ceil(rate + 3.72 * math.sqrt(rate))
    term = total = math.exp(-rate)
    k = 0
    while total < quantile and k < rate + 100 + 10 * math.sqrt(rate):
        k += 1
        term *= rate / k
        total += term
    return k
