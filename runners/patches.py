"""Scoped patches of trainers' libraries, and metrics of all sites from those of each."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..errors import escaped
from ..exchange import PeerNames, Transport
from .present import metrics_transport

METRICS_KIND = tuple[dict[str, float], int]  # means over samples, and the number of these


class SharedPatch:
    """Replacement of an attribute of a module or class while at least one user has the patch open.

    Args:
        find_owner: function that returns the module or class; called when the patch is first opened.
        name: name of the attribute.
        replace: function from the original value to the new one.
    """

    def __init__(self, find_owner: Callable[[], Any], name: str, replace: Callable[[Any], Any]) -> None:
        self._find_owner = find_owner
        self._name = name
        self._replace = replace
        self._open = 0
        self._lock = threading.Lock()
        self._owner: Any = None  # kept, since a module cannot be imported while the interpreter ends
        self._original: Any = None
        self._replacement: Any = None

    def open(self) -> None:
        """Set the new value; each call must be followed by one of `close`."""
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._owner = self._find_owner()
                self._original = getattr(self._owner, self._name)
                self._replacement = self._replace(self._original)
                setattr(self._owner, self._name, self._replacement)

    def close(self, *exception: object) -> None:
        """Restore the original when no user has the patch open any more."""
        with self._lock:
            self._open -= 1
            if not self._open and getattr(self._owner, self._name) is self._replacement:
                setattr(self._owner, self._name, self._original)

    __enter__ = open
    __exit__ = close


@contextmanager
def metrics_of_present_sites(transport: Transport, patches: Iterable[SharedPatch]) -> Iterator[None]:
    """Compute metrics over the sites that are present, in a context.

    Args:
        transport: the transport.
        patches: patches of the functions by which metrics gather, and of those that gather several times.
    """
    before = metrics_transport.get()
    metrics_transport.set(transport)
    try:
        with ExitStack() as opened:
            for patch in patches:
                opened.enter_context(patch)
            yield
    finally:
        metrics_transport.set(before)


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
            merged[escaped(name)] = _deviation([(metrics[mean], metrics[name], samples) for metrics, samples in values])
        else:
            merged[escaped(name)] = _mean([(metrics[name], samples) for metrics, samples in values])
    return merged


def metrics_by_site(
    every: Mapping[int, tuple[dict[str, float], int]], sites: PeerNames | Sequence[str]
) -> dict[str, float]:
    """Return the metrics of each site by itself, as ``loss/site 0 (lyon)``, beside those over all sites.

    Args:
        every: for each site, by rank, its metrics and the number of samples that they are means over.
        sites: the sites by name.
    """
    return {f"{escaped(name)}/{sites[rank]}": value for rank, (own, _) in every.items() for name, value in own.items()}


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
    squares = sum(
        dev * dev * max(0, n - 1) + n * (site_mean - mean) * (site_mean - mean) for site_mean, dev, n in values
    )
    return math.sqrt(max(0.0, squares / (total - 1)))
