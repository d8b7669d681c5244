"""Search: simulated annealing proposes configurations, the model of run time ranks them, measurements refit it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .runtime_model import RuntimeModel
from .task import Config, Measure, Task

_CHAINS = 12
_MOVES = 30  # of each chain
_HOT, _COLD = 0.3, 0.01  # temperatures at the beginning and the end, in logarithms of seconds
_FIRST = 4  # configurations that are measured before the model is fitted
_AT_RANDOM = 0.1  # share of proposals


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
                found.measured[config] = measure(task, config)
                report(len(found.measured))

    add([task.default])
    add(_first(task, min(_FIRST, max(1, budget // 3)), rng))
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


def _first(task: Task, count: int, rng: random.Random) -> list[Config]:
    """Return the configuration that the analytic cost prefers, and random ones."""
    configs = task.space.configs()
    return [min(configs, key=task.prior), *rng.sample(configs, min(len(configs), count - 1))]


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
