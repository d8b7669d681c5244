"""Timing of intents, so that keys arrive in time and not much earlier, and of synchronisation rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUANTILE = 0.9999
SMOOTHING = 0.1
START = 10.0  # ticks, before the first measurement
_SHARE = 5  # a synchronisation is followed by a pause of this many times the processor time that it took
_LONGEST = 0.1  # seconds that the pause takes at most


class ActionTiming:
    """Estimator of the number of clock ticks between a decision to act on an intent and its effect.

    After AdaPM (Renz-Wieland et al., arXiv:2206.00470): an intent is due if it starts within the 0.9999 quantile of a
    Poisson variable. There its mean is twice the ticks of a round. Here it is the measured number of ticks from one
    check of the intents to the arrival of the keys requested at the next check, since an intent that has just missed a
    check waits that long. The mean follows an increase at once and a decrease slowly.

    Attributes:
        window: an intent is due if it starts at most this many ticks ahead.
    """

    def __init__(self) -> None:
        self._mean = START
        self._clock = 0
        self.window = poisson_quantile(START)

    def observe(self, begin: int, clock: int) -> None:
        """Add a measurement.

        Args:
            begin: clock at the check before the one that requested the keys.
            clock: clock at the arrival of the keys.
        """
        ticks = clock - begin
        if clock != self._clock:  # a worker that rests (validation, a pause) gives no measurement
            self._mean = max(ticks, self._mean + SMOOTHING * (ticks - self._mean))
        self._clock = clock
        self.window = poisson_quantile(self._mean)


class SyncTiming:
    """Schedule of synchronisation rounds that take at most a sixth of a core.

    Args:
        interval: minimum time between two rounds, in seconds.

    Attributes:
        next: time of the next round, on the clock of `time.monotonic`.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._spent = 0.0
        self.next = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Return a context that counts its processor time as spent on synchronisation."""
        start = time.thread_time()
        yield
        self._spent += time.thread_time() - start

    def end_round(self) -> None:
        """Schedule the next round; called when a round is complete."""
        self.next = time.monotonic() + max(self._interval, min(_SHARE * self._spent, _LONGEST))
        self._spent = 0.0


def poisson_quantile(rate: float, quantile: float = QUANTILE) -> int:
    """Return the smallest k with ``P(X <= k) >= quantile`` for a Poisson variable X of a rate."""
    if rate > 1000:  # normal approximation, since exp(-rate) would underflow
        return math.ceil(rate + 3.72 * math.sqrt(rate))
    term = total = math.exp(-rate)
    k = 0
    while total < quantile and k < rate + 100 + 10 * math.sqrt(rate):
        k += 1
        term *= rate / k
        total += term
    return k
