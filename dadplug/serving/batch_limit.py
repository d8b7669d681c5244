"""Size of the next batch: additive increase, multiplicative decrease (AIMD) to a latency goal.

Clipper (Crankshaw et al., NSDI 2017, section 4.3): the size grows by 1 while the latency is below the goal, and is
multiplied by 0.9 when the latency is above it.
"""

from __future__ import annotations

_INCREASE = 1.0
_DECREASE = 0.9


class BatchLimit:
    """Largest size of the next batch.

    Args:
        goal: latency in seconds.
        maximum: upper limit of the size.

    Attributes:
        value: the limit before rounding down, from 1 to `maximum`.
    """

    def __init__(self, goal: float, maximum: int) -> None:
        self.goal, self.maximum = goal, maximum
        self.value = 1.0

    @property
    def size(self) -> int:
        """Number of requests that the next batch may have."""
        return int(self.value)

    def record(self, size: int, seconds: float) -> None:
        """Adapt the limit to a batch that has been answered.

        A batch smaller than the limit does not show that a larger one is fast enough, so it does not increase it.

        Args:
            size: number of its requests.
            seconds: its latency, see `measured_latency`.
        """
        if seconds > self.goal:
            self.value = max(1.0, self.value * _DECREASE)
        elif size >= self.size:
            self.value = min(float(self.maximum), self.value + _INCREASE)


def measured_latency(arrived: float, previous: float, done: float) -> float:
    """Return the latency of a batch for `BatchLimit.record`, from the arrival of its oldest request to its answer.

    A request that the batch before has left behind waited since batches are too small, not too large: its waiting
    counts from the moment when that batch was taken. Otherwise a backlog would shrink the batches, and grow.

    Args:
        arrived: time in seconds when the oldest request of the batch arrived.
        previous: time when the batch before it was taken.
        done: time when the batch was answered.
    """
    return done - max(arrived, previous)
