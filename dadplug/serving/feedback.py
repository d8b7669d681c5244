"""Meaning of outputs: the answer of several models, a model's loss by feedback, and predictions that wait for it."""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import FeedbackError, ModelError
from ..registry import Registry
from .policies import Choice

Array = np.ndarray[Any, Any]
Combined = tuple[Array, int | None, str, float]  # output, label, model and confidence, as in a `Prediction`


class Classification:
    """Outputs are scores of classes; the class with the largest score is a model's vote."""

    def keep(self, output: Array) -> tuple[int, int]:
        """Return what is kept of an output until feedback: the class, and the number of classes.

        Raises:
            ModelError: if the output has no scores.
        """
        if output.size < 2:
            raise ModelError("the model returns one number and no scores of classes; use task='regression'")
        return int(output.argmax()), output.size

    def combine(self, outputs: Mapping[str, Array], weights: Mapping[str, float], kept: Mapping[str, Any]) -> Combined:
        """Return the weighted vote of the models, with the scores of the heaviest model that voted for it.

        Its confidence is the share of the weights of the models that voted for it.

        Args:
            outputs: outputs by model, at least one.
            weights: weights by model.
            kept: what is kept of them. Votes are taken from it, since `argmax` lets other threads run in between.
        """
        votes = {name: kept[name][0] for name in outputs}
        if len(outputs) == 1:
            ((model, output),) = outputs.items()
            return output, votes[model], model, 1.0
        totals: dict[int, float] = {}
        for name, vote in votes.items():
            totals[vote] = totals.get(vote, 0.0) + weights[name]
        winner = max(totals, key=lambda each: totals[each])
        model = max((name for name in votes if votes[name] == winner), key=lambda name: weights[name])
        everything = sum(totals.values())
        confidence = totals[winner] / everything if everything > 0 else 1.0
        return outputs[model], winner, model, min(1.0, confidence)

    def loss(self, kept: tuple[int, int], y: Any) -> float:
        """Return 0 for the right class and 1 for another.

        Args:
            kept: result of `keep`.
            y: the class.

        Raises:
            FeedbackError: if it is no class.
        """
        if isinstance(y, bool) or not isinstance(y, (int, np.integer)) or not 0 <= y < kept[1]:
            raise FeedbackError(f"feedback has to be a class from 0 to {kept[1] - 1}, not {y!r:.40}", status=422)
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

    def keep(self, output: Array) -> Array:
        """Return what is kept of an output until feedback: its numbers."""
        return output

    def combine(self, outputs: Mapping[str, Array], weights: Mapping[str, float], kept: Mapping[str, Any]) -> Combined:
        """Return the weighted mean; its confidence is 1 - (weighted mean of the models' distances to it) / scale.

        Args:
            outputs: outputs by model, at least one.
            weights: weights by model.
            kept: what is kept of them; not used.
        """
        if len({output.shape for output in outputs.values()}) > 1:
            raise ModelError(f"the models return different shapes: {[o.shape for o in outputs.values()]}")
        total = sum(weights[name] for name in outputs)
        if total <= 0:
            weights, total = dict.fromkeys(outputs, 1.0), float(len(outputs))
        model = max(outputs, key=lambda name: weights[name])
        if len(outputs) == 1:
            return outputs[model], None, model, 1.0
        shares = [weights[name] / total for name in outputs]
        mean = np.average(np.stack(list(outputs.values())).astype(np.float64), axis=0, weights=shares)
        distances = [self._distance(output, mean) for output in outputs.values()]
        spread = sum(share * distance for share, distance in zip(shares, distances, strict=True))
        return np.asarray(mean).astype(outputs[model].dtype), None, model, 1.0 - spread

    def loss(self, kept: Array, y: Any) -> float:
        """Return the mean absolute error as a part of the scale, at most 1.

        Args:
            kept: result of `keep`.
            y: the right number, or as many as the output has.

        Raises:
            FeedbackError: if these are no such numbers.
        """
        try:
            wanted = [float(each) for each in np.ravel(y)]
        except (TypeError, ValueError):
            wanted = [math.nan]
        if len(wanted) != kept.size or not all(map(math.isfinite, wanted)):
            raise FeedbackError(f"feedback has to be {kept.size} finite numbers, not {y!r:.40}", status=422)
        return self._distance(kept.ravel(), np.array(wanted))

    def _distance(self, output: Array, other: Array) -> float:
        return min(1.0, float(np.abs(output - other).mean()) / self._scale)


Task = Classification | Regression
TASKS: Registry[str, type[Task]] = Registry("task")
TASKS.register("classification")(Classification)
TASKS.register("regression")(Regression)


def task_of(name: str, scale: float) -> Task:
    """Return a task by its name.

    Raises:
        ValueError: if there is none of this name, or the scale is not positive.
    """
    return Regression(scale) if TASKS[name] is Regression else Classification()


class Record(NamedTuple):
    """Part of a prediction that is kept until its feedback.

    Attributes:
        context: its context.
        choice: the models that ran.
        kept: what the task keeps of each model's output; None for a model that failed.
    """

    context: str
    choice: Choice
    kept: dict[str, Any]


class FeedbackJournal:
    """Records by id.

    Ids cannot be guessed, and contain the time, so that late feedback is told from feedback with an unknown id.

    Args:
        seconds: time limit.
        most: largest number of records; beyond it the oldest are dropped, as if they were late.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._records: OrderedDict[str, tuple[float, Record | None]] = OrderedDict()
        self._issued = secrets.token_hex(4)  # of this server: an id of another one is unknown
        self._secret, self._number = secrets.token_bytes(32), itertools.count()
        self._dropped = float("-inf")  # when the last dropped record was made
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record, now: float) -> str:
        """Keep a record, and return its id.

        Args:
            record: the record.
            now: the time in seconds.
        """
        # A keyed hash of a counter, since a call of the system for each id would let other threads run in between.
        number = next(self._number).to_bytes(8, "little")
        unguessable = hashlib.blake2b(number, key=self._secret, digest_size=8).hexdigest()
        key = f"{self._issued}{int(now * 1000):012x}{unguessable}"
        with self._lock:
            self._records[key] = (now, record)
            while self._records and (
                len(self._records) > self._most or next(iter(self._records.values()))[0] + self._seconds <= now
            ):
                self._dropped = self._records.popitem(last=False)[1][0]
        return key

    def find(self, key: Any, now: float) -> Record:
        """Return the record of an id.

        Raises:
            FeedbackError: if it is unknown, late or has had feedback.
        """
        with self._lock:
            made, record = self._records.get(key, (None, None)) if isinstance(key, str) else (None, None)
        if made is None and not self._was_dropped(key):
            raise FeedbackError(f"there is no prediction with the id {key!r:.60}", status=404)
        if made is None or made + self._seconds <= now:
            raise FeedbackError(f"feedback came later than {self._seconds:g} s after prediction {key}", status=410)
        if record is None:
            raise FeedbackError(f"prediction {key} has had its feedback", status=409)
        return record

    def close(self, key: str) -> bool:
        """Mark a record as answered; return whether it was open, which is true for one caller only."""
        with self._lock:
            made, record = self._records.get(key, (0.0, None))
            if record is None:
                return False
            self._records[key] = (made, None)
            return True

    def _was_dropped(self, key: Any) -> bool:
        """Return whether an id reads like one that this server has issued and dropped since."""
        if not isinstance(key, str) or not key.startswith(self._issued) or len(key) != len(self._issued) + 28:
            return False
        try:
            return int(key[len(self._issued) : len(self._issued) + 12], 16) / 1000 <= self._dropped
        except ValueError:
            return False
