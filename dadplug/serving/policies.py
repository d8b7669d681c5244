"""Policies that select the models of a request, and learn from feedback: fixed, Exp3 and Exp4.

With K models, and losses l in [0, 1]:

- Exp3.S (Auer, Cesa-Bianchi, Freund, Schapire, SIAM J. Comput. 32, 2002, section 8) runs one model, drawn with
  p_i = (1 - gamma) w_i / W + gamma / K. Feedback on model i: x = (1 - l) / p_i, w_i <- w_i exp(gamma x / K); then each
  weight gains ``share`` e / K of their sum W, so that a model that has become better is found again.
- Exp4 as Clipper uses it runs all models, and each model is one expert: w_i <- w_i exp(-eta l_i). Then each weight
  becomes (1 - share) w_i + share W / K (fixed share, Herbster and Warmuth, 1998).

Weights are kept for each context, such as a site, and are uniform in a context without feedback.

A task is the meaning of outputs: the answer of several models, and a model's loss by feedback. Predictions wait for it
in a `FeedbackJournal`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import FeedbackError, ModelError
from ..support.registry import Registry
from ..support.signature import number

_SMALLEST = 1e-300  # a weight never becomes zero
_check_share = number("a number from 0 up to, but not, 1", lambda value: 0 <= value < 1)


class Choice(NamedTuple):
    """Models of one request.

    Attributes:
        models: names of the models to run.
        weights: weight of each model in the answer, with sum 1 over all models.
        probability: probability with which the model was drawn.
    """

    models: tuple[str, ...]
    weights: dict[str, float]
    probability: float = 1.0


class Policy:
    """Base of the policies: weights by context.

    Attributes:
        models: names of the models, set by `bind`.
    """

    def __init__(self) -> None:
        self.models: tuple[str, ...] = ()
        self._weights: dict[str, dict[str, float]] = {}

    def bind(self, models: Sequence[str]) -> None:
        """Set the models; weights of former models are dropped.

        Args:
            models: names of the models.
        """
        self.models = tuple(models)
        self._weights = {}

    def weights(self, context: str) -> dict[str, float]:
        """Return the weights of a context by model, with sum 1.

        Args:
            context: the context.
        """
        return dict(self._weights.get(context) or dict.fromkeys(self.models, 1.0 / len(self.models)))

    def contexts(self) -> list[str]:
        """Return the contexts that have had feedback."""
        return list(self._weights)

    def has_room(self, context: str, most: int) -> bool:
        """Return whether a context has weights, or can have some.

        Args:
            context: the context.
            most: largest number of contexts with weights.
        """
        return context in self._weights or len(self._weights) < most

    def choose(self, context: str) -> Choice:
        """Return the models of a request.

        Args:
            context: its context.
        """
        raise NotImplementedError

    def learn(self, context: str, choice: Choice, losses: Mapping[str, float]) -> None:
        """Learn from feedback.

        Args:
            context: context of the request.
            choice: its choice.
            losses: loss in [0, 1] of each model that ran; 1 for one that failed.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the weights as plain values."""
        return {"policy": type(self).__name__, "models": list(self.models), "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the weights.

        Args:
            state: result of `state_dict`.

        Raises:
            ValueError: if it is of another policy or other models, or damaged; nothing has changed then.
        """
        try:
            kind, models, weights = state["policy"], state["models"], state["weights"]
            if kind != type(self).__name__ or sorted(models) != sorted(self.models):
                raise ValueError(
                    f"the weights are of {kind} with the models {', '.join(models)}; these are {type(self).__name__} "
                    f"with {', '.join(self.models)}"
                )
            loaded = {
                str(context): {name: float(values[name]) for name in self.models} for context, values in weights.items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the saved weights are damaged: {type(error).__name__}: {error}") from error
        if not all(math.isfinite(value) and value > 0 for values in loaded.values() for value in values.values()):
            raise ValueError("the saved weights are damaged: a weight is not positive")
        self._weights = {context: _normalised(values) for context, values in loaded.items()}


POLICIES: Registry[str, type[Policy]] = Registry("policy")


@POLICIES.register("fixed")
class Fixed(Policy):
    """The same model for all requests.

    Args:
        model: its name; None for the first.
    """

    def __init__(self, model: str | None = None) -> None:
        super().__init__()
        self._model = model

    def bind(self, models: Sequence[str]) -> None:
        """Set the models; see `Policy.bind`.

        Args:
            models: names of the models.

        Raises:
            ValueError: if the model is not one of them.
        """
        if self._model is not None and self._model not in models:
            raise ValueError(f"unknown model {self._model!r}; valid ones are {', '.join(models)}")
        super().bind(models)

    def weights(self, context: str) -> dict[str, float]:
        """Return weight 1 for the model; see `Policy.weights`.

        Args:
            context: the context.
        """
        chosen = self._model or self.models[0]
        return {name: float(name == chosen) for name in self.models}

    def choose(self, context: str) -> Choice:
        """Return the model; see `Policy.choose`.

        Args:
            context: the context.
        """
        return Choice((self._model or self.models[0],), self.weights(context))

    def learn(self, context: str, choice: Choice, losses: Mapping[str, float]) -> None:
        """Do nothing; see `Policy.learn`.

        Args:
            context: the context.
            choice: the choice.
            losses: the losses.
        """


@POLICIES.register("exp3")
class Exp3(Policy):
    """One model for each request, drawn by its weight (Exp3.S).

    Args:
        gamma: share of the requests that try models uniformly at random, and the rate of learning, in (0, 1].
        share: part of the weights that is spread over all models at each feedback; 0 for Exp3 without shares.
        seed: seed of the draws; None for an arbitrary one.

    Raises:
        ValueError: if a value is out of range.
    """

    def __init__(self, gamma: float = 0.1, share: float = 1e-3, seed: int | None = None) -> None:
        super().__init__()
        number("a number above 0 and up to 1", lambda value: 0 < value <= 1)("gamma", gamma)
        _check_share("share", share)
        self._gamma, self._share, self._random = gamma, share, random.Random(seed)

    def choose(self, context: str) -> Choice:
        """Draw a model; see `Policy.choose`.

        Args:
            context: the context.
        """
        weights = self.weights(context)
        drawn = {name: (1 - self._gamma) * weights[name] + self._gamma / len(weights) for name in weights}
        (name,) = self._random.choices(list(drawn), list(drawn.values()))
        return Choice((name,), weights, drawn[name])

    def learn(self, context: str, choice: Choice, losses: Mapping[str, float]) -> None:
        """Raise the weight of the model by its reward; see `Policy.learn`.

        Args:
            context: the context.
            choice: the choice.
            losses: the loss of its model.
        """
        weights, k = self.weights(context), len(self.models)
        ((name, loss),) = losses.items()
        shared = math.e * self._share / k  # of W, which is 1 before the update
        weights[name] *= math.exp(self._gamma * (1 - loss) / choice.probability / k)
        self._weights[context] = _normalised({each: value + shared for each, value in weights.items()})


@POLICIES.register("exp4")
class Exp4(Policy):
    """All models for each request, combined by their weights.

    Args:
        eta: rate of learning.
        share: part of the weights that is spread over all models at each feedback.

    Raises:
        ValueError: if a value is out of range.
    """

    def __init__(self, eta: float = 0.3, share: float = 1e-3) -> None:
        super().__init__()
        number("a positive number", lambda value: 0 < value < math.inf)("eta", eta)
        _check_share("share", share)
        self._eta, self._share = eta, share

    def choose(self, context: str) -> Choice:
        """Return all models; see `Policy.choose`.

        Args:
            context: the context.
        """
        return Choice(self.models, self.weights(context))

    def learn(self, context: str, choice: Choice, losses: Mapping[str, float]) -> None:
        """Lower the weights of models by their losses; see `Policy.learn`.

        Args:
            context: the context.
            choice: the choice.
            losses: the losses.
        """
        weights = self.weights(context)
        for name, loss in losses.items():
            weights[name] *= math.exp(-self._eta * loss)
        weights, shared = _normalised(weights), self._share / len(weights)
        self._weights[context] = {name: (1 - self._share) * value + shared for name, value in weights.items()}


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: max(value / total, _SMALLEST) for name, value in weights.items()}


