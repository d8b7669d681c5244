"""Callbacks for Catalyst and Lightning; a trainer is imported on first access to one of its callbacks.

The names of those for Catalyst end in Callback. Those for Lightning belong to the one of its packages that is in use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..runners._lightning import needs_lightning

if TYPE_CHECKING:
    from .catalyst import (
        AdaptiveBatchSizeCallback,
        BatchTimerCallback,
        RankMonitorCallback,
        RankScheduleCallback,
        ReplicaCheckCallback,
        TrafficMonitorCallback,
    )
    from .pytorch_lightning import (
        AdaptiveBatchSize,
        BatchTimer,
        RankMonitor,
        RankSchedule,
        ReplicaCheck,
        TrafficMonitor,
    )

__all__ = [
    "AdaptiveBatchSize",
    "AdaptiveBatchSizeCallback",
    "BatchTimer",
    "BatchTimerCallback",
    "RankMonitor",
    "RankMonitorCallback",
    "RankSchedule",
    "RankScheduleCallback",
    "ReplicaCheck",
    "ReplicaCheckCallback",
    "TrafficMonitor",
    "TrafficMonitorCallback",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dadplug.callbacks' has no attribute {name!r}")
    if not name.endswith("Callback"):
        return getattr(needs_lightning(name, __name__), name)
    try:
        return getattr(importlib.import_module(".catalyst", __name__), name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "catalyst":
            raise ImportError(
                f"{name} needs Catalyst, which is not installed: pip install 'dadplug[catalyst]' (with pip below 24.1)"
            ) from error
        raise
