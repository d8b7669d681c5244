"""Search of constants: tasks and their spaces, a learned model of run time, annealing, and proof in pairs."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SHORTEST = 0.01  # seconds of a sample; shorter work is repeated within it, since an interrupt takes a millisecond
_RIDGE = 0.1
_STUMPS = 40
_SHRINKAGE = 0.3
_FEW = 8  # measurements below which there are no stumps
_TIMID = 0.02  # logarithm of the seconds that a configuration far from all measured ones is supposed to save
_CHAINS = 12
_MOVES = 30  # of each chain
_HOT, _COLD = 0.3, 0.01  # temperatures at the beginning and the end, in logarithms of seconds
_FIRST = 4  # configurations that are measured before the model is fitted
_AT_RANDOM = 0.1  # share of proposals
SAMPLES = 5  # of a measurement in a search
REPEATS = 30
_WINS = 21  # of 30 pairs: as many by chance with a probability of 0.02
_LEAST = 0.99  # ratio of the seconds, from which a difference is worth a change

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
    def calls(self, config: Config) -> list[Callable[[], object]]:
        """Prepare the work with a configuration, and return the calls that do it."""

    def prior(self, config: Config) -> float:
        """Return the seconds that an analytic cost model predicts, up to a factor that is the same for all."""
        return 1.0


Measure = Callable[[Task, Config, int], float]
"""Function that returns the seconds of a task's work with a configuration, the median of some samples."""


class Timer:
    """Function that measures a configuration's seconds by the clock.

    The first measurement of a configuration prepares it and calls it once or twice before: kernels are compiled, and
    memory is touched.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._calls: dict[tuple[int, Config], tuple[list[Callable[[], object]], int]] = {}

    def __call__(self, task: Task, config: Config, samples: int) -> float:
        """Return the seconds of the task's work, the median of some samples."""
        calls, repeats = self._prepared(task, config)
        return statistics.median(self._seconds(calls, repeats) for _ in range(samples))

    def _prepared(self, task: Task, config: Config) -> tuple[list[Callable[[], object]], int]:
        key = id(task), config
        if key not in self._calls:
            calls = task.calls(config)
            self._seconds(calls, 1)
            took = self._seconds(calls, 1)
            self._calls[key] = calls, min(1000, max(1, round(_SHORTEST / took))) if took > 0 else 1
        return self._calls[key]

    def _seconds(self, calls: Sequence[Callable[[], object]], repeats: int) -> float:
        start = self._clock()
        for _ in range(repeats):
            for call in calls:
                call()
        return (self._clock() - start) / repeats


