"""One model behind its queue: a thread that takes batches, computes them and restarts a backend that fails.

`Metrics` has the counters of a server, its recent history by second, and their metrics for Prometheus.
"""

from __future__ import annotations

import queue
import threading
import time
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import numpy as np

from ..errors import BackendFailedError, InputError, LoadError, ModelError, ServingError, UnavailableError
from ..support.logs import get_logger
from ..support.prometheus import family
from .backends import Array, Backend
from .cache import Entry, Listener, PredictionCache, Result, Ticket
from .options import ServingOptions
from .policies import Task

# Metrics

BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds
_HISTORY = 300  # seconds kept
_COUNTERS = {  # by name: the label, and a description
    "requests": ("status", "Predictions by their HTTP status"),
    "batches": ("model", "Batches that the model has computed"),
    "batched_requests": ("model", "Requests in batches"),
    "batch_seconds": ("model", "Seconds of computing batches"),
    "restarts": ("model", "Restarts of the model"),
    "feedback": ("status", "Feedback by its HTTP status"),
}
_OF_MODEL = {  # by name: the key in the status of a model, and a description
    "model_ready": ("ready", "Whether the model is ready"),
    "model_last_good": ("last_good", "Whether an older version is served, since the new one cannot be loaded"),
    "queue_length": ("waiting", "Requests that wait for the model"),
    "batch_limit": ("batch_limit", "Largest size of the next batch"),
}
_OF_CACHE = {
    "hits": "Requests that the cache has answered",
    "joined": "Requests that have joined an equal one",
    "misses": "Requests that a model has computed",
}
_FINE = tuple(1e-4 * 1.1**i for i in range(120))  # bounds for quantiles of one second


