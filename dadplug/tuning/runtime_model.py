"""Learned model of run time: ridge regression and boosted stumps, on what an analytic cost leaves unexplained."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from .task import Config, Task, Vector

_RIDGE = 0.1
_STUMPS = 40
_SHRINKAGE = 0.3
_FEW = 8  # measurements below which there are no stumps
_TIMID = 0.02  # logarithm of the seconds that a configuration far from all measured ones is supposed to save


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
        inputs = np.stack([self._features(config) for config in measured])
        self._inputs = inputs
        self._mean, spread = inputs.mean(0), inputs.std(0)
        self._spread = np.where(spread > 0, spread, 1.0)
        priors = np.array([self._prior(config) for config in measured])
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
        inputs = np.stack([self._features(config) for config in configs])
        priors = np.array([self._prior(config) for config in configs])
        found: Vector = self._terms(inputs, priors) @ self._weights + priors
        for feature, threshold, below, above in self._stumps:
            found += np.where(inputs[:, feature] <= threshold, below, above)
        if explore:
            gaps = (inputs[:, None] - self._inputs[None]) / self._spread
            found -= explore * _TIMID * np.sqrt((gaps**2).sum(2)).min(1)
        return found

    def _features(self, config: Config) -> Vector:
        if config not in self._known:
            self._known[config] = self._task.space.features(config), float(np.log(self._task.prior(config)))
        return self._known[config][0]

    def _prior(self, config: Config) -> float:
        self._features(config)
        return self._known[config][1]

    def _terms(self, inputs: Vector, priors: Vector) -> Vector:
        """Return 1, the analytic cost, which may be wrong, the features, their squares and products."""
        scaled = (inputs - self._mean) / self._spread
        first, second = np.triu_indices(scaled.shape[1])
        own = np.stack([np.ones(len(scaled)), priors - self._mean_prior], axis=1)
        return np.concatenate([own, scaled, 0.5 * scaled[:, first] * scaled[:, second]], axis=1)

    def _boost(self, inputs: Vector, rest: Vector) -> None:
        """Add stumps, each of which explains most of what those before leave."""
        rest = rest.copy()
        cuts = []
        for feature in range(inputs.shape[1]):
            values = np.unique(inputs[:, feature])
            cuts += [(feature, (low + high) / 2) for low, high in itertools.pairwise(values)]
        for _ in range(_STUMPS if cuts else 0):
            best: tuple[float, int, float, float, float] | None = None
            for feature, threshold in cuts:
                low = inputs[:, feature] <= threshold
                # One more observation of zero on each side keeps single measurements from being copied.
                below, above = rest[low].sum() / (low.sum() + 1), rest[~low].sum() / ((~low).sum() + 1)
                gain = below * rest[low].sum() + above * rest[~low].sum()
                if best is None or gain > best[0]:
                    best = float(gain), feature, float(threshold), float(below), float(above)
            assert best is not None
            _, chosen, cut, left, right = best
            rest -= _SHRINKAGE * np.where(inputs[:, chosen] <= cut, left, right)
            self._stumps.append((chosen, cut, _SHRINKAGE * left, _SHRINKAGE * right))
