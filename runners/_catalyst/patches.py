"""Scoped patches of stock Catalyst: metrics across sites, and argument names of older versions."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from ...exchange import Transport

# Modules that import `all_gather` by name. Catalyst's own sends all tensors through CUDA.
_GATHERING = ("_auc", "_classification", "_confusion_matrix", "_segmentation")


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
        self._original: Any = None
        self._replacement: Any = None

    def open(self) -> None:
        """Set the new value; each call must be followed by one of `close`."""
        with self._lock:
            self._open += 1
            if self._open == 1:
                owner = self._find_owner()
                self._original = getattr(owner, self._name)
                self._replacement = self._replace(self._original)
                setattr(owner, self._name, self._replacement)

    def close(self) -> None:
        """Restore the original when no user has the patch open any more."""
        with self._lock:
            self._open -= 1
            owner = self._find_owner()
            if not self._open and getattr(owner, self._name) is self._replacement:
                setattr(owner, self._name, self._original)

    def __enter__(self) -> None:
        self.open()

    def __exit__(self, *exception: object) -> None:
        self.close()


_transport: ContextVar[Transport | None] = ContextVar("transport", default=None)


def _gathering(original: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    @functools.wraps(original)
    def all_gather(data: Any) -> list[Any]:
        transport = _transport.get()
        return original(data) if transport is None else transport.gather_objects(data)

    return all_gather


_METRICS = [
    SharedPatch(functools.partial(importlib.import_module, f"catalyst.metrics.{name}"), "all_gather", _gathering)
    for name in _GATHERING
]


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
