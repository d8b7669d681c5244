"""What a trainer calls back. A trainer is imported when its callback is first asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .catalyst import BatchTimerCallback, TrafficMonitorCallback

_CALLBACKS = {"BatchTimerCallback": "catalyst", "TrafficMonitorCallback": "catalyst"}

__all__ = ["BatchTimerCallback", "TrafficMonitorCallback"]


def __getattr__(name: str) -> Any:
    if name not in _CALLBACKS:
        raise AttributeError(f"module 'dadplug.callbacks' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f".{_CALLBACKS[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "catalyst":
            raise ImportError(
                f"{name} needs Catalyst, which is not installed: pip install 'dadplug[catalyst]' (with pip below 24.1)"
            ) from error
        raise
