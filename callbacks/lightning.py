"""The callbacks for the package `lightning`."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch.callbacks import Callback

from ._lightning_adapters import by_environment, faces

BatchTimer, TrafficMonitor, RankMonitor, RankSchedule, ReplicaCheck = faces(Callback, __name__)


def factory() -> list[Any]:
    """Makes the callbacks that the environment variable DADPLUG_CALLBACKS names; an entry point."""
    return by_environment(sys.modules[__name__])
