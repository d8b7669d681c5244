"""Monitors for Catalyst."""

from __future__ import annotations

from typing import Any

from catalyst.core.callback import Callback, CallbackOrder

from dadplug import GradientReduction

from .monitors import BatchClock, Means, rank_values, traffic_values

_AFTER_THE_STEP = CallbackOrder.External - 10  # before the progress bar, which shows what is there


def _reduction(runner: Any) -> GradientReduction | None:
    return getattr(runner.engine, "reduction", None)


class BatchTimerCallback(Callback):
    """Times batches, into batch metrics and, as means, into loader metrics.

    ``_timer/data_time``, ``_timer/model_time``, ``_timer/exchange_time`` and ``_timer/batch_time`` are in seconds, for
    getting a batch, forward to optimizer step, waiting for other sites, and all of it. ``_timer/_fps`` counts the
    samples that a site handles in a second.

    Example:
        >>> runner.train(..., callbacks=[BatchTimerCallback()])
    """

    def __init__(self) -> None:
        super().__init__(order=_AFTER_THE_STEP)
        self._clock = BatchClock()
        self._means = Means()

    def on_loader_start(self, runner: Any) -> None:
        """Starts the clock."""
        self._means.take()
        self._clock.start()

    def on_batch_start(self, runner: Any) -> None:
        """Marks that the data is there."""
        self._clock.begin_batch()

    def on_batch_end(self, runner: Any) -> None:
        """Logs the batch's times."""
        reduction = _reduction(runner) if runner.is_train_loader else None
        exchange = 0.0 if reduction is None or not runner.update_due else reduction.traffic.wait_seconds
        values = self._clock.end_batch(runner.batch_size, exchange)
        runner.batch_metrics.update(values)
        self._means.add(values)

    def on_loader_end(self, runner: Any) -> None:
        """Logs the means over the loader."""
        runner.loader_metrics.update(self._means.take())


class TrafficMonitorCallback(Callback):
    """Monitors the traffic between sites, into batch metrics and, as means, into loader metrics.

    ``traffic/mb`` are the megabytes that a site sends in a step, ``traffic/ratio`` says how many times fewer they are
    than with all gradients dense. With rankdad, ``rank/LAYER`` and ``residual/LAYER`` are the effective rank and the
    relative residual of a layer's compressed gradient; they go into loader metrics only.

    Example:
        >>> runner.train(..., callbacks=[TrafficMonitorCallback()])
    """

    def __init__(self) -> None:
        super().__init__(order=_AFTER_THE_STEP)
        self._means = Means()

    def on_batch_end(self, runner: Any) -> None:
        """Logs the step's traffic."""
        reduction = _reduction(runner)
        if reduction is None or not runner.is_train_loader or not runner.update_due:
            return
        values = traffic_values(reduction)
        runner.batch_metrics.update(values)
        self._means.add(values | rank_values(reduction))

    def on_loader_end(self, runner: Any) -> None:
        """Logs the means over the loader."""
        if runner.is_train_loader:
            runner.loader_metrics.update(self._means.take())
