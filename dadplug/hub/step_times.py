"""Times of the hub's steps: how long a step takes, and when a member is late."""

from __future__ import annotations

import statistics
from collections import deque

_MEDIAN_OF, _MEDIAN_NEEDS = 32, 5  # steps
_JITTER = 0.05  # seconds by which no member is late


class StepTimes:
    """Times of the open step and of those before it.

    Args:
        now: the time, in seconds.

    Attributes:
        regular: whether the time of the open step counts, since its participants have not changed and none was late.
        first_end: time at which a member was the first to end the open step.
    """

    def __init__(self, now: float) -> None:
        self.regular = True
        self.first_end = self._start = now
        self._durations: deque[float] = deque(maxlen=_MEDIAN_OF)

    def begin(self, now: float) -> None:
        """Begin a step, or begin the open one anew."""
        self._start = now

    def close(self, now: float, counts: bool) -> None:
        """Close the open step, and begin the next one.

        Args:
            now: the time, in seconds.
            counts: whether its time is one of those that lateness is measured by.
        """
        if self.regular and counts:
            self._durations.append(now - self._start)
        self._start, self.regular = now, True

    @property
    def known(self) -> bool:
        """Whether enough steps have been timed to know when one is late."""
        return len(self._durations) >= _MEDIAN_NEEDS

    def late_at(self, patience: float) -> float:
        """Return when members that have not ended the open step are late.

        Nobody is late where all are: where the first member has taken longer than a median step, the others have as
        much time beyond it.

        Args:
            patience: the time that they have, in median steps.
        """
        median = statistics.median(self._durations)
        since_start = self._start + max(_JITTER, patience * median)
        return max(since_start, self.first_end + max(_JITTER, (patience - 1) * median))
