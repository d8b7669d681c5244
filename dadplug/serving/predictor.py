"""Predictor: one interface in front of several models, with cache, batches, selection and feedback."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from .backend_factory import backend_of
from .batch_limit import BatchLimit
from .cache import PredictionCache, digest_of
from .call import Call, Prediction
from .errors import FeedbackError, InputError, ModelError, ServingError
from .feedback import FeedbackJournal, Record
from .metrics import Metrics, label
from .options import ServingOptions
from .policies import policy_of
from .reloading import FileWatcher
from .schema import Schema, merged
from .served_model import ServedModel
from .tasks import task_of

_log = logging.getLogger("dadplug.serving")
_GOAL = 0.8  # of slo: batches aim lower, so that the spread of latencies stays below it
_POLL = 0.01  # seconds between two looks for the first answer, once the goal has passed
_SAVE_SECONDS = 5.0  # between two writes of the weights


class Predictor:
    """Models behind one interface.

    Each model that is given as a file runs in a process of its own, which is started again if it fails or hangs. A
    model that is given as an object runs in this process, in a thread.

    Args:
        models: by name, each a path, a `dadplug.serving.Model`, a `torch.nn.Module` or a function of arrays. The first
            is the one of the policy ``"fixed"``.
        options: fields of `ServingOptions`.

    Raises:
        ValueError: if an option is wrong, there is no model, or one cannot be loaded (`LoadError`).

    Example:
        >>> import torch
        >>> from dadplug.serving import Predictor
        >>> models = {"global": torch.nn.Linear(4, 3), "site0": torch.nn.Linear(4, 3)}
        >>> with Predictor(models, slo=0.05, policy="exp4", context="site") as predictor:
        ...     p = predictor.predict(torch.randn(4), context="site0")
        ...     predictor.feedback(p.id, 2)
        >>> p.model in models and 0 < p.confidence <= 1
        True
    """

    def __init__(self, models: Mapping[str, Any], **options: Any) -> None:
        self.options = ServingOptions(**options)
        if not models:
            raise ValueError("there is no model to serve")
        self._policy = policy_of(self.options.policy)
        self._policy.bind(list(models))
        self._task = task_of(self.options.task, self.options.scale)
        self._lock = threading.Lock()  # of the policy
        self._journal = FeedbackJournal(self.options.feedback_seconds, self.options.max_open)
        self.metrics = Metrics(self.options.slo)
        self._cache = PredictionCache(self.options.cache_bytes) if self.options.cache_bytes else None
        self._saved = -_SAVE_SECONDS
        self._load_weights()
        self._settings = {
            "hang_seconds": self.options.hang_seconds,
            "load_seconds": self.options.load_seconds,
            "threads": self.options.threads,
        }
        self._models = {name: self._served(name, model) for name, model in models.items()}
        self.schema = self._start()
        self._watcher = FileWatcher(models, self._reload) if self.options.reload else None

    def _served(self, name: str, model: Any) -> ServedModel:
        limit = BatchLimit(_GOAL * self.options.slo, self.options.max_batch)
        backend = backend_of(model, **self._settings)
        return ServedModel(name, backend, self._cache, self.metrics, limit, self.options.max_waiting)

    def _start(self) -> Schema:
        """Start all models side by side, and return their schema."""
        try:
            with ThreadPoolExecutor(len(self._models)) as pool:
                for started in [pool.submit(model.start) for model in self._models.values()]:
                    started.result()
            given = Schema(self.options.input_shape, self.options.dtype)
            return merged([given, *(model.backend.schema for model in self._models.values())])
        except BaseException:
            for model in self._models.values():
                model.stop()
            raise

    # Predictions

    def predict(self, x: Any, *, context: str | None = None, timeout: float | None = None) -> Prediction:
        """Return the answer to one input.

        Args:
            x: a tensor, an array or nested lists of numbers, without the dimension of the batch.
            context: context of the request, such as its site.
            timeout: seconds until it fails; None for the deadline of the options.

        Raises:
            InputError: if the input does not fit the schema, or the context is missing.
            UnavailableError: if no model has answered in time.
            ModelError: if the model raised an error.
        """
        ended = threading.Event()
        answers: list[Prediction | ServingError] = []

        def done(answer: Prediction | ServingError) -> None:
            answers.append(answer)
            ended.set()

        call = self.submit(x, done, context=context, timeout=timeout)
        until = call.straggling
        while not ended.wait(max(0.0, until - time.monotonic())):
            call.expire(time.monotonic())
            until = min(call.deadline, time.monotonic() + _POLL)  # the first answer suffices from now on
        (answer,) = answers
        if isinstance(answer, ServingError):
            raise answer
        return answer

    def submit(
        self,
        x: Any,
        done: Callable[[Prediction | ServingError], object],
        *,
        context: str | None = None,
        timeout: float | None = None,
        arrived: float | None = None,
    ) -> Call:
        """Begin a prediction. The caller has to call `Call.expire` when its time is over.

        Args:
            x: as for `predict`.
            done: called once with the answer or an error, perhaps in another thread or before this returns.
            context: as for `predict`.
            timeout: as for `predict`.
            arrived: time of its arrival in seconds of `time.monotonic`; None for now.

        Raises:
            InputError: if the input does not fit the schema, or the context is missing.
        """
        arrived = time.monotonic() if arrived is None else arrived
        try:
            key = self._context(context)
            x = self.schema.check(x)
        except InputError as error:
            self.metrics.request(error.status, time.monotonic() - arrived)
            raise
        with self._lock:
            choice = self._policy.choose(key)

        def finished(answer: Prediction | ServingError) -> None:
            status = answer.status if isinstance(answer, ServingError) else 200
            self.metrics.request(status, time.monotonic() - arrived)
            done(answer)

        deadline = arrived + (self.options.longest if timeout is None else timeout)
        straggling = deadline if len(choice.models) == 1 else min(deadline, arrived + self.options.slo)
        call = Call(key, choice, arrived, straggling, deadline, self._finish, finished)
        digest = digest_of(x) if self._cache is not None else b""
        for name in choice.models:
            self._models[name].request(x, digest, arrived, deadline, call.receive)
        return call

    def _context(self, given: str | None) -> str:
        if self.options.context is None:
            if given is not None:
                raise InputError("these models are served without contexts")
            return ""
        if not isinstance(given, str) or not given or len(given) > 200:
            raise InputError(f"the request needs {self.options.context!r}, a text of 1 to 200 characters")
        return given

    def _finish(self, call: Call) -> Prediction:
        """Make the answer of a call that has ended."""
        kept: dict[str, tuple[float, ...] | None] = dict.fromkeys(call.choice.models)
        valid: dict[str, np.ndarray[Any, Any]] = {}
        for name in call.choice.models:  # not in the order of their answers
            output = call.outputs.get(name)
            if output is None:
                continue
            try:
                if output.dtype.kind == "f" and np.isnan(output).any():
                    raise ModelError(f"model {name!r} returned NaN")
                kept[name] = self._task.digest(output)
                valid[name] = output
            except ModelError as error:
                call.errors[name] = error
        if not valid:
            self._learn_failure(call)
            raise _most_telling(call.errors)
        combined = self._task.combine(valid, call.choice.weights)
        number = self._journal.add(Record(call.context, call.choice, kept), time.monotonic())
        output = combined.output
        return Prediction(number, output, combined.label, combined.model, combined.confidence, tuple(valid))

    def _learn_failure(self, call: Call) -> None:
        """Count the failure of a model that was drawn as its largest loss: no feedback will come."""
        if len(call.choice.models) == 1 and not isinstance(_most_telling(call.errors), InputError):
            with self._lock:
                if self._policy.has_room(call.context, self.options.max_contexts):
                    self._policy.learn(call.context, call.choice, {call.choice.models[0]: 1.0})

    # Feedback

    def feedback(self, id: str, y: Any) -> None:
        """Report the right answer to a prediction.

        Args:
            id: id of the prediction.
            y: the class, or the numbers for regression.

        Raises:
            FeedbackError: if the id is unknown, late or has had feedback, or `y` is no valid answer; nothing has
                changed then.
        """
        try:
            record = self._journal.find(id, time.monotonic())
            y = _plain(y)
            losses = {name: 1.0 if kept is None else self._task.loss(kept, y) for name, kept in record.outputs.items()}
            with self._lock:
                if not self._policy.has_room(record.context, self.options.max_contexts):
                    raise FeedbackError(f"there are {self.options.max_contexts} contexts already", status=422)
                if not self._journal.close(id):
                    raise FeedbackError(f"prediction {id} has had its feedback", status=409)
                self._policy.learn(record.context, record.choice, losses)
                weights = self._policy.weights(record.context)
        except FeedbackError as error:
            self.metrics.feedback(error.status)
            raise
        self.metrics.feedback(200, record.context, weights)
        self._save_now_and_then()

    def weights(self, context: str | None = None) -> dict[str, float]:
        """Return the weights of the models in a context, with sum 1.

        Args:
            context: the context.
        """
        with self._lock:
            return self._policy.weights(context or "")

    def state_dict(self) -> dict[str, Any]:
        """Return the policy's weights as plain values."""
        with self._lock:
            copy: dict[str, Any] = json.loads(json.dumps(self._policy.state_dict()))
        return copy

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the policy's weights.

        Args:
            state: result of `state_dict`.

        Raises:
            ValueError: if it is of another policy or other models, or damaged; nothing has changed then.
        """
        with self._lock:
            self._policy.load_state_dict(state)

    def save(self, path: str | Path) -> None:
        """Write the policy's weights to a file, atomically.

        Args:
            path: the file.
        """
        path = Path(path)
        partial = path.with_name(f"{path.name}.{os.getpid()}.part")
        partial.write_text(json.dumps(self.state_dict()))
        os.replace(partial, path)

    def _load_weights(self) -> None:
        if self.options.state is None or not Path(self.options.state).exists():
            return
        try:
            self.load_state_dict(json.loads(Path(self.options.state).read_text()))
        except ValueError as error:
            raise ValueError(f"{self.options.state}: {error}") from error

    def _save_now_and_then(self) -> None:
        if self.options.state is not None and time.monotonic() - self._saved > _SAVE_SECONDS:
            self._saved = time.monotonic()
            with self._logged_errors():
                self.save(self.options.state)

    @contextlib.contextmanager
    def _logged_errors(self) -> Any:
        try:
            yield
        except OSError as error:
            _log.error("the weights cannot be written to %s: %s", self.options.state, error)

    # State

    def _reload(self, name: str, model: Any) -> None:
        """Load a model again; called when its file has changed."""
        backend = backend_of(model, **self._settings)
        backend.start()
        try:
            merged([self.schema, backend.schema])
        except ValueError:
            backend.stop()
            raise
        self._models[name].replace(backend)

    def status(self) -> dict[str, Any]:
        """Return the state of the models, the cache and the policy as plain values."""
        with self._lock:
            weights = {context: self._policy.weights(context) for context in self._policy.contexts()[:100]}
        cache = self._cache
        return {
            "slo": self.options.slo,
            "context": self.options.context,
            "models": {name: model.status() for name, model in self._models.items()},
            "weights": weights,
            "cache": None
            if cache is None
            else {
                "entries": len(cache),
                "bytes": cache.bytes,
                "hits": cache.hits,
                "joined": cache.joined,
                "misses": cache.misses,
            },
        }

    def prometheus(self) -> str:
        """Return all counters in Prometheus' text format."""
        status = self.status()
        models = status["models"]
        gauges: dict[str, dict[str, float]] = {
            name: {label(model=model): float(values[key]) for model, values in models.items()}
            for name, key in (("model_ready", "ready"), ("queue_length", "waiting"), ("batch_limit", "batch_limit"))
        }
        if self._cache is not None:
            gauges |= {f"cache_{key}_total": {"": status["cache"][key]} for key in ("hits", "joined", "misses")}
            gauges["cache_bytes"] = {"": self._cache.bytes}
        gauges["weight"] = {
            label(context=context, model=model): value
            for context, values in status["weights"].items()
            for model, value in values.items()
        }
        return self.metrics.text(gauges)

    def close(self) -> None:
        """End the models' processes, and write the weights if the options name a file."""
        if self._watcher is not None:
            self._watcher.close()
        for model in self._models.values():
            model.stop()
        if self.options.state is not None:
            with self._logged_errors():
                self.save(self.options.state)

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _most_telling(errors: Mapping[str, Exception]) -> ServingError:
    """Return the error to report of several: that of an input, else the first."""
    found = sorted(errors.values(), key=lambda error: not isinstance(error, InputError))
    return found[0] if isinstance(found[0], ServingError) else ModelError(f"{found[0]}")


def _plain(y: Any) -> Any:
    """Return the numbers of a tensor or an array; of one with a single number, that number."""
    if not hasattr(y, "tolist"):
        return y
    y = y.tolist()
    return y[0] if isinstance(y, list) and len(y) == 1 else y
