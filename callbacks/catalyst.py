"""Adapters of the monitors to Catalyst: values are batch metrics and, as means, loader metrics."""

from __future__ import annotations

from typing import Any

from catalyst.core.callback import Callback, CallbackOrder

from . import monitors

_AFTER_THE_STEP = CallbackOrder.External - 10  # before the progress bar, which shows what is there


class MonitorCallback(Callback):
    """Adapter that makes monitors a callback of Catalyst."""

    kinds: tuple[type[monitors.Monitor], ...]
    _monitors: list[Any]

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(order=_AFTER_THE_STEP)
        first, *others = self.kinds
        self._monitors = [first(*args, **settings), *(kind() for kind in others)]
        self._means = monitors.Means()

    def on_loader_start(self, runner: Any) -> None:
        """Start a loader."""
        self._means.take()
        for monitor in self._monitors:
            monitor.start()

    def on_batch_start(self, runner: Any) -> None:
        """Start a batch."""
        for monitor in self._monitors:
            monitor.begin()

    def on_batch_end(self, runner: Any) -> None:
        """Log the values of the batch."""
        for monitor in self._monitors:
            if runner.is_train_loader or monitor.on_every_batch:
                values = monitor.end(runner.engine.reduction if runner.is_train_loader else None, runner.batch_size)
                self._means.add(values, totals=monitor.totals)
                if not monitor.of_layers:
                    runner.batch_metrics.update(values)

    def on_loader_end(self, runner: Any) -> None:
        """Log the means over the loader."""
        runner.loader_metrics.update(self._means.take())


class BatchTimerCallback(MonitorCallback):
    """Monitor of the time of batches for Catalyst; for its values see `dadplug.callbacks.monitors.BatchTimer`.

    Example:
        >>> runner.train(loaders=loaders, num_epochs=5, callbacks=[BatchTimerCallback()])
    """

    kinds = (monitors.BatchTimer,)


class TrafficMonitorCallback(MonitorCallback):
    """Monitor of the traffic between sites for Catalyst.

    The values are those of `dadplug.callbacks.monitors.TrafficMonitor`; loader metrics also contain the means of
    `dadplug.callbacks.monitors.RankMonitor`.

    Example:
        >>> runner.train(loaders=loaders, num_epochs=5, callbacks=[TrafficMonitorCallback()])
    """

    kinds = (monitors.TrafficMonitor, monitors.RankMonitor)


class PrivacyMonitorCallback(MonitorCallback):
    """Monitor of differential privacy for Catalyst.

    The arguments, values and errors are those of `dadplug.callbacks.monitors.PrivacyMonitor`. Loader metrics have the
    last value.

    Example:
        >>> runner.train(loaders=loaders, num_epochs=5, callbacks=[PrivacyMonitorCallback(delta=1e-5)])
    """

    kinds = (monitors.PrivacyMonitor,)


class RankMonitorCallback(MonitorCallback):
    """Monitor of compressed gradients for Catalyst; for its values see `dadplug.callbacks.monitors.RankMonitor`.

    Example:
        >>> runner.train(loaders=loaders, num_epochs=5, callbacks=[RankMonitorCallback()])
    """

    kinds = (monitors.RankMonitor,)


class RankScheduleCallback(MonitorCallback):
    """Schedule of the rank of compressed gradients for Catalyst.

    The arguments and errors are those of `dadplug.callbacks.monitors.RankSchedule`.

    Example:
        >>> runner.train(loaders=loaders, num_epochs=5, callbacks=[RankScheduleCallback({0: 16, 1000: 8})])
    """

    kinds = (monitors.RankSchedule,)


class AdaptiveBatchSizeCallback(MonitorCallback):
    """Batch that follows the goodput of training for Catalyst.

    The arguments, values and errors are those of `dadplug.callbacks.monitors.AdaptiveBatchSize`.

    Example:
        >>> runner.train(loaders=loaders, num_epochs=5, callbacks=[AdaptiveBatchSizeCallback(1024, (16, 256))])
    """

    kinds = (monitors.AdaptiveBatchSize,)

    def on_epoch_start(self, runner: Any) -> None:
        """Replace the training loader before the first epoch.

        Raises:
            ValueError: if each site has data of its own, or gradients are accumulated.
        """
        (monitor,) = self._monitors
        for name in runner.loaders:
            if name.startswith("train") and monitor.loader is None:
                loader, sites = runner.undivided_loader(name)
                runner.loaders[name] = runner.engine.on_device(monitor.convert(loader, sites, runner.seed))
        if monitor.loader is not None:
            monitor.loader.set_epoch(runner.epoch_step)

    def picture(self, path: str) -> None:
        """Draw batch, gain, noise scale and goodput over the steps.

        Args:
            path: path of the PNG file.
        """
        self._monitors[0].picture(path)


class ReplicaCheckCallback(MonitorCallback):
    """Check for Catalyst that the sites' parameters are bitwise equal.

    The arguments and errors are those of `dadplug.callbacks.monitors.ReplicaCheck`.

    Example:
        >>> runner.train(loaders=loaders, num_epochs=5, callbacks=[ReplicaCheckCallback(every=100)])
    """

    kinds = (monitors.ReplicaCheck,)
