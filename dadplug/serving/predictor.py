"""Predictor: one interface in front of several models, with cache, batches, selection and feedback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FeedbackError, InputError, ModelError, ServingError
from . import weights_file
from .backend_factory import backend_of
from .batch_limit import BatchLimit
from .cache import KnownInput, PredictionCache, digest_of
from .call import Call, Prediction, Recalled, most_telling
from .feedback import FeedbackJournal, Record, plain
from .metrics import Metrics, gauges_of
from .options import ServingOptions
from .policies import Choice, policy_of
from .reloading import FileWatcher
from .schema import Schema, merged
from .served_model import ServedModel
from .tasks import Kept, task_of
from .weights_file import WeightsFile

_GOAL = 0.8  # of slo: batches aim lower, so that the spread of latencies stays below it
_POLL = 0.01  # seconds between two looks for the first answer, once the goal has passed


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
        self._weights_file = WeightsFile(self.options.state, self.load_state_dict, self.state_dict)
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
        body: bytes | None = None,
        choice: Choice | None = None,
    ) -> Call:
        """Begin a prediction. The caller has to call `Call.expire` when its time is over.

        Args:
            x: as for `predict`.
            done: called once with the answer or an error, perhaps in another thread or before this returns.
            context: as for `predict`.
            timeout: as for `predict`.
            arrived: time of its arrival in seconds of `time.monotonic`; None for now.
            body: digest of all that the input and the context were read from, for `recall`; None to forget it.
            choice: models that `recall` has chosen for this request; None to choose them now.

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
        if choice is None:
            with self._lock:
                choice = self._policy.choose(key)

        def finished(answer: Prediction | ServingError) -> None:
            status = answer.status if isinstance(answer, ServingError) else 200
            self.metrics.request(status, time.monotonic() - arrived)
            done(answer)

        deadline = arrived + (self.options.longest if timeout is None else timeout)
        straggling = deadline if len(choice.models) == 1 else min(deadline, arrived + self.options.slo)
        call = Call(key, choice, arrived, straggling, deadline, self._kept_of, self._finish, finished)
        digest = digest_of(x) if self._cache is not None else b""
        hits = [self._models[name].request(x, digest, arrived, deadline, call.receive) for name in choice.models]
        if body is not None and all(hits) and call.answered and not call.errors:
            self._learn_body(body, KnownInput(key, digest, x.dtype.str, x.shape), call)
        return call

    def _learn_body(self, body: bytes, known: KnownInput, call: Call) -> None:
        """Remember a request that was answered from the cache."""
        assert self._cache is not None
        versions = [(name, self._models[name].version) for name in call.choice.models]
        self._cache.learn(body, known, [(known.key(name, version), call.kept[name]) for name, version in versions])

    @property
    def recalls(self) -> bool:
        """Whether `recall` can find requests: there is a cache."""
        return self._cache is not None

    def recall(
        self, body: bytes, render: Callable[[np.ndarray[Any, Any]], bytes], arrived: float
    ) -> Recalled | Choice | None:
        """Answer a request from the cache by the digest of its bytes, as `submit` would, without reading its input.

        Args:
            body: the digest, as it was given to `submit` for an equal request.
            render: returns an output as text, which is kept in the cache.
            arrived: time of its arrival.

        Returns:
            The answer; the models that were chosen, for `submit`, if an output is missing; None for an unknown request.
        """
        known = None if self._cache is None else self._cache.known(body)
        if self._cache is None or known is None:
            return None
        with self._lock:
            choice = self._policy.choose(known.context)
        keys = [known.key(name, self._models[name].version) for name in choice.models]
        entries = self._cache.recall(keys)
        if entries is None:
            return choice
        outputs = {name: entry.output for name, entry in zip(choice.models, entries, strict=True)}
        kept = {name: entry.kept or () for name, entry in zip(choice.models, entries, strict=True)}
        try:
            prediction = self._predicted(known.context, choice, outputs, kept)
        except ServingError:  # outputs of different versions may not fit
            return choice
        for _ in keys:
            self.metrics.lookup(True)
        self.metrics.request(200, time.monotonic() - arrived)
        for key, entry in zip(keys, entries, strict=True):
            if entry.output is prediction.output:
                if entry.text is None:
                    self._cache.keep_text(key, render(entry.output))
                return Recalled(prediction, entry.text or render(entry.output))
        return Recalled(prediction, render(prediction.output))

    def _context(self, given: str | None) -> str:
        if self.options.context is None:
            if given is not None:
                raise InputError("these models are served without contexts")
            return ""
        if not isinstance(given, str) or not given or len(given) > 200:
            raise InputError(f"the request needs {self.options.context!r}, a text of 1 to 200 characters")
        return given

    def _kept_of(self, model: str, output: np.ndarray[Any, Any]) -> Kept:
        """Return what is kept of an output until feedback.

        Raises:
            ModelError: if the output is no answer.
        """
        if output.dtype.kind == "f" and np.isnan(output).any():
            raise ModelError(f"model {model!r} returned NaN")
        return self._task.digest(output)

    def _finish(self, call: Call) -> Prediction:
        """Make the answer of a call that has ended."""
        valid = {name: call.outputs[name] for name in call.choice.models if name in call.outputs}  # not as they came
        if not valid:
            self._learn_failure(call)
            raise most_telling(call.errors)
        return self._predicted(call.context, call.choice, valid, call.kept)

    def _predicted(
        self,
        context: str,
        choice: Choice,
        outputs: Mapping[str, np.ndarray[Any, Any]],
        kept: Mapping[str, Kept],
    ) -> Prediction:
        combined = self._task.combine(outputs, choice.weights, kept)
        record = Record(context, choice, {name: kept.get(name) for name in choice.models})
        number = self._journal.add(record, time.monotonic())
        output = combined.output
        return Prediction(number, output, combined.label, combined.model, combined.confidence, tuple(outputs))

    def _learn_failure(self, call: Call) -> None:
        """Count the failure of a model that was drawn as its largest loss: no feedback will come."""
        if len(call.choice.models) == 1 and not isinstance(most_telling(call.errors), InputError):
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
            y = plain(y)
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
        self._weights_file.write_now_and_then()

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
        weights_file.write(path, self.state_dict())

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
        return self.metrics.text(gauges_of(self.status()))

    def close(self) -> None:
        """End the models' processes, and write the weights if the options name a file."""
        if self._watcher is not None:
            self._watcher.close()
        for model in self._models.values():
            model.stop()
        self._weights_file.write()

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
