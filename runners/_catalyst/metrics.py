"""Metrics over all sites, from the metrics of each."""

from __future__ import annotations

import math
from collections.abc import Sequence


def merge_metrics(by_site: Sequence[tuple[dict[str, float], int]]) -> dict[str, float]:
    """Merge metrics that are means over samples.

    Values that are equal on all sites are unchanged. ``X/std`` beside ``X`` is merged to the deviation of all samples.

    Args:
        by_site: for each site, its metrics and the number of samples that they are means over.

    Returns:
        The metrics over all sites, the same on each of them.
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics, _ in by_site for name in metrics):
        values = [(metrics, samples) for metrics, samples in by_site if name in metrics]
        mean = name.removesuffix("/std")
        if name.endswith("/std") and all(mean in metrics for metrics, _ in values):
            merged[name] = _deviation([(metrics[mean], metrics[name], samples) for metrics, samples in values])
        else:
            merged[name] = _mean([(metrics[name], samples) for metrics, samples in values])
    return merged


def _mean(values: Sequence[tuple[float, int]]) -> float:
    first = values[0][0]
    if all(value == first for value, _ in values):
        return first
    total = sum(samples for _, samples in values)
    return sum(value * samples for value, samples in values if samples) / total if total else first


def _deviation(values: Sequence[tuple[float, float, int]]) -> float:
    """Return the standard deviation over all samples, from each site's mean, deviation and number of samples."""
    if all(value[:2] == values[0][:2] for value in values) and len({value[2] for value in values}) == 1:
        return values[0][1]
    total = sum(samples for *_, samples in values)
    if total < 2:
        return values[0][1]
    mean = sum(mean * samples for mean, _, samples in values) / total
    squares = sum(dev**2 * max(0, n - 1) + n * (site_mean - mean) ** 2 for site_mean, dev, n in values)
    return math.sqrt(squares / (total - 1))
