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
        regular: whether the time of the open step counts, since its participants have not changed.
        first_end: time at which a member was the first to end the open step.
    """

    def __init__(self, now: float) -> None:
        self.regular = True
        self.first_end = self._start = now
        self._durations: deque[float] = deque(maxlen=_MEDIAN_OF)

    def begin(self, now: float) -> None:
        """Begin a step, or begin the open one anew."""
        self._start = now

    def close(self, now: float) -> None:
        """Close the open step, and begin the next one."""
        if self.regular:
            self._durations.append(now - self._start)
        self._start, self.regular = now, True

    @property
    def known(self) -> bool:
        """Whether enough steps have been timed to know when one is late."""
        return len(self._durations) >= _MEDIAN_NEEDS

    def late_at(self, patience: float) -> float:
        """Return when members that have not ended the open step are late.

        Args:
            patience: the time that they have, in median steps.
        """
        return self._start + max(_JITTER, patience * statistics.median(self._durations))
