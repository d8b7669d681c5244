"""When to act on an intent, early enough for its keys to arrive and no earlier; and when to synchronise replicas."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUANTILE = 0.9999
SMOOTHING = 0.1
START = 10.0  # ticks, before any have been counted
_SHARE = 5  # a synchronisation is followed by a pause of this many times the processor time that it took
_LONGEST = 0.1  # seconds that the pause takes at most


class ActionTiming:
    """Estimates how many ticks of the clock may pass before what is decided now takes effect.

    After AdaPM (Renz-Wieland et al., arXiv:2206.00470): an intent is due once it starts within the 0.9999 quantile of a
    Poisson variable. Its mean there is twice the ticks of a round; here it is the ticks that have been counted from one
    look at the intents to the arrival of what the next look asked for: an intent that has just missed a look waits as
    long. The mean follows the counts up at once, and down slowly.
    """

    def __init__(self) -> None:
        self._mean = START
        self._clock = 0
        self.window = poisson_quantile(START)

    def observe(self, begin: int, clock: int) -> None:
        """Takes into account how long keys were on their way.

        Args:
            begin: the clock at the look before the one that asked for them.
            clock: the clock at their arrival.
        """
        ticks = clock - begin
        if clock != self._clock:  # a worker at rest (validation, a pause) says nothing about how fast it is
            self._mean = max(ticks, self._mean + SMOOTHING * (ticks - self._mean))
        self._clock = clock
        self.window = poisson_quantile(self._mean)


class SyncTiming:
    """Lets the synchronisation of replicas take a sixth of a core at most.

    Args:
        interval: least time between two, in seconds.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._spent = 0.0
        self.next = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the processor time of a block as spent on synchronisation."""
        start = time.thread_time()
        yield
        self._spent += time.thread_time() - start

    def end_round(self) -> None:
        """Sets the time of the next synchronisation, once one is over."""
        self.next = time.monotonic() + max(self._interval, min(_SHARE * self._spent, _LONGEST))
        self._spent = 0.0


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
