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
        # By name, without the package's, and by label text.
        self._totals: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._latencies = [0] * (len(BOUNDS) + 1)
        self._latency_sum = 0.0

    def request(self, status: int, seconds: float) -> None:
        """Count a prediction by its HTTP status, with its latency."""
        with self._lock:
            now = self._second()
            self._totals["requests_total"][f'status="{status}"'] += 1
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
        labels = label(model=model)
        with self._lock:
            self._totals["batches_total"][labels] += 1
            self._totals["batched_requests_total"][labels] += size
            self._totals["batch_seconds_total"][labels] += seconds
            now = self._second()
            now.batches[model] += 1
            now.samples[model] += size

    def restart(self, model: str) -> None:
        """Count a restart of a model."""
        with self._lock:
            self._totals["restarts_total"][label(model=model)] += 1

    def feedback(self, status: int, context: str = "", weights: Mapping[str, float] | None = None) -> None:
        """Count feedback by its HTTP status, with the weights of its context after it."""
        with self._lock:
            self._totals["feedback_total"][f'status="{status}"'] += 1
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

    def text(self, gauges: Mapping[str, Mapping[str, float]]) -> str:
        """Return all counters in Prometheus' text format.

        Args:
            gauges: further values, by name and by label text such as ``model="a"``.
        """
        lines: list[str] = []
        with self._lock:
            for name, values in {**self._totals, **gauges}.items():
                lines.append(f"# TYPE dadplug_{name} {'counter' if name.endswith('_total') else 'gauge'}")
                for labels, value in values.items():
                    lines.append(f"dadplug_{name}{'{' + labels + '}' if labels else ''} {value:.15g}")
            lines.append("# TYPE dadplug_latency_seconds histogram")
            total = 0
            for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._latencies, strict=True):
                total += count
                lines.append(f'dadplug_latency_seconds_bucket{{le="{bound}"}} {total}')
            lines.append(f"dadplug_latency_seconds_sum {self._latency_sum:.6f}")
            lines.append(f"dadplug_latency_seconds_count {total}")
        return "\n".join(lines) + "\n"

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
