"""Paired comparison of a configuration with the default: the default stays unless the other is really faster."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from .task import Config, Measure, Task

REPEATS = 30
_WINS = 21  # of 30 pairs: as many by chance with a probability of 0.02
_LEAST = 0.99  # ratio of the seconds, from which a difference is worth a change


@dataclass(frozen=True)
class Proof:
    """Outcome of a paired comparison.

    Attributes:
        ratio: median over pairs of the seconds over those of the default.
        wins: number of pairs in which the configuration was faster.
        pairs: number of pairs.
        default: median of the default's seconds.
    """

    ratio: float
    wins: int
    pairs: int
    default: float

    @property
    def holds(self) -> bool:
        """Whether the configuration is faster beyond chance."""
        return self.ratio < _LEAST and self.wins >= math.ceil(_WINS / REPEATS * self.pairs) and self.pairs >= 5


def compare(task: Task, config: Config, measure: Measure, repeats: int = REPEATS) -> Proof:
    """Measure a configuration and the default in turns, each first in every other pair.

    Args:
        task: the task.
        config: the configuration.
        measure: measures a configuration once.
        repeats: number of pairs.
    """
    ratios, defaults = [], []
    for pair in range(repeats):
        order = (config, task.default) if pair % 2 else (task.default, config)
        seconds = {each: measure(task, each) for each in order}
        ratios.append(seconds[config] / seconds[task.default])
        defaults.append(seconds[task.default])
    wins = sum(each < 1 for each in ratios)
    return Proof(statistics.median(ratios), wins, repeats, statistics.median(defaults))
