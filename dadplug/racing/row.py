"""Runs of one way in a race, and the figures that follow from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .heat import Point


@dataclass(frozen=True)
class Row:
    """Results of one way.

    Attributes:
        way: name of the way in the registry.
        label: its name in tables and pictures.
        runs: its runs, by seed; empty if it failed.
        failure: why it could not be raced; empty if it was.
    """

    way: str
    label: str
    runs: Sequence[Sequence[Point]] = ()
    failure: str = ""

    @property
    def losses(self) -> list[float]:
        """Held-out loss at the end of each run, the mean of its last three evaluations."""
        return [statistics.fmean(point.loss for point in run[-3:]) for run in self.runs]

    @property
    def loss(self) -> float:
        """Mean held-out loss at the end of the runs; NaN if the way failed."""
        return statistics.fmean(self.losses) if self.runs else math.nan

    @property
    def step_seconds(self) -> float:
        """Mean time of a step, in seconds."""
        return _ratio([run[-1].seconds for run in self.runs], [run[-1].steps for run in self.runs])

    @property
    def megabytes_a_step(self) -> float:
        """Payload megabytes that a process sends in a step."""
        return _ratio([run[-1].megabytes for run in self.runs], [run[-1].steps for run in self.runs])

    def seconds_to(self, loss: float) -> float:
        """Return the mean time until a run's held-out loss is at a value or below, in seconds; Inf if one never is.

        Args:
            loss: the value.
        """
        return self._until(loss, "seconds")

    def megabytes_to(self, loss: float) -> float:
        """Return the mean payload until then, in megabytes.

        Args:
            loss: the value.
        """
        return self._until(loss, "megabytes")

    def _until(self, loss: float, axis: str) -> float:
        return statistics.fmean(_crossing(run, loss, axis) for run in self.runs) if self.runs else math.inf


def _ratio(values: list[float], counts: list[int]) -> float:
    return sum(values) / sum(counts) if sum(counts) else math.nan


def _crossing(run: Sequence[Point], loss: float, axis: str) -> float:
    """Return seconds or megabytes at which a run's loss first reaches a value, interpolated between laps."""
    before = run[0]
    if before.loss <= loss:
        return 0.0
    for point in run[1:]:
        if point.loss <= loss:
            part = (before.loss - loss) / (before.loss - point.loss)
            start, end = getattr(before, axis), getattr(point, axis)
            return float(start + part * (end - start))
        before = point
    return math.inf
