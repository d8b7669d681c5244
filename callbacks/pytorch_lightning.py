"""The callbacks for the package `pytorch_lightning`."""

from __future__ import annotations

import sys
from typing import Any

from pytorch_lightning.callbacks import Callback

from ._lightning import build_adapters, by_environment

BatchTimer, TrafficMonitor, RankMonitor, RankSchedule, ReplicaCheck, AdaptiveBatchSize = build_adapters(
    Callback, __name__
)


def factory() -> list[Any]:
    """Build the callbacks that the environment variable DADPLUG_CALLBACKS lists; an entry point."""
    return by_environment(sys.modules[__name__])
