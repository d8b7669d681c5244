"""The callbacks' face for Catalyst: values go into batch metrics and, as means, into loader metrics."""

from __future__ import annotations

from typing import Any

from catalyst.core.callback import Callback, CallbackOrder

from . import monitors

_AFTER_THE_STEP = CallbackOrder.External - 10  # before the progress bar, which shows what is there


class MonitorCallback(Callback):
    """Passes on to monitors what happens; takes the arguments of the first of them."""

    kinds: tuple[type[monitors.Monitor], ...]

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(order=_AFTER_THE_STEP)
        first, *others = self.kinds
        self._monitors = [first(*args, **settings), *(kind() for kind in others)]
        self._means = monitors.Means()

    def on_loader_start(self, runner: Any) -> None:
        """Begins a loader."""
        self._means.take()
        for monitor in self._monitors:
            monitor.start()

    def on_batch_start(self, runner: Any) -> None:
        """Begins a batch."""
        for monitor in self._monitors:
            monitor.begin()

    def on_batch_end(self, runner: Any) -> None:
        """Logs what the batch has brought."""
        for monitor in self._monitors:
            if runner.is_train_loader or monitor.on_every_batch:
                values = monitor.end(runner.engine.reduction if runner.is_train_loader else None, runner.batch_size)
                self._means.add(values)
                if not monitor.of_layers:
                    runner.batch_metrics.update(values)

    def on_loader_end(self, runner: Any) -> None:
        """Logs the means over the loader."""
        runner.loader_metrics.update(self._means.take())


class BatchTimerCallback(MonitorCallback):
    """`dadplug.callbacks.monitors.BatchTimer` for Catalyst."""

    kinds = (monitors.BatchTimer,)


class TrafficMonitorCallback(MonitorCallback):
    """`dadplug.callbacks.monitors.TrafficMonitor` for Catalyst, with the means of `RankMonitor` over the loader."""

    kinds = (monitors.TrafficMonitor, monitors.RankMonitor)


class RankMonitorCallback(MonitorCallback):
    """`dadplug.callbacks.monitors.RankMonitor` for Catalyst."""

    kinds = (monitors.RankMonitor,)


class RankScheduleCallback(MonitorCallback):
    """`dadplug.callbacks.monitors.RankSchedule` for Catalyst."""

    kinds = (monitors.RankSchedule,)


class ReplicaCheckCallback(MonitorCallback):
    """`dadplug.callbacks.monitors.ReplicaCheck` for Catalyst."""

    kinds = (monitors.ReplicaCheck,)
