"""What stock Catalyst gets wrong between sites, mended while a `DistributedRunner` runs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dadplug.exchange import Transport

# These import `all_gather` by name, and Catalyst's own sends everything through CUDA.
_GATHERING = ("_auc", "_classification", "_confusion_matrix", "_segmentation")


@contextmanager
def patched_metrics(transport: Transport) -> Iterator[None]:
    """Lets Catalyst's metrics that gather from all processes do so on any device, over any number of samples."""

    def all_gather(data: Any) -> list[Any]:
        return transport.gather_objects(data)

    modules: list[Any] = [importlib.import_module(f"catalyst.metrics.{name}") for name in _GATHERING]
    before = [module.all_gather for module in modules]
    for module in modules:
        module.all_gather = all_gather
    try:
        yield
    finally:
        for module, original in zip(modules, before, strict=True):
            module.all_gather = original


def accept_older_names() -> None:
    """Lets scripts for Catalyst before 22 go on as they are: ``AccuracyCallback(topk_args=)`` is ``topk=`` now."""
    from catalyst.callbacks.metrics.accuracy import AccuracyCallback

    newer = AccuracyCallback.__init__
    if getattr(newer, "takes_older_names", False):
        return

    @functools.wraps(newer)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "topk_args" in kwargs:
            kwargs.setdefault("topk", kwargs.pop("topk_args"))
        newer(self, *args, **kwargs)

    init.takes_older_names = True  # type: ignore[attr-defined]
    AccuracyCallback.__init__ = init