def policy_of(given: str | Policy) -> Policy:
    """Return a policy by its name, or the one that is given.

    Raises:
        ValueError: if no policy has this name.
    """
    return POLICIES[given]() if isinstance(given, str) else given


# Tasks and feedback

Array = np.ndarray[Any, Any]
Combined = tuple[Array, int | None, str, float]  # output, label, model and confidence, as in a `Prediction`


TASKS: Registry[str, type[Task]] = Registry("task")


@TASKS.register("classification")
class Classification:
    """Outputs are scores of classes; the class with the largest score is a model's vote."""

    def keep(self, output: Array) -> tuple[int, int]:
        """Return what is kept of an output until feedback: the class, and the number of classes.

        Raises:
            ModelError: if the output is not a score for each class.
        """
        if output.size < 2:
            raise ModelError("the model returns one number and no scores of classes; use task='regression'")
        if output.ndim > 1:  # where no input_shape is known, a batch passes for one input
            raise ModelError(
                f"the model returns numbers of shape {output.shape} for one input, and not one score for each class. "
                "Pass the samples of a batch one by one, with input_shape= a batch is refused; or use task='regression'"
            )
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


@TASKS.register("regression")
class Regression:
    """Outputs are numbers; the answer is their weighted mean.

    Args:
        scale: error that counts as the largest loss, 1.
    """

    def __init__(self, scale: float = 1.0) -> None:
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
        if outputs[model].dtype.kind == "f":  # the mean of integers may be a fraction
            mean = np.asarray(mean).astype(outputs[model].dtype)
        return np.asarray(mean), None, model, 1.0 - spread

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
        except (TypeError, ValueError, OverflowError):
            wanted = [math.nan]
        if len(wanted) != kept.size or not all(map(math.isfinite, wanted)):
            raise FeedbackError(f"feedback has to be {kept.size} finite numbers, not {y!r:.40}", status=422)
        return self._distance(kept.ravel(), np.array(wanted))

    def _distance(self, output: Array, other: Array) -> float:
        return min(1.0, float(np.abs(output - other).mean()) / self._scale)


Task = Classification | Regression


def task_of(name: str, scale: float) -> Task:
    """Return a task by its name.

    Raises:
        ValueError: if there is none of this name.
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
