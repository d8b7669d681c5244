"""Scoped patches of stock Catalyst: metrics across sites, and argument names of older versions."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from ...exchange import Transport
from ..shared_patch import SharedPatch

# Modules that import `all_gather` by name. Catalyst's own sends all tensors through CUDA.
_GATHERING = ("_auc", "_classification", "_confusion_matrix", "_segmentation")
# Metrics with several gathers.
_REPEATED = (
    ("_auc", "AUCMetric"),
    ("_classification", "BinaryPrecisionRecallF1Metric"),
    ("_classification", "MulticlassPrecisionRecallF1SupportMetric"),
    ("_classification", "MultilabelPrecisionRecallF1SupportMetric"),
    ("_segmentation", "RegionBasedMetric"),
)


_transport: ContextVar[Transport | None] = ContextVar("transport", default=None)


_seen: ContextVar[dict[str, list[int]] | None] = ContextVar("seen", default=None)  # sites of a metric's first gather


class _Lost(Exception):
    """Loss of a site between the gathers of one metric; raised at all sites that are present."""


def _repeating(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap the computation of a metric that gathers several times, so that all its gathers hold the same sites."""

    @functools.wraps(original)
    def compute(metric: Any) -> Any:
        own = copy.deepcopy(getattr(metric, "statistics", None))  # which it replaces by sums over sites
        while True:
            token = _seen.set({})
            try:
                return original(metric)
            except _Lost:
                if own is not None:
                    metric.statistics = copy.deepcopy(own)
            finally:
                _seen.reset(token)

    return compute


def _gathering(original: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    @functools.wraps(original)
    def all_gather(data: Any) -> list[Any]:
        transport = _transport.get()
        if transport is None:
            return original(data)
        every = transport.gather_present(data)
        seen = _seen.get()
        if seen is not None and seen.setdefault("present", [*every]) != [*every]:
            raise _Lost
        return [*every.values()]

    return all_gather


def _metric(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"catalyst.metrics.{module}"), name)


_METRICS = [
    SharedPatch(functools.partial(importlib.import_module, f"catalyst.metrics.{name}"), "all_gather", _gathering)
    for name in _GATHERING
] + [SharedPatch(functools.partial(_metric, module, name), "compute", _repeating) for module, name in _REPEATED]


@contextmanager
def patched_metrics(transport: Transport) -> Iterator[None]:
    """Gather Catalyst's metrics from all sites, on any device and for any number of samples, in a context."""
    token = _transport.set(transport)
    try:
        with ExitStack() as patches:
            for patch in _METRICS:
                patches.enter_context(patch)
            yield
    finally:
        _transport.reset(token)


def _accuracy() -> Any:
    from catalyst.callbacks.metrics.accuracy import AccuracyCallback

    return AccuracyCallback


def _accepting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "topk_args" in kwargs:
            kwargs.setdefault("topk", kwargs.pop("topk_args"))
        original(self, *args, **kwargs)

    return init


# Scripts for Catalyst before version 22 write ``AccuracyCallback(topk_args=)``, which is ``topk=`` now. They build the
# callback after the runner and before `train`, so that the patch is open from a runner's constructor to the end of its
# training.
OLDER_NAMES = SharedPatch(_accuracy, "__init__", _accepting)
