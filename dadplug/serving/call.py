"""One prediction in progress: the models that were asked, and what has come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, ModelError, ServingError, UnavailableError
from .policies import Choice
from .tasks import Kept
from .ticket import Result


class Prediction(NamedTuple):
    """Answer to a request.

    Attributes:
        id: id for feedback.
        output: the model's output, or the weighted mean of several; read-only.
        label: the class; None for regression.
        model: name of the model that the answer is from; of several, the one with the largest weight for it.
        confidence: share of the models' weights that supports the answer, from 0 to 1; 1 for one model.
        models: names of the models that have answered.
    """

    id: str
    output: np.ndarray[Any, Any]
    label: int | None
    model: str
    confidence: float
    models: tuple[str, ...]


class Recalled(NamedTuple):
    """Answer from the cache, and its output as text."""

    prediction: Prediction
    output: bytes


class Call:
    """A prediction in progress. Its end is reported once, from any thread.

    Args:
        context: its context.
        choice: the models that are asked.
        arrived: time of its arrival.
        straggling: time from which the first answers suffice.
        deadline: time at which it fails.
        check: returns what is kept of a model's output, by the model's name and the output; raises `ModelError` if the
            output is no answer, which counts as a failure of the model.
        finish: makes the prediction from the call; called once.
        done: called once with the prediction or the error.

    Attributes:
        outputs: valid outputs by model.
        kept: what is kept of them until feedback.
        errors: failures by model.
        answered: whether it has ended with a prediction.
    """

    def __init__(
        self,
        context: str,
        choice: Choice,
        arrived: float,
        straggling: float,
        deadline: float,
        check: Callable[[str, np.ndarray[Any, Any]], Kept],
        finish: Callable[[Call], Prediction],
        done: Callable[[Prediction | ServingError], object],
    ) -> None:
        self.context, self.choice, self.arrived = context, choice, arrived
        self.straggling, self.deadline = straggling, deadline
        self.outputs: dict[str, np.ndarray[Any, Any]] = {}
        self.kept: dict[str, Kept] = {}
        self.errors: dict[str, Exception] = {}
        self._check, self._finish, self._done = check, finish, done
        self._lock = threading.Lock()
        self._ended = self.answered = False

    def receive(self, result: Result) -> None:
        """Take the result of a model; the last one ends the call."""
        name, output, error, kept = result.model, result.output, result.error, None
        if output is not None:
            try:
                kept = self._check(name, output)
            except Exception as failure:  # before `expire` can take it for an answer, and give up the others
                error = failure
        with self._lock:
            if self._ended:
                return
            if error is None:
                assert output is not None
                assert kept is not None
                self.outputs[name], self.kept[name] = output, kept
            else:
                self.errors[name] = error
            if len(self.outputs) + len(self.errors) < len(self.choice.models):
                return
            self._ended = True
        self._end()

    def expire(self, now: float) -> None:
        """End the call if its time is over: with the answers so far, or with an error."""
        with self._lock:
            if self._ended or now < (self.straggling if self.outputs else self.deadline):
                return
            self._ended = True
            late = UnavailableError("no model has answered before the deadline")
            for name in self.choice.models:
                if name not in self.outputs:
                    self.errors.setdefault(name, late)
        self._end()

    def _end(self) -> None:
        answer: Prediction | ServingError
        try:
            answer = self._finish(self)
            self.answered = True
        except ServingError as error:
            answer = error
        except Exception as error:  # an answer is reported in any case: somebody waits for it
            answer = ModelError(f"the outputs cannot be combined: {type(error).__name__}: {error}")
        self._done(answer)


def most_telling(errors: Mapping[str, Exception]) -> ServingError:
    """Return the error to report of several: that of an input, else the first."""
    found = sorted(errors.values(), key=lambda error: not isinstance(error, InputError))
    return found[0] if isinstance(found[0], ServingError) else ModelError(f"{found[0]}")
