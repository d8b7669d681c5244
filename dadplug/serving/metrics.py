"""Counters of a server, its recent history by second, and their text for Prometheus."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds
_HISTORY = 300  # seconds kept
_FINE = tuple(1e-4 * 1.1**i for i in range(120))  # bounds for quantiles of one second


class _Second:
    """Counts of one second."""

    def __init__(self) -> None:
        self.latencies: Counter[int] = Counter()
        self.requests = self.failures = self.above = 0
        self.batches: dict[str, list[int]] = {}  # number of batches and of samples, by model
        self.hits = self.lookups = 0
        self.weights: dict[str, dict[str, float]] = {}

    def quantile(self, share: float) -> float:
        """Return a quantile of the latencies in seconds, to 10 %."""
        wanted, seen = share * sum(self.latencies.values()), 0
        for index in sorted(self.latencies):
            seen += self.latencies[index]
            if seen >= wanted:
                return _FINE[min(index, len(_FINE) - 1)]
        return 0.0


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
        self._statuses: Counter[int] = Counter()
        self._latencies = [0] * (len(BOUNDS) + 1)
        self._latency_sum = 0.0
        self._batches: Counter[str] = Counter()
        self._samples: Counter[str] = Counter()
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._restarts: Counter[str] = Counter()
        self._feedback: Counter[int] = Counter()

    def request(self, status: int, seconds: float) -> None:
        """Count a prediction by its HTTP status, with its latency."""
        with self._lock:
            now = self._second()
            self._statuses[status] += 1
            now.requests += 1
            if status != 200:
                now.failures += 1
                return
            now.latencies[bisect_left(_FINE, seconds)] += 1
            now.above += seconds > self._goal
            self._latencies[bisect_left(BOUNDS, seconds)] += 1
            self._latency_sum += seconds

    def batch(self, model: str, size: int, seconds: float) -> None:
        """Count a batch of a model with its computing time."""
        with self._lock:
            self._batches[model] += 1
            self._samples[model] += size
            self._busy[model] += seconds
            found = self._second().batches.setdefault(model, [0, 0])
            found[0] += 1
            found[1] += size

    def restart(self, model: str) -> None:
        """Count a restart of a model."""
        with self._lock:
            self._restarts[model] += 1

    def feedback(self, status: int, context: str = "", weights: Mapping[str, float] | None = None) -> None:
        """Count feedback by its HTTP status, with the weights of its context after it."""
        with self._lock:
            self._feedback[status] += 1
            if weights is not None:
                self._second().weights[context] = dict(weights)

    def lookup(self, hit: bool) -> None:
        """Count a look-up in the cache."""
        with self._lock:
            now = self._second()
            now.lookups += 1
            now.hits += hit

    def history(self) -> list[dict[str, Any]]:
        """Return one entry for each of the last seconds with requests or feedback, the oldest first."""
        with self._lock:
            return [
                {
                    "time": second,
                    "requests": found.requests,
                    "failures": found.failures,
                    "above_goal": found.above,
                    "p50": found.quantile(0.5),
                    "p99": found.quantile(0.99),
                    "batches": {name: samples / batches for name, (batches, samples) in found.batches.items()},
                    "hits": found.hits,
                    "lookups": found.lookups,
                    "weights": found.weights,
                }
                for second, found in self._seconds.items()
            ]

    def text(self, gauges: Mapping[str, Mapping[str, float]]) -> str:
        """Return all counters in Prometheus' text format.

        Args:
            gauges: further values, by name and by label text such as ``model="a"``.
        """
        lines: list[str] = []
        with self._lock:
            _family(lines, "requests_total", "counter", {f'status="{k}"': v for k, v in self._statuses.items()})
            _family(lines, "feedback_total", "counter", {f'status="{k}"': v for k, v in self._feedback.items()})
            _family(lines, "batches_total", "counter", _by_model(self._batches))
            _family(lines, "batched_requests_total", "counter", _by_model(self._samples))
            _family(lines, "batch_seconds_total", "counter", _by_model(self._busy))
            _family(lines, "restarts_total", "counter", _by_model(self._restarts))
            self._histogram(lines)
        for name, values in gauges.items():
            _family(lines, name, "counter" if name.endswith("_total") else "gauge", values)
        return "\n".join(lines) + "\n"

    def _histogram(self, lines: list[str]) -> None:
        lines.append("# TYPE dadplug_latency_seconds histogram")
        total = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._latencies, strict=True):
            total += count
            lines.append(f'dadplug_latency_seconds_bucket{{le="{bound}"}} {total}')
        lines.append(f"dadplug_latency_seconds_sum {self._latency_sum:.6f}")
        lines.append(f"dadplug_latency_seconds_count {total}")

    def _second(self) -> _Second:
        second = int(self._clock())
        if second not in self._seconds:
            self._seconds[second] = _Second()
            while len(self._seconds) > _HISTORY:
                self._seconds.popitem(last=False)
        return self._seconds[second]


def label(**values: str) -> str:
    """Return the text of labels for Prometheus, with quotes, backslashes and line ends escaped."""
    escaped = {
        name: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, text in values.items()
    }
    return ",".join(f'{name}="{text}"' for name, text in escaped.items())


def gauges_of(status: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the values in a predictor's status, by name and by label text, for `Metrics.text`."""
    models, cache = status["models"], status["cache"]
    gauges: dict[str, dict[str, float]] = {
        name: {label(model=model): float(values[key]) for model, values in models.items()}
        for name, key in (
            ("model_ready", "ready"),
            ("model_last_good", "last_good"),
            ("queue_length", "waiting"),
            ("batch_limit", "batch_limit"),
        )
    }
    if cache is not None:
        gauges |= {f"cache_{key}_total": {"": cache[key]} for key in ("hits", "joined", "misses")}
        gauges["cache_bytes"] = {"": cache["bytes"]}
    gauges["weight"] = {
        label(context=context, model=model): value
        for context, values in status["weights"].items()
        for model, value in values.items()
    }
    return gauges


def _by_model(counts: Mapping[str, float]) -> dict[str, float]:
    return {label(model=name): value for name, value in counts.items()}


def _family(lines: list[str], name: str, kind: str, values: Mapping[str, float]) -> None:
    lines.append(f"# TYPE dadplug_{name} {kind}")
    for labels, value in values.items():
        lines.append(f"dadplug_{name}{{{labels}}} {value:g}" if labels else f"dadplug_{name} {value:g}")
