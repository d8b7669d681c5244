"""Predictor: one interface in front of several models, with cache, batches, selection and feedback."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import FeedbackError, InputError, ModelError, ServingError, UnavailableError
from ..support.files import write_file
from ..support.logs import get_logger
from ..support.prometheus import exposition
from ..support.signature import takes_keywords_of
from .backends import backend_of, stamp_of
from .cache import KnownInput, PredictionCache, Result, digest_of
from .options import Model, Schema, ServingOptions, check_models, merged
from .policies import Choice, FeedbackJournal, Record, policy_of, task_of
from .served_model import Metrics, ServedModel

_log = get_logger("dadplug.serving")
_POLL = 0.01  # seconds between two looks for the first answer, once the goal has passed
_STATE_SECONDS = 5.0  # between two writes of the weights after feedback
_FILES_SECONDS = 1.0  # between two looks at the models' files


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
        straggling: time from which the first answers suffice.
        deadline: time at which it fails.
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
        straggling: float,
        deadline: float,
        finish: Callable[[Call], Prediction],
        done: Callable[[Prediction | ServingError], object],
    ) -> None:
        self.context, self.choice = context, choice
        self.straggling, self.deadline = straggling, deadline
        self.outputs: dict[str, np.ndarray[Any, Any]] = {}
        self.kept: dict[str, Any] = {}
        self.errors: dict[str, Exception] = {}
        self._finish, self._done = finish, done
        self._lock = threading.Lock()
        self._ended = self.answered = False

    def receive(self, result: Result) -> None:
        """Take the result of a model; the last one ends the call."""
        with self._lock:
            if self._ended:
                return
            if result.output is not None:
                self.outputs[result.model], self.kept[result.model] = result.output, result.kept
            elif result.error is not None:
                self.errors[result.model] = result.error
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
        except Exception as error:  # a caller waits for the answer
            answer = ModelError(f"the outputs cannot be combined: {type(error).__name__}: {error}")
        self._done(answer)


class FileWatcher:
    """Thread that looks at the files of models, and loads a model again when its file has changed.

    A file counts as changed once two looks in a row have found it equal, so that one that is being written is left
    alone. A file that cannot be loaded is reported in the log, and the previous model is still served.

    Args:
        models: models by name; those without a file are left out.
        reload: loads a model again, called with its name and the model; raises an error if it cannot.
    """

    def __init__(self, models: Mapping[str, Any], reload: Callable[[str, Model], object]) -> None:
        self._models = {name: model for name, model in models.items() if isinstance(model, Model)}
        self._reload = reload
        self._loaded = {name: stamp_of(Path(model.path)) for name, model in self._models.items()}
        self._seen = dict(self._loaded)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dadplug-serving-files", daemon=True)
        if self._models:
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=150.0)

    def _watch(self) -> None:
        while not self._end.wait(_FILES_SECONDS):
            self.look()

    def look(self) -> None:
        """Look at all files once."""
        for name, model in self._models.items():
            stamp, before = stamp_of(Path(model.path)), self._seen[name]
            self._seen[name] = stamp
            if stamp is None or stamp != before or stamp == self._loaded[name]:
                continue
            self._loaded[name] = stamp
            try:
                self._reload(name, model)
            except Exception as error:
                text = "model %r cannot be loaded again from %s, still serving the previous version: %s"
                _log.error(text, name, model.path, error)


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

    @takes_keywords_of(ServingOptions)
    def __init__(self, models: Mapping[str, Any], **options: Any) -> None:
        self.options = ServingOptions.create(**options)
        check_models(models)
        self._policy = policy_of(self.options.policy)
        self._policy.bind(list(models))
        self._task = task_of(self.options.task, self.options.scale)
        self._lock = threading.Lock()  # of the policy
        self._journal = FeedbackJournal(self.options.feedback_seconds, self.options.max_open)
        self.metrics = Metrics(self.options.slo)
        self._cache = PredictionCache(self.options.cache_bytes)
        self._written = 0.0  # when the weights were written last
        if self.options.state is not None and Path(self.options.state).exists():
            try:
                self.load_state_dict(json.loads(Path(self.options.state).read_text()))
            except ValueError as error:
                raise ValueError(f"{self.options.state}: {error}") from error
        paths = (str, os.PathLike)
        given = {name: Model(Path(each)) if isinstance(each, paths) else each for name, each in models.items()}
        self._models = {
            name: ServedModel(name, backend_of(each, self.options), self._cache, self.metrics, self._task, self.options)
            for name, each in given.items()
        }
        self.schema = self._start()
        self._watcher = FileWatcher(given, self._reload) if self.options.reload else None

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
        call = Call(key, choice, straggling, deadline, self._finish, finished)
        digest = digest_of(x) if self._cache.limit else b""
        hits = [self._models[name].request(x, digest, arrived, deadline, call.receive) for name in choice.models]
        if body is not None and all(hits) and call.answered:
            name = choice.models[0]
            self._cache.learn(body, KnownInput(key, digest), (name, self._models[name].version, digest))
        return call

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
        known = self._cache.known(body)
        if known is None:
            return None
        with self._lock:
            choice = self._policy.choose(known.context)
        keys = [(name, self._models[name].present_version(), known.digest) for name in choice.models]
        entries = self._cache.recall(keys)
        if entries is None:
            return choice
        outputs = {name: entry.output for name, entry in zip(choice.models, entries, strict=True)}
        kept = {name: entry.kept for name, entry in zip(choice.models, entries, strict=True)}
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

    def _finish(self, call: Call) -> Prediction:
        """Make the answer of a call that has ended."""
        valid = {name: call.outputs[name] for name in call.choice.models if name in call.outputs}  # not as they came
        if valid:
            return self._predicted(call.context, call.choice, valid, call.kept)
        errors = list(call.errors.values())
        error = next((each for each in errors if isinstance(each, InputError)), errors[0])
        if len(errors) == 1 and not isinstance(error, InputError):
            # The failure of a model that was drawn counts as its largest loss: no feedback will come.
            with self._lock:
                if self._policy.has_room(call.context, self.options.max_contexts):
                    self._policy.learn(call.context, call.choice, {call.choice.models[0]: 1.0})
        raise error if isinstance(error, ServingError) else ModelError(f"{error}")

    def _predicted(
        self, context: str, choice: Choice, outputs: Mapping[str, np.ndarray[Any, Any]], kept: Mapping[str, Any]
    ) -> Prediction:
        output, label, model, confidence = self._task.combine(outputs, choice.weights, kept)
        record = Record(context, choice, {name: kept.get(name) for name in choice.models})
        return Prediction(self._journal.add(record, time.monotonic()), output, label, model, confidence, tuple(outputs))

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
            if hasattr(y, "tolist"):
                y = y.tolist()
                y = y[0] if isinstance(y, list) and len(y) == 1 else y
            losses = {name: 1.0 if kept is None else self._task.loss(kept, y) for name, kept in record.kept.items()}
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
        if time.monotonic() - self._written > _STATE_SECONDS:
            self._write_state()

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
        write_file(Path(path), json.dumps(self.state_dict()).encode(), durable=False)

    def _write_state(self) -> None:
        """Write the weights to the file of the options, if there is one; an error is reported in the log."""
        if self.options.state is not None:
            self._written = time.monotonic()
            try:
                self.save(self.options.state)
            except OSError as error:
                _log.error("the weights cannot be written to %s: %s", self.options.state, error)

    # State

    def _reload(self, name: str, model: Model) -> None:
        """Load a model again; called when its file has changed."""
        backend = backend_of(model, self.options)
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
        cache: dict[str, int] | None = None
        if self._cache.limit:
            cache = {name: getattr(self._cache, name) for name in ("bytes", "hits", "joined", "misses")}
            cache["entries"] = len(self._cache)
        return {
            "slo": self.options.slo,
            "context": self.options.context,
            "models": {name: model.status() for name, model in self._models.items()},
            "weights": weights,
            "cache": cache,
        }

    def prometheus(self) -> str:
        """Return all counters in Prometheus' text format.

        Raises:
            ImportError: if prometheus_client is not installed; the message names the extra.
        """
        try:
            return exposition(self.metrics.families(self.status())).decode()
        except ModuleNotFoundError as error:
            raise ImportError("metrics need prometheus_client: pip install 'dadplug[serve]'") from error

    def close(self) -> None:
        """End the models' processes, and write the weights if the options name a file."""
        if self._watcher is not None:
            self._watcher.close()
        for model in self._models.values():
            model.stop()
        self._write_state()

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
