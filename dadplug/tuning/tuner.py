"""Tuner: runs tasks one after the other, and collects their results."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..schedules import Encoding
from . import proof, rates
from .progress import Progress
from .result import Row
from .search import Found, search
from .task import Config, Measure, Task

_SHARE = 0.25  # of the configurations of a space that are measured at most
_LEAST = 10  # configurations that are measured in any case, if there are as many
_FOR_PAIRS = 0.4  # of a task's time
_REMEASURED = 3  # of the fastest configurations, before one is compared with the default


@dataclass
class Tuner:
    """Runner of tasks.

    Args:
        measure: measures a configuration in a search.
        once: measures a configuration once, in a comparison in pairs.
        seed: seed of the search.
        clock: returns the time in seconds.
        progress: where to show progress.

    Attributes:
        rows: results of the tasks so far.
        points: by task, measured and predicted seconds.
        notes: remarks.
    """

    measure: Measure
    once: Measure
    seed: int
    clock: Callable[[], float]
    progress: Progress
    rows: list[Row] = field(default_factory=list)
    points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self, task: Task, seconds: float) -> Config:
        """Search a task's space, compare the fastest configuration with the default, and add a row.

        Args:
            task: the task.
            seconds: time for it.

        Returns:
            The configuration from now on.
        """
        over = self.clock() + (1 - _FOR_PAIRS) * seconds
        size = len(task.space)
        budget = min(size + 1, max(_LEAST, round(_SHARE * size)))
        found = search(
            task,
            self.measure,
            budget,
            self.seed,
            enough=lambda: self.clock() > over,
            report=lambda count: self.progress.show(f"{task.name}: {count} of {budget}"),
        )
        self.points[task.name] = [(found.measured[each], value) for each, value in found.predicted.items()]
        chosen, outcome = self._prove(task, found)
        old, new = task.space.named(task.default), task.space.named(chosen)
        took = self.measure(task, task.default) if outcome is None else outcome.default
        self._add(task.name, old, new, (len(found.measured), size), took, outcome)
        changed = chosen != task.default and outcome is not None
        self.progress.report(f"{task.name}: {_less(outcome) if changed else 'as before'}")
        return chosen

    def _prove(self, task: Task, found: Found) -> tuple[Config, proof.Proof | None]:
        """Return the configuration from now on, and its comparison with the default."""
        fastest = sorted(found.measured, key=found.measured.__getitem__)[:_REMEASURED]
        again = {each: self.measure(task, each) for each in fastest}
        best = min(again, key=lambda each: again[each] + found.measured[each])
        if best == task.default:
            return task.default, None
        self.progress.show(f"{task.name}: compared with the default")
        outcome = proof.compare(task, best, self.once)
        return (best if outcome.holds else task.default), outcome

    def _add(
        self,
        name: str,
        old: Mapping[str, Any],
        new: Mapping[str, Any],
        counts: tuple[int, int],
        seconds: float,
        outcome: proof.Proof | None,
    ) -> None:
        """Add a row: constants before and after, numbers of configurations, seconds, and the comparison."""
        candidate, pairs = (1.0, 0) if outcome is None else (outcome.ratio, outcome.pairs)
        ratio = candidate if old != new else 1.0
        self.rows.append(Row(name, old, new, *counts, seconds, ratio, candidate, pairs))

    def fit(self, task: rates.AlgorithmTask, seconds: float) -> Encoding:
        """Fit the rates of the cost model; keep them if they predict better, and choices by them are not slower.

        Args:
            task: the algorithms, with the rates today.
            seconds: time for it.
        """
        over = self.clock() + (1 - _FOR_PAIRS) * seconds
        configs = task.space.configs()
        tried = sorted(configs, key=task.prior)[: 3 * len(configs) // 4]  # the slowest are never chosen
        random.Random(self.seed).shuffle(tried)
        measured: dict[Config, float] = {}
        for config in tried:
            if self.clock() > over and len(measured) >= 2 * len(rates.RATES + rates.STARTS):
                break
            measured[config] = self.measure(task, config)
            self.progress.show(f"{task.name}: {len(measured)} of {len(tried)}")
        default, fitted = task.constants, rates.fit_rates(task, measured)
        predicting = rates.AlgorithmTask(task.cases, fitted)
        self.points[task.name] = [(took, predicting.prior(config)) for config, took in measured.items()]
        choices = rates.ChoiceTask(task, default, fitted)
        same = choices.chosen(("default",)) == choices.chosen(("fitted",))
        outcome = None if same else proof.compare(choices, ("fitted",), self.once)
        nearer = rates.prediction_error(task, measured, fitted) < rates.prediction_error(task, measured, default)
        keep = nearer and (outcome is None or outcome.ratio <= 1.0)
        names = (*rates.RATES, *rates.STARTS)
        old, new = ({name: each.values()[name] for name in names} for each in (default, fitted))
        took = self.measure(choices, choices.default)
        self._add(task.name, old, new if keep else old, (len(measured), len(configs)), took, outcome)
        self.progress.report(f"{task.name}: {'rates fitted' if keep else 'as before'}")
        return fitted if keep else default


def _less(outcome: proof.Proof | None) -> str:
    return "" if outcome is None else f"{100 * (1 - outcome.ratio):.0f} % less time"
