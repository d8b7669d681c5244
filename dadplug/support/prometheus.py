"""Metrics in Prometheus' text format, made by prometheus_client (extras ``hub`` and ``serve``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any


def family(
    kind: str, name: str, text: str, samples: Iterable[tuple[Sequence[str], float]], labels: Sequence[str] = ()
) -> Any:
    """Return a metric of prometheus_client.

    Args:
        kind: "gauge" or "counter".
        name: its name, without the package's.
        text: its description, without a full stop.
        samples: values, each after those of the labels.
        labels: names of the labels.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    made = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
    metric = made(f"dadplug_{name}", f"{text}.", labels=labels)
    for values, value in samples:
        metric.add_metric(values, float(value))
    return metric


def exposition(metrics: Iterable[Any]) -> bytes:
    """Return metrics of prometheus_client in Prometheus' text format."""
    from prometheus_client import generate_latest

    return generate_latest(SimpleNamespace(collect=lambda: metrics))
