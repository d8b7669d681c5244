"""Adapters of the monitors to Lightning, for either of its packages, neither of which is imported here."""

from __future__ import annotations

import os
from typing import Any

from ..model_sync.samples import batch_size
from . import monitors

# By monitor, the call in the documentation's example.
_MONITORS: dict[type[monitors.Monitor], str] = {
    monitors.BatchTimer: "BatchTimer()",
    monitors.TrafficMonitor: "TrafficMonitor()",
    monitors.RankMonitor: "RankMonitor()",
    monitors.RankSchedule: "RankSchedule({0: 16, 1000: 8})",
    monitors.ReplicaCheck: "ReplicaCheck(every=100)",
}


class MonitorAdapter:
    """Adapter that makes a monitor a ``Callback`` of Lightning.

    Values go to the trainer's loggers, and those in `Monitor.shown` to the progress bar as well. The constructor takes
    the monitor's arguments.
    """

    monitor: type[monitors.Monitor]

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__()
        self._monitor = self.monitor(*args, **settings)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the training loader."""
        self._monitor.start()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start a batch."""
        self._monitor.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the values of the batch."""
        values = self._monitor.end(getattr(trainer.strategy, "reduction", None), batch_size(batch) or 0)
        shown = {name: values.pop(name) for name in self._monitor.shown if name in values}
        for each, bar in ((values, False), (shown, True)):
            if each:
                pl_module.log_dict(each, on_step=True, on_epoch=False, prog_bar=bar, batch_size=1)


def build_adapters(callback: type, module: str) -> list[Any]:
    """Build the callbacks for one of Lightning's packages.

    Args:
        callback: the package's ``Callback``.
        module: name of the module that contains them.
    """
    return [
        type(
            kind.__name__,
            (MonitorAdapter, callback),
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
