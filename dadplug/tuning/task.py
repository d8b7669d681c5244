"""Tasks of the tuner: a space of constants, and how long the code takes with each."""

from __future__ import annotations

import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Config = tuple[Any, ...]
"""A value for each constant of a space."""

Vector = NDArray[np.float64]


class Space:
    """Constants and the values among which each is searched.

    Args:
        values: the values by name. Numbers are in ascending order, so that neighbours are alike.
    """

    def __init__(self, values: Mapping[str, Sequence[Any]]) -> None:
        self.names = tuple(values)
        self.values = tuple(tuple(each) for each in values.values())

    def __len__(self) -> int:
        return math.prod(map(len, self.values))

    def configs(self) -> list[Config]:
        """Return all configurations."""
        return list(itertools.product(*self.values))

    def draw(self, rng: random.Random) -> Config:
        """Draw a configuration."""
        return tuple(rng.choice(each) for each in self.values)

    def neighbour(self, config: Config, rng: random.Random) -> Config:
        """Change one constant: a number by one or two places, a word at random."""
        movable = [place for place, values in enumerate(self.values) if len(values) > 1]
        if not movable:
            return config
        place = rng.choice(movable)
        values = self.values[place]
        if isinstance(values[0], (bool, str)):
            new = rng.choice([each for each in values if each != config[place]])
        else:
            position = values.index(config[place]) + rng.choice((-2, -1, 1, 2))
            new = values[min(max(position, 0), len(values) - 1)]
        return (*config[:place], new, *config[place + 1 :])

    def named(self, config: Config) -> dict[str, Any]:
        """Return a configuration's values by name."""
        return dict(zip(self.names, config, strict=True))

    def features(self, config: Config) -> Vector:
        """Return the numbers by which the run time is learned: logarithms of numbers, one indicator a word."""
        found: list[float] = []
        for value, values in zip(config, self.values, strict=True):
            if isinstance(values[0], (bool, str)):
                found += [float(value == each) for each in values]
            else:
                found.append(math.log2(1 + value))
        return np.array(found)


class Task(ABC):
    """Constants that are tuned together, for a given amount of work.

    Args:
        name: name of the task, for people.
        space: the constants and their values.
        default: the configuration today, which may be outside of the space.
    """

    def __init__(self, name: str, space: Space, default: Config) -> None:
        self.name = name
        self.space = space
        self.default = default

    @abstractmethod
    def prepare(self, config: Config) -> Callable[[], object]:
        """Return a call that does the work with a configuration."""

    def prior(self, config: Config) -> float:
        """Return the seconds that an analytic cost model predicts, up to a factor that is the same for all."""
        return 1.0


Measure = Callable[[Task, Config], float]
"""Function that returns the seconds of a task's work with a configuration."""
