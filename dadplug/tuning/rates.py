"""Rates of the cost model of compression, fitted to measured times of its algorithms."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..lowrank.algorithms import ALGORITHMS, Operator, Search, choose, predict, terms
from ..schedules import Encoding
from .kernel_tasks import Layer, random_rows
from .task import Config, Space, Task, Vector

RATES = ("fat", "skinny", "eigen")
STARTS = ("start_gram", "start_iteration", "start_formed")
_NAMES = ("gram", "iteration", "formed")
_ITERATIONS = 1
_FASTEST = 1e9  # a microsecond, and microseconds: the ends of the valid ranges
_LONGEST = 1e6


class Case(NamedTuple):
    """A compression.

    Attributes:
        rows: rows of the factors.
        out: width of the deltas.
        width: width of the activations.
        k: rank.
    """

    rows: int
    out: int
    width: int
    k: int


def cases_for(layers: Sequence[Layer]) -> list[Case]:
    """Return compressions of some layers, with their own rows and with a few and many."""
    found: dict[Case, None] = {}
    for layer in layers:
        for rows in (layer.rows, 16, 64, 256):
            for k in (4, 8):
                if k < min(rows, layer.out, layer.width):
                    found[Case(rows, layer.out, layer.width, k)] = None
    return list(found)


class AlgorithmTask(Task):
    """Algorithms of compression: each case with each algorithm is a configuration, whose seconds are wanted.

    Args:
        cases: the compressions.
        default: constants of the cost model, whose prediction is the prior.
    """

    def __init__(self, cases: Sequence[Case], default: Encoding) -> None:
        self.cases = list(cases)
        space = Space({"case": range(len(self.cases)), "algorithm": _NAMES})
        super().__init__("algorithms of compression", space, (0, _NAMES[0]))
        self.constants = default

    def prepare(self, config: Config) -> Callable[[], object]:
        case, algorithm = self.cases[config[0]], config[1]
        deltas, activations = random_rows(case.rows, case.out, 0), random_rows(case.rows, case.width, 1)
        # A warm start, as in training.
        start = torch.mm(random_rows(case.k, case.rows, 2), activations)
        search = Search(_ITERATIONS, 0.0, None, start, 0)
        return lambda: ALGORITHMS[algorithm](Operator(deltas, activations), case.k, search)

    def prior(self, config: Config) -> float:
        return 1e-6 * predict(*self.cases[config[0]], _ITERATIONS, self.constants)[config[1]]

    def choice(self, case: int, constants: Encoding) -> Config:
        """Return the configuration that the cost model chooses for a case."""
        return case, choose(*self.cases[case], _ITERATIONS, constants)


class ChoiceTask(Task):
    """Compression of all cases by the algorithms that the cost model chooses.

    Args:
        algorithms: the task of the algorithms.
        old: the constants today.
        new: the fitted constants.
    """

    def __init__(self, algorithms: AlgorithmTask, old: Encoding, new: Encoding) -> None:
        super().__init__("choice of the algorithm", Space({"rates": ("default", "fitted")}), ("default",))
        self._algorithms, self._constants = algorithms, {"default": old, "fitted": new}

    def chosen(self, config: Config) -> list[Config]:
        """Return case and algorithm for each case."""
        cases = range(len(self._algorithms.cases))
        return [self._algorithms.choice(case, self._constants[config[0]]) for case in cases]

    def prepare(self, config: Config) -> Callable[[], object]:
        calls = [self._algorithms.prepare(each) for each in self.chosen(config)]

        def run() -> None:
            for call in calls:
                call()

        return run


def fit_rates(task: AlgorithmTask, seconds: Mapping[Config, float]) -> Encoding:
    """Fit the rates of the cost model: least squares of relative errors, without negative times.

    Args:
        task: the task.
        seconds: measured seconds by configuration.
    """
    names = (*RATES, *STARTS)
    rows = []
    for (number, algorithm), took in seconds.items():
        work = dict(terms(*task.cases[number], _ITERATIONS)[algorithm])
        row = [work.get(name, 0.0) for name in RATES] + [float(name == f"start_{algorithm}") for name in STARTS]
        rows.append([each / (1e6 * took) for each in row])
    matrix = np.array(rows)
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    solution = _nonnegative(matrix / scale, np.ones(len(rows))) / scale
    found = dict(zip(names, map(float, solution), strict=True))
    old = task.constants.values()
    rates = {name: min(_FASTEST, max(1.0, 1.0 / found[name])) if found[name] > 0 else old[name] for name in RATES}
    return Encoding(**{**old, **rates, **{name: min(_LONGEST, found[name]) for name in STARTS}})


def _nonnegative(matrix: Vector, target: Vector) -> Vector:
    """Solve a least-squares problem for numbers that are not negative: those that would be are zero."""
    found = np.zeros(matrix.shape[1])
    active = np.flatnonzero(np.abs(matrix).sum(0) > 0)
    while len(active):
        solution = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
        if solution.min() >= 0:
            found[active] = solution
            break
        active = np.delete(active, solution.argmin())
    return found


def prediction_error(task: AlgorithmTask, seconds: Mapping[Config, float], constants: Encoding) -> float:
    """Return the median of the relative errors of predicted times.

    Args:
        task: the task.
        seconds: measured seconds by configuration.
        constants: the constants with which times are predicted.
    """
    return statistics.median(
        abs(1e-6 * predict(*task.cases[number], _ITERATIONS, constants)[algorithm] / took - 1)
        for (number, algorithm), took in seconds.items()
    )