class _Second:
    """Counts of one second."""

    def __init__(self) -> None:
        self.latencies: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()
        self.batches: Counter[str] = Counter()  # by model
        self.samples: Counter[str] = Counter()
        self.weights: dict[str, dict[str, float]] = {}

    def quantile(self, share: float) -> float:
        """Return a quantile of the latencies in seconds, to 10 %."""
        wanted, seen = share * sum(self.latencies.values()), 0
        for index in sorted(self.latencies):
            seen += self.latencies[index]
            if seen >= wanted:
                return _FINE[min(index, len(_FINE) - 1)]
        return 0.0

    def summary(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return {
            **{name: self.counts[name] for name in ("requests", "failures", "above_goal", "hits", "lookups")},
            "p50": self.quantile(0.5),
            "p99": self.quantile(0.99),
            "batches": {name: self.samples[name] / batches for name, batches in self.batches.items()},
            "weights": self.weights,
        }


class Metrics:
    """Counters and history; all methods may be called from any thread.

    Args:
        goal: latency goal in seconds.
        clock: returns the time in seconds.
    """

    def __init__(self, goal: float, clock: Callable[[], float] = time.time) -> None:
        self._goal, self._clock = goal, clock
        self._lock = threading.Lock()
        self._seconds: OrderedDict[int, _Second] = OrderedDict()
        # By name and value of the label, see `_COUNTERS`.
        self._totals: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._latencies = [0] * (len(BOUNDS) + 1)
        self._latency_sum = 0.0

    def request(self, status: int, seconds: float) -> None:
        """Count a prediction by its HTTP status, with its latency."""
        with self._lock:
            now = self._second()
            self._totals["requests"][f"{status}"] += 1
            now.counts["requests"] += 1
            if status != 200:
                now.counts["failures"] += 1
                return
            now.latencies[bisect_left(_FINE, seconds)] += 1
            now.counts["above_goal"] += seconds > self._goal
            self._latencies[bisect_left(BOUNDS, seconds)] += 1
            self._latency_sum += seconds

    def batch(self, model: str, size: int, seconds: float) -> None:
        """Count a batch of a model with its computing time."""
        with self._lock:
            self._totals["batches"][model] += 1
            self._totals["batched_requests"][model] += size
            self._totals["batch_seconds"][model] += seconds
            now = self._second()
            now.batches[model] += 1
            now.samples[model] += size

    def restart(self, model: str) -> None:
        """Count a restart of a model."""
        with self._lock:
            self._totals["restarts"][model] += 1

    def feedback(self, status: int, context: str = "", weights: Mapping[str, float] | None = None) -> None:
        """Count feedback by its HTTP status, with the weights of its context after it."""
        with self._lock:
            self._totals["feedback"][f"{status}"] += 1
            if weights is not None:
                self._second().weights[context] = dict(weights)

    def lookup(self, hit: bool) -> None:
        """Count a look-up in the cache."""
        with self._lock:
            now = self._second()
            now.counts["lookups"] += 1
            now.counts["hits"] += hit

    def history(self) -> list[dict[str, Any]]:
        """Return one entry for each of the last seconds with requests or feedback, the oldest first."""
        with self._lock:
            return [{"time": second, **found.summary()} for second, found in self._seconds.items()]

    def families(self, status: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the metrics of prometheus_client that make up all counters and a predictor's status.

        Args:
            status: result of `Predictor.status`.
        """
        from prometheus_client.core import HistogramMetricFamily

        with self._lock:
            totals = {name: [((value,), total) for value, total in each.items()] for name, each in self._totals.items()}
            latencies, latency_sum = list(accumulate(self._latencies)), self._latency_sum
        for name, samples in totals.items():
            label, text = _COUNTERS[name]
            yield family("counter", name, text, samples, (label,))
        for name, (key, text) in _OF_MODEL.items():
            samples = [((model,), values[key]) for model, values in status["models"].items()]
            yield family("gauge", name, text, samples, ("model",))
        cache = status["cache"]
        if cache is not None:
            for key, text in _OF_CACHE.items():
                yield family("counter", f"cache_{key}", text, [((), cache[key])])
            yield family("gauge", "cache_bytes", "Bytes in the cache", [((), cache["bytes"])])
        weights = [
            ((context, model), value) for context, each in status["weights"].items() for model, value in each.items()
        ]
        yield family("gauge", "weight", "Weight of the model in the context", weights, ("context", "model"))
        buckets = [(f"{bound}", count) for bound, count in zip((*BOUNDS, "+Inf"), latencies, strict=True)]
        text = "Latencies of answered predictions."
        yield HistogramMetricFamily("dadplug_latency_seconds", text, buckets=buckets, sum_value=latency_sum)

    def _second(self) -> _Second:
        second = int(self._clock())
        if second not in self._seconds:
            self._seconds[second] = _Second()
            while len(self._seconds) > _HISTORY:
                self._seconds.popitem(last=False)
        return self._seconds[second]


# The model

_log = get_logger("dadplug.serving")
_GOAL = 0.8  # of slo: batches aim lower, so that the spread of latencies stays below it
_INCREASE = 1.0
_DECREASE = 0.9
_FIRST_PAUSE = 0.1  # seconds before a process that failed to start is started again; doubled up to
_LONGEST_PAUSE = 10.0
_MOST_SHAPES = 64


class BatchLimit:
    """Largest size of the next batch: additive increase, multiplicative decrease (AIMD) to a latency goal.

    Clipper (Crankshaw et al., NSDI 2017, section 4.3): the size grows by 1 while the latency is below the goal, and is
    multiplied by 0.9 when the latency is above it.

    Args:
        goal: latency in seconds.
        maximum: upper limit of the size.

    Attributes:
        value: the limit before rounding down, from 1 to `maximum`.
    """

    def __init__(self, goal: float, maximum: int) -> None:
        self.goal, self.maximum = goal, maximum
        self.value = 1.0

    @property
    def size(self) -> int:
        """Number of requests that the next batch may have."""
        return int(self.value)

    def record(self, size: int, seconds: float) -> None:
        """Adapt the limit to a batch that has been answered.

        A batch smaller than the limit does not show that a larger one is fast enough, so it does not increase it.

        Args:
            size: number of its requests.
            seconds: its latency, see `measured_latency`.
        """
        if seconds > self.goal:
            self.value = max(1.0, self.value * _DECREASE)
        elif size >= self.size:
            self.value = min(float(self.maximum), self.value + _INCREASE)


def measured_latency(arrived: float, previous: float, done: float) -> float:
    """Return the latency of a batch for `BatchLimit.record`, from the arrival of its oldest request to its answer.

    A request that the batch before has left behind waited since batches are too small, not too large: its waiting
    counts from the moment when that batch was taken. Otherwise a backlog would shrink the batches, and grow.

    Args:
        arrived: time in seconds when the oldest request of the batch arrived.
        previous: time when the batch before it was taken.
        done: time when the batch was answered.
    """
    return done - max(arrived, previous)


class RequestQueue:
    """Requests that wait for a model; many threads add, one takes, and sleeps while nothing waits.

    Args:
        name: name of the model, for messages.
        most: largest number of waiting requests.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._arriving: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._waiting: deque[Ticket] = deque()

    def __len__(self) -> int:
        return self._arriving.qsize() + len(self._waiting)

    def put(self, ticket: Ticket) -> None:
        """Add a request.

        Raises:
            UnavailableError: if too many are waiting.
        """
        if len(self) >= self._most:
            raise UnavailableError(f"{self._most} requests wait for model {self._name!r}")
        self._arriving.put(ticket)

    def wake(self) -> None:
        """Let `wait` return."""
        self._arriving.put(None)

    def wait(self) -> None:
        """Return once a request waits, or after `wake`."""
        if not self._waiting:
            self._take_in()

    def take(self, limit: int, now: float) -> tuple[list[Ticket], list[Ticket]]:
        """Take a batch: the oldest request, and those of the same shape and dtype, in the order of their arrival.

        Args:
            limit: largest size of the batch.
            now: the time in seconds.

        Returns:
            The batch, and the requests whose deadlines have passed, which are not part of it.
        """
        self._take_in_all()
        batch: list[Ticket] = []
        expired: list[Ticket] = []
        others: list[Ticket] = []
        while self._waiting and len(batch) < limit:
            ticket = self._waiting.popleft()
            if ticket.deadline <= now:
                expired.append(ticket)
            elif not batch or (ticket.x.shape == batch[0].x.shape and ticket.x.dtype == batch[0].x.dtype):
                batch.append(ticket)
            else:
                others.append(ticket)
        self._waiting.extendleft(reversed(others))
        return batch, expired

    def expired(self, now: float = float("inf")) -> list[Ticket]:
        """Take the requests whose deadlines have passed; without a time, all."""
        self._take_in_all()
        found = [ticket for ticket in self._waiting if ticket.deadline <= now]
        self._waiting = deque(ticket for ticket in self._waiting if ticket.deadline > now)
        return found

    def _take_in(self) -> None:
        ticket = self._arriving.get()
        if ticket is not None:
            self._waiting.append(ticket)

    def _take_in_all(self) -> None:
        while not self._arriving.empty():
            self._take_in()


class ServedModel:
    """A model with its queue, its batch size and its backend.

    Args:
        name: name of the model.
        backend: computes its batches; started by `start`.
        cache: the cache.
        metrics: where batches and restarts are counted.
        task: meaning of its outputs.
        options: options of the predictor.

    Attributes:
        version: number of the times that the model was loaded, or was found to have changed.
        restarts: number of restarts after a failure.
        ready: whether the backend can compute.
        limit: the limit of its batch size.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        cache: PredictionCache,
        metrics: Metrics,
        task: Task,
        options: ServingOptions,
    ) -> None:
        self.name, self.backend = name, backend
        self.version, self.restarts, self.ready = 1, 0, False
        self._cache, self._metrics, self._task = cache, metrics, task
        self.limit = BatchLimit(_GOAL * options.slo, options.max_batch)
        self._queue = RequestQueue(name, options.max_waiting)
        self._replacement: Backend | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"dadplug-serving-{name}", daemon=True)
        self._shapes: set[tuple[int, ...]] = set()  # of inputs that the model has answered
        self._taken = 0.0  # when the last batch was taken
        self._state, self._state_lock = 0, threading.Lock()

    def start(self) -> None:
        """Load the model and begin to serve.

        Raises:
            LoadError: if it cannot be loaded.
        """
        self.backend.start()
        self.ready = True
        self._thread.start()

    def request(self, x: Array, digest: bytes, arrived: float, deadline: float, listener: Listener) -> bool:
        """Ask for the output of an input; the listener is called once, perhaps before this returns.

        Args:
            x: the input, of the schema.
            digest: its digest, for the cache.
            arrived: time of its arrival.
            deadline: time until which an answer is awaited.
            listener: called with the result.

        Returns:
            Whether the output was in the cache.
        """
        ticket = Ticket((self.name, self.present_version(), digest), x, arrived, deadline, [listener])
        found = self._cache.request(ticket)
        if self._cache.limit:
            self._metrics.lookup(found is not ticket)
        if isinstance(found, Entry):
            listener(Result(self.name, found.output, found.kept))
            return True
        if found is not None:
            try:
                if self._stopping.is_set():
                    raise UnavailableError("the server is stopping")
                self._queue.put(ticket)
            except UnavailableError as error:
                self._fail(ticket, error)
        return False

    def present_version(self) -> int:
        """Return the version of the model, a new one if an object has changed since the last call."""
        from ..step.model_sync.sameness import state_digest  # which imports torch

        with self._state_lock:
            state = 0 if self.backend.module is None else state_digest(self.backend.module)
            if state != self._state:
                self._state = state
                self._begin_version()
            return self.version

    def replace(self, backend: Backend) -> None:
        """Use another backend, which has been started, from the next batch on."""
        former, self._replacement = self._replacement, backend
        if former is not None:
            former.stop()
        self._queue.wake()

    def stop(self) -> None:
        """End the thread and the backend; requests that wait fail."""
        self._stopping.set()
        self._queue.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)
        self.backend.stop()

    def status(self) -> dict[str, Any]:
        """Return the state of the model as plain values."""
        return {
            "ready": self.ready,
            "version": self.version,
            "restarts": self.restarts,
            "last_good": self.backend.last_good,
            "pid": self.backend.pid,
            "waiting": len(self._queue),
            "batch_limit": round(self.limit.value, 2),
        }

    # In the thread of the queue

    def _serve(self) -> None:
        while not self._stopping.is_set():
            self._exchange()
            now = time.monotonic()
            batch, expired = self._queue.take(self.limit.size, now)
            for ticket in expired:
                self._fail(ticket, UnavailableError(f"model {self.name!r} did not answer in time"))
            if batch:
                previous, self._taken = self._taken, now
                self._answer(batch, previous)
            else:
                self._queue.wait()
        for ticket in self._queue.expired():
            self._fail(ticket, UnavailableError("the server is stopping"))

    def _exchange(self) -> None:
        """Go over to the backend of a reload, if there is one."""
        replacement, self._replacement = self._replacement, None
        if replacement is not None:
            former, self.backend = self.backend, replacement
            self._begin_version()
            former.stop()
            _log.info("model %r is now version %d", self.name, self.version)

    def _begin_version(self) -> None:
        """Void the entries in the cache: the file may have changed since they were computed."""
        self.version += 1
        self._cache.remove_model(self.name)

    def _answer(self, batch: list[Ticket], previous: float) -> None:
        started = time.monotonic()
        try:
            failed = self._compute(batch)
        except BackendFailedError as error:
            _log.error("model %r failed and is restarted: %s", self.name, error)
            for ticket in batch:
                self._fail(ticket, UnavailableError(f"model {self.name!r} failed: {error}"))
            self._restart()
            return
        done = time.monotonic()
        if not failed:
            self.limit.record(len(batch), measured_latency(batch[0].arrived, previous, done))
        self._metrics.batch(self.name, len(batch), done - started)

    def _compute(self, batch: list[Ticket]) -> bool:
        """Answer a batch, in halves if the model refuses it, so that only the input at fault fails.

        Returns:
            Whether a request failed.
        """
        try:
            outputs = self.backend.run(np.stack([ticket.x for ticket in batch]))
        except (ModelError, InputError) as error:
            if len(batch) > 1:
                middle = len(batch) // 2
                self._compute(batch[:middle])
                self._compute(batch[middle:])
            elif isinstance(error, InputError) or batch[0].x.shape in self._shapes:
                self._fail(batch[0], error)
            else:  # an input of a shape that the model has never answered is at fault
                text = f"the model does not answer inputs of shape {batch[0].x.shape}: {error}"
                self._fail(batch[0], InputError(text))
            return True
        self.present_version()  # what was computed while the model changed is not kept
        if len(self._shapes) < _MOST_SHAPES:
            self._shapes.add(batch[0].x.shape)
        for ticket, output in zip(batch, outputs, strict=True):
            # A copy: a view would keep the whole batch in memory as long as one row is in the cache.
            self._succeed(ticket, np.array(output))
        return False

    def _succeed(self, ticket: Ticket, output: Array) -> None:
        """Answer a request with an output, unless that is no answer: as after an error, other models may answer."""
        output.flags.writeable = False  # it may be in the cache and with several clients
        try:
            if output.dtype.kind == "f" and np.isnan(output).any():
                raise ModelError(f"model {self.name!r} returned NaN")
            kept = self._task.keep(output)
        except ModelError as error:
            self._fail(ticket, error)
        else:
            self._close(ticket, Result(self.name, output, kept))

    def _fail(self, ticket: Ticket, error: ServingError) -> None:
        self._close(ticket, Result(self.name, error=error))

    def _close(self, ticket: Ticket, result: Result) -> None:
        listeners = self._cache.close(ticket, result.output, result.kept, self.version)
        ticket.listeners = []
        for listener in listeners:
            try:
                listener(result)
            except Exception:
                _log.exception("a listener of model %r failed", self.name)

    def _restart(self) -> None:
        self.ready = False
        pause = _FIRST_PAUSE
        while not self._stopping.is_set():
            self._exchange()
            try:
                self.backend.start()
            except (LoadError, BackendFailedError) as error:
                _log.error("model %r cannot be started: %s; again in %.1f s", self.name, error, pause)
                for ticket in self._queue.expired(time.monotonic()):
                    self._fail(ticket, UnavailableError(f"model {self.name!r} is being restarted"))
                self._stopping.wait(pause)
                pause = min(_LONGEST_PAUSE, 2 * pause)
                continue
            self._begin_version()
            self.ready = True
            self.restarts += 1
            self._metrics.restart(self.name)
            _log.warning("model %r runs again, process %s", self.name, self.backend.pid)
            return
