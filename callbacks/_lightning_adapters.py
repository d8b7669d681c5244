"""The callbacks' faces for Lightning; no import of it, since it has two packages."""

from __future__ import annotations

from typing import Any

from ..model_sync.samples import batch_size
from . import monitors


class MonitorFace:
    """Stands before Lightning's ``Callback`` and passes on to a monitor what happens in training.

    Values go to the trainer's loggers, and those that a monitor shows to the progress bar. Takes the monitor's
    arguments.
    """

    monitor: type[monitors.Monitor]

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__()
        self._monitor = self.monitor(*args, **settings)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins the training loader."""
        self._monitor.start()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begins a batch."""
        self._monitor.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs what the batch has brought."""
        values = self._monitor.end(getattr(trainer.strategy, "reduction", None), batch_size(batch) or 0)
        shown = {name: values.pop(name) for name in self._monitor.shown if name in values}
        for each, bar in ((values, False), (shown, True)):
            if each:
                pl_module.log_dict(each, on_step=True, on_epoch=False, prog_bar=bar, batch_size=1)


def faces(callback: type, module: str) -> list[Any]:
    """Builds the callbacks for one of Lightning's packages.

    Args:
        callback: the package's ``Callback``.
        module: the module that they are to be found in.
    """
    kinds = (
        monitors.BatchTimer,
        monitors.TrafficMonitor,
        monitors.RankMonitor,
        monitors.RankSchedule,
        monitors.ReplicaCheck,
    )
    return [
        type(kind.__name__, (MonitorFace, callback), {"monitor": kind, "__doc__": kind.__doc__, "__module__": module})
        for kind in kinds
    ]


def by_environment(package: Any) -> list[Any]:
    """Makes the callbacks that the environment variable DADPLUG_CALLBACKS names, separated by commas.

    It is an entry point of Lightning's factories of callbacks, which every Trainer calls.

    Raises:
        ValueError: if there is no callback of a name.
    """
    import os

    names = [name.strip() for name in os.environ.get("DADPLUG_CALLBACKS", "").split(",") if name.strip()]
    for name in names:
        if name not in ("BatchTimer", "TrafficMonitor", "RankMonitor", "ReplicaCheck"):
            raise ValueError(
                f"unknown callback {name!r} in DADPLUG_CALLBACKS; valid ones are BatchTimer, TrafficMonitor, "
                "RankMonitor, ReplicaCheck"
            )
    return [getattr(package, name)() for name in names]
