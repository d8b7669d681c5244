"""Adapters of the monitors to Catalyst: values are batch metrics and, as means, loader metrics."""

from __future__ import annotations

from typing import Any

from catalyst.core.callback import Callback, CallbackOrder

from . import monitors

_AFTER_THE_STEP = CallbackOrder.External - 10  # before the progress bar, which shows what is there


class MonitorCallback(monitors.Adapter, Callback):
    """Adapter that makes monitors a callback of Catalyst."""

    _of_trainer = {"order": _AFTER_THE_STEP}
    on_batch_start = monitors.Adapter._begin

    def on_loader_start(self, runner: Any) -> None:
        """Start a loader."""
        self._means.take()
        self._start()

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


class _AdaptiveBatchSize(MonitorCallback):
    """Adapter of `AdaptiveBatchSize`, which replaces the training loader."""

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


(
    BatchTimerCallback,
    TrafficMonitorCallback,
    PrivacyMonitorCallback,
    RankMonitorCallback,
    RankScheduleCallback,
    ReplicaCheckCallback,
    AdaptiveBatchSizeCallback,
) = monitors.build_adapters(
    lambda kind: (_AdaptiveBatchSize if kind is monitors.AdaptiveBatchSize else MonitorCallback,),
    __name__,
    "runner.train(loaders=loaders, num_epochs=5, callbacks=[{}])",
    "Callback",
    with_ranks=True,
)
