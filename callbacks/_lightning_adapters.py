"""Adapters of the monitors to Lightning, for either of its packages, neither of which is imported here."""

from __future__ import annotations

import os
from typing import Any

from . import monitors
from ._lightning_batches import AdaptiveBatchSizeAdapter
from ._lightning_monitors import MonitorAdapter

# By monitor, the call in the documentation's example.
_MONITORS: dict[type[monitors.Monitor], str] = {
    monitors.BatchTimer: "BatchTimer()",
    monitors.TrafficMonitor: "TrafficMonitor()",
    monitors.RankMonitor: "RankMonitor()",
    monitors.RankSchedule: "RankSchedule({0: 16, 1000: 8})",
    monitors.ReplicaCheck: "ReplicaCheck(every=100)",
    monitors.AdaptiveBatchSize: "AdaptiveBatchSize(1024, local_bsz_bounds=(16, 256))",
}


_ADAPTERS: dict[type[monitors.Monitor], type[MonitorAdapter]] = {monitors.AdaptiveBatchSize: AdaptiveBatchSizeAdapter}


def build_adapters(callback: type, module: str) -> list[Any]:
    """Build the callbacks for one of Lightning's packages.

    Args:
        callback: the package's ``Callback``.
        module: name of the module that contains them.
    """
    return [
        type(
            kind.__name__,
            (_ADAPTERS.get(kind, MonitorAdapter), callback),
            {"monitor": kind, "__doc__": _documentation(kind, example), "__module__": module},
        )
        for kind, example in _MONITORS.items()
    ]


def _documentation(monitor: type[monitors.Monitor], example: str) -> str:
    text = (monitor.__doc__ or "").rstrip()
    return (
        f"{text}\n\n    Example:\n        >>> trainer = pl.Trainer(strategy=DADStrategy(), callbacks=[{example}])\n    "
    )


def by_environment(package: Any) -> list[Any]:
    """Build the callbacks that the environment variable DADPLUG_CALLBACKS lists, separated by commas.

    It serves as an entry point of Lightning's callback factories, which every Trainer calls.

    Raises:
        ValueError: if a name is not that of a callback without arguments.
    """
    names = [name.strip() for name in os.environ.get("DADPLUG_CALLBACKS", "").split(",") if name.strip()]
    for name in names:
        if name not in ("BatchTimer", "TrafficMonitor", "RankMonitor", "ReplicaCheck"):
            raise ValueError(
                f"unknown callback {name!r} in DADPLUG_CALLBACKS; valid ones are BatchTimer, TrafficMonitor, "
                "RankMonitor, ReplicaCheck"
            )
    return [getattr(package, name)() for name in names]
