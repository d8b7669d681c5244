"""Callbacks for Catalyst and Lightning; a trainer is imported on first access to one of its callbacks.

The names of those for Catalyst end in Callback. Those for Lightning belong to the one of its packages that is in use.

A callback may be changed here without reading another room: none but `transformers` and the experiment uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..runners._catalyst import from_catalyst
from ..runners._lightning import needs_lightning

if TYPE_CHECKING:
    from .catalyst import (
        AdaptiveBatchSizeCallback,
        BatchTimerCallback,
        PrivacyMonitorCallback,
        RankMonitorCallback,
        RankScheduleCallback,
        ReplicaCheckCallback,
        TrafficMonitorCallback,
    )
    from .pytorch_lightning import (
        AdaptiveBatchSize,
        BatchTimer,
        PrivacyMonitor,
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
    "PrivacyMonitor",
    "PrivacyMonitorCallback",
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
    return from_catalyst(name, f"{__name__}.catalyst")
