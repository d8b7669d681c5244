"""Meaning of outputs: the answer of several models, its confidence, and a model's loss by feedback."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import FeedbackError, ModelError
from ..registry import Registry

Array = np.ndarray[Any, Any]
Kept = tuple[float, ...]  # what is kept of an output until feedback, see `digest`


class Combined(NamedTuple):
    """Answer of the models.

    Attributes:
        output: the output.
        model: name of the model that it is from, or of the one with the largest weight.
        confidence: share of the weights of the models that support the answer, from 0 to 1.
        label: the class; None for regression.
    """

    output: Array
    model: str
    confidence: float
    label: int | None


class Classification:
    """Outputs are scores of classes; the class with the largest score is a model's vote."""

    def combine(self, outputs: Mapping[str, Array], weights: Mapping[str, float], kept: Mapping[str, Kept]) -> Combined:
        """Return the weighted vote of the models, with the scores of the heaviest model that voted for it.

        Args:
            outputs: outputs by model, at least one.
            weights: weights by model.
            kept: their digests by model. Votes are taken from them, since `argmax` lets other threads run in between.
        """
        votes = {name: int(kept[name][0]) for name in outputs}
        if len(outputs) == 1:
            ((model, output),) = outputs.items()
            return Combined(output, model, 1.0, votes[model])
        totals: dict[int, float] = {}
        for name, vote in votes.items():
            totals[vote] = totals.get(vote, 0.0) + weights[name]
        winner = max(totals, key=lambda each: totals[each])
        model = max((name for name in votes if votes[name] == winner), key=lambda name: weights[name])
        everything = sum(totals.values())
        confidence = totals[winner] / everything if everything > 0 else 1.0
        return Combined(outputs[model], model, min(1.0, confidence), winner)

    def digest(self, output: Array) -> tuple[float, ...]:
        """Return what has to be kept of an output until feedback: the class, and the number of classes."""
        return (float(_vote(output)), float(output.size))

    def loss(self, kept: tuple[float, ...], y: Any) -> float:
        """Return 0 for the right class and 1 for another.

        Args:
            kept: result of `digest`.
            y: the class.

        Raises:
            FeedbackError: if it is no class.
        """
        if isinstance(y, bool) or not isinstance(y, (int, np.integer)) or not 0 <= y < kept[1]:
            raise FeedbackError(f"feedback has to be a class from 0 to {int(kept[1]) - 1}, not {y!r:.40}", status=422)
        return float(y != kept[0])


class Regression:
    """Outputs are numbers; the answer is their weighted mean.

    Args:
        scale: error that counts as the largest loss, 1.

    Raises:
        ValueError: if the scale is not positive.
    """

    def __init__(self, scale: float = 1.0) -> None:
        if not scale > 0:
            raise ValueError(f"scale has to be positive, not {scale}")
        self._scale = scale

    def combine(self, outputs: Mapping[str, Array], weights: Mapping[str, float], kept: Mapping[str, Kept]) -> Combined:
        """Return the weighted mean; its confidence is 1 - (weighted mean of the models' distances to it) / scale.

        Args:
            outputs: outputs by model, at least one.
            weights: weights by model.
            kept: their digests by model; not used.
        """
        if len({output.shape for output in outputs.values()}) > 1:
            raise ModelError(f"the models return different shapes: {[o.shape for o in outputs.values()]}")
        total = sum(weights[name] for name in outputs)
        if total <= 0:
            weights, total = dict.fromkeys(outputs, 1.0), float(len(outputs))
        model = max(outputs, key=lambda name: weights[name])
        if len(outputs) == 1:
            return Combined(outputs[model], model, 1.0, None)
        shares = [weights[name] / total for name in outputs]
        mean = np.average(np.stack(list(outputs.values())).astype(np.float64), axis=0, weights=shares)
        distances = [self._distance(output, mean) for output in outputs.values()]
        spread = sum(share * distance for share, distance in zip(shares, distances, strict=True))
        return Combined(np.asarray(mean).astype(outputs[model].dtype), model, 1.0 - spread, None)

    def digest(self, output: Array) -> tuple[float, ...]:
        """Return what has to be kept of an output until feedback: its numbers."""
        return tuple(output.astype(np.float64).ravel().tolist())

    def loss(self, kept: tuple[float, ...], y: Any) -> float:
        """Return the mean absolute error as a part of the scale, at most 1.

        Args:
            kept: result of `digest`.
            y: the right number, or as many as the output has.

        Raises:
            FeedbackError: if these are no such numbers.
        """
        try:
            wanted = [float(each) for each in np.ravel(y)]
        except (TypeError, ValueError):
            wanted = [math.nan]
        if len(wanted) != len(kept) or not all(map(math.isfinite, wanted)):
            raise FeedbackError(f"feedback has to be {len(kept)} finite numbers, not {y!r:.40}", status=422)
        return self._distance(np.array(kept), np.array(wanted))

    def _distance(self, output: Array, other: Array) -> float:
        return min(1.0, float(np.abs(output - other).mean()) / self._scale)


Task = Classification | Regression
TASKS: Registry[str, type[Any]] = Registry("task")
TASKS.register("classification")(Classification)
TASKS.register("regression")(Regression)


def task_of(name: str, scale: float) -> Task:
    """Return a task by its name.

    Raises:
        ValueError: if there is none of this name, or the scale is not positive.
    """
    kind = TASKS[name]
    return Regression(scale) if kind is Regression else Classification()


def _vote(output: Array) -> int:
    if output.size < 2:
        raise ModelError("the model returns one number and no scores of classes; use task='regression'")
    return int(output.argmax())