class RuntimeModel:
    """Predictor of the logarithm of a task's seconds.

    Args:
        task: the task.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._known: dict[Config, tuple[Vector, float]] = {}
        self._weights: Vector | None = None
        self._stumps: list[tuple[int, float, float, float]] = []  # feature, threshold, value below, and above

    def fit(self, measured: dict[Config, float]) -> None:
        """Fit the model to seconds by configuration."""
        inputs, priors = self._known_of(list(measured))
        self._inputs = inputs
        self._mean, spread = inputs.mean(0), inputs.std(0)
        self._spread = np.where(spread > 0, spread, 1.0)
        self._mean_prior = priors.mean()
        terms = self._terms(inputs, priors)
        targets = np.log(np.array(list(measured.values()))) - priors
        penalty = _RIDGE * np.eye(terms.shape[1])
        penalty[0, 0] = 1e-9  # the constant is free
        self._weights = np.linalg.solve(terms.T @ terms + penalty, terms.T @ targets)
        self._stumps = []
        if len(measured) >= _FEW:
            self._boost(inputs, targets - terms @ self._weights)

    def predict(self, configs: Sequence[Config], explore: float = 0.0) -> Vector:
        """Predict the logarithm of the seconds of configurations.

        Args:
            configs: the configurations.
            explore: from 0 to 1, how much lower the seconds of configurations far from all measured ones are taken.
        """
        assert self._weights is not None
        inputs, priors = self._known_of(configs)
        found: Vector = self._terms(inputs, priors) @ self._weights + priors
        for feature, threshold, below, above in self._stumps:
            found += np.where(inputs[:, feature] <= threshold, below, above)
        if explore:
            gaps = (inputs[:, None] - self._inputs[None]) / self._spread
            found -= explore * _TIMID * np.sqrt((gaps**2).sum(2)).min(1)
        return found

    def _known_of(self, configs: Sequence[Config]) -> tuple[Vector, Vector]:
        """Return the features of configurations, one in a row, and the logarithms of their analytic costs."""
        for config in configs:
            if config not in self._known:
                self._known[config] = self._task.space.features(config), float(np.log(self._task.prior(config)))
        features, priors = zip(*(self._known[config] for config in configs), strict=True)
        return np.stack(features), np.array(priors)

    def _terms(self, inputs: Vector, priors: Vector) -> Vector:
        """Return 1, the analytic cost, which may be wrong, the features, their squares and products."""
        scaled = (inputs - self._mean) / self._spread
        first, second = np.triu_indices(scaled.shape[1])
        own = np.stack([np.ones(len(scaled)), priors - self._mean_prior], axis=1)
        return np.concatenate([own, scaled, 0.5 * scaled[:, first] * scaled[:, second]], axis=1)

    def _boost(self, inputs: Vector, rest: Vector) -> None:
        """Add stumps, each of which explains most of what those before leave."""
        columns = [np.unique(column) for column in inputs.T]
        features = np.repeat(np.arange(len(columns)), [len(values) - 1 for values in columns])
        cuts = np.concatenate([(values[:-1] + values[1:]) / 2 for values in columns])
        low = (inputs[:, features] <= cuts).astype(float)  # of shape (configurations, cuts)
        for _ in range(_STUMPS if len(cuts) else 0):
            sums = np.stack([rest @ low, rest @ (1 - low)])  # below and above each cut
            # One more observation of zero on each side keeps single measurements from being copied.
            means = sums / (np.stack([low.sum(0), (1 - low).sum(0)]) + 1)
            best = int((means * sums).sum(0).argmax())
            below, above = map(float, _SHRINKAGE * means[:, best])
            rest = rest - np.where(low[:, best], below, above)
            self._stumps.append((int(features[best]), float(cuts[best]), below, above))


@dataclass
class Found:
    """Result of a search.

    Attributes:
        measured: seconds by configuration, in the order in which they were measured.
        predicted: seconds that the model predicted just before, by configuration; none of the first ones.
    """

    measured: dict[Config, float]
    predicted: dict[Config, float]

    @property
    def best(self) -> Config:
        """The fastest configuration."""
        return min(self.measured, key=self.measured.__getitem__)


def search(
    task: Task,
    measure: Measure,
    budget: int,
    seed: int = 0,
    *,
    enough: Callable[[], bool] = lambda: False,
    report: Callable[[int], object] = lambda count: None,
) -> Found:
    """Search for the fastest configuration of a task.

    Args:
        task: the task.
        measure: measures a configuration.
        budget: largest number of measurements, that of the default included.
        seed: seed of the random choices.
        enough: whether the time for the task is over.
        report: called with the number of measurements after each.
    """
    rng = random.Random(seed)
    found = Found({}, {})
    budget = min(budget, len({*task.space.configs(), task.default}))
    model = RuntimeModel(task)

    def add(configs: Iterable[Config]) -> None:
        for config in configs:
            if len(found.measured) < budget and config not in found.measured and not (enough() and found.measured):
                found.measured[config] = measure(task, config, SAMPLES)
                report(len(found.measured))

    add([task.default])
    # The configuration that the analytic cost prefers, and random ones.
    configs, first = task.space.configs(), min(_FIRST, max(1, budget // 3))
    add([min(configs, key=task.prior), *rng.sample(configs, min(len(configs), first - 1))])
    batch = max(1, budget // 10)
    while len(found.measured) < budget and not enough():
        model.fit(found.measured)
        proposals = _anneal(task, model, found, rng)[:batch]
        if not proposals or rng.random() < _AT_RANDOM:
            left = [each for each in (*task.space.configs(), task.default) if each not in found.measured]
            proposals = [rng.choice(left)]
        for config, value in zip(proposals, model.predict(proposals), strict=True):
            found.predicted[config] = math.exp(value)
        add(proposals)
    found.predicted = {config: value for config, value in found.predicted.items() if config in found.measured}
    return found


def _anneal(task: Task, model: RuntimeModel, found: Found, rng: random.Random) -> list[Config]:
    """Return configurations that are not measured yet, those first that the model predicts to be fastest.

    Chains start at the fastest measured configurations and at random ones.
    """
    ranked = sorted(found.measured, key=found.measured.__getitem__)
    inside = [each for each in ranked if each in set(task.space.configs())][: _CHAINS // 2]
    chains = inside + [task.space.draw(rng) for _ in range(_CHAINS - len(inside))]
    seen: dict[Config, float] = {}

    def values(configs: list[Config]) -> list[float]:
        new = list(dict.fromkeys(each for each in configs if each not in seen))
        if new:
            seen.update(zip(new, map(float, model.predict(new, explore=1.0)), strict=True))
        return [seen[each] for each in configs]

    heights = values(chains)
    for move in range(_MOVES):
        temperature = _HOT * (_COLD / _HOT) ** (move / (_MOVES - 1))
        steps = [task.space.neighbour(each, rng) for each in chains]
        for place, (step, height) in enumerate(zip(steps, values(steps), strict=True)):
            if height < heights[place] or rng.random() < math.exp((heights[place] - height) / temperature):
                chains[place], heights[place] = step, height
    return sorted((each for each in seen if each not in found.measured), key=seen.__getitem__)


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


def compare_in_pairs(task: Task, config: Config, measure: Measure) -> Proof:
    """Measure a configuration and the default in turns, each first in every other pair.

    Args:
        task: the task.
        config: the configuration.
        measure: measures a configuration.
    """
    ratios, defaults = [], []
    for pair in range(REPEATS):
        order = (config, task.default) if pair % 2 else (task.default, config)
        seconds = {each: measure(task, each, 1) for each in order}
        ratios.append(seconds[config] / seconds[task.default])
        defaults.append(seconds[task.default])
    wins = sum(each < 1 for each in ratios)
    return Proof(statistics.median(ratios), wins, REPEATS, statistics.median(defaults))
