"""Adapters of the monitors to transformers' Trainer: values, as means, go where the Trainer's own logs go."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ..reduction import GradientReduction
from ..step.model_sync.structure import attached
from . import monitors


class MonitorCallback(TrainerCallback):
    """Adapter that makes monitors a callback of transformers.

    With every log of training come the values of the steps since the last one: ranks and residuals of the last step,
    means of the others. `dadplug.transformers.attach` puts these callbacks before those that pass logs on, such as to
    TensorBoard.
    """

    kinds: tuple[type[monitors.Monitor], ...]
    adds_to_logs = True
    at_logs = False  # whether to measure when the Trainer logs, all steps since the last time, in place of each step

    def __init__(self, *args: Any, **settings: Any) -> None:
        first, *others = self.kinds
        self._monitors: list[Any] = [first(*args, **settings), *(kind() for kind in others)]
        self._means = monitors.Means()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start a pass over the data."""
        for monitor in self._monitors:
            monitor.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start a step."""
        for monitor in self._monitors:
            monitor.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Measure a step."""
        if not self.at_logs:
            self._measure(args, model)

    def _measure(self, args: Any, model: Any) -> None:
        reduction = _reduction_of(model)
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
        for monitor in self._monitors:
            values = monitor.end(reduction, samples)
            if len(self.kinds) == 1 or not monitor.of_layers:
                self._means.add(values, totals=monitor.totals)
            else:
                self._means.add({name: value for name, value in values.items() if name.endswith("/mean")})

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, model: Any = None, **kwargs: Any
    ) -> None:
        """Add the values to the logs of training."""
        if logs is not None and "loss" in logs:
            if self.at_logs:
                self._measure(args, model)
            values = self._means.take()
            logs.update(values)
            state.log_history[-1].update(values)


def _reduction_of(model: Any) -> GradientReduction | None:
    """Return the reduction of a model."""
    for each in attached():
        if isinstance(each, GradientReduction) and getattr(each.model, "_orig_mod", each.model) is model:
            return each
    return None


class BatchTimer(MonitorCallback):
    """Monitor of the time of steps for transformers; for its values see `dadplug.callbacks.monitors.BatchTimer`.

    Example:
        >>> trainer = Trainer(model, args, callbacks=[BatchTimer()])
    """

    kinds = (monitors.BatchTimer,)


class TrafficMonitor(MonitorCallback):
    """Monitor of the traffic between sites for transformers, which `dadplug.transformers.attach` adds by itself.

    The values are those of `dadplug.callbacks.monitors.TrafficMonitor`, and the means over layers of
    `dadplug.callbacks.monitors.RankMonitor`.

    Example:
        >>> trainer = Trainer(model, args, callbacks=[TrafficMonitor()])
    """

    kinds = (monitors.TrafficMonitor, monitors.RankMonitor)
    at_logs = True


class PrivacyMonitor(MonitorCallback):
    """Monitor of differential privacy for transformers.

    The arguments, values and errors are those of `dadplug.callbacks.monitors.PrivacyMonitor`.

    Example:
        >>> trainer = Trainer(model, args, callbacks=[PrivacyMonitor(delta=1e-5)])
    """

    kinds = (monitors.PrivacyMonitor,)


class RankMonitor(MonitorCallback):
    """Monitor of compressed gradients for transformers; for its values see `dadplug.callbacks.monitors.RankMonitor`.

    Example:
        >>> trainer = Trainer(model, args, callbacks=[RankMonitor()])
    """

    kinds = (monitors.RankMonitor,)
    at_logs = True


class RankSchedule(MonitorCallback):
    """Schedule of the rank of compressed gradients for transformers.

    The arguments and errors are those of `dadplug.callbacks.monitors.RankSchedule`.

    Example:
        >>> trainer = Trainer(model, args, callbacks=[RankSchedule({0: 16, 1000: 8})])
    """

    kinds = (monitors.RankSchedule,)


class ReplicaCheck(MonitorCallback):
    """Check for transformers that the sites' parameters are bitwise equal.

    The arguments and errors are those of `dadplug.callbacks.monitors.ReplicaCheck`.

    Example:
        >>> trainer = Trainer(model, args, callbacks=[ReplicaCheck(every=100)])
    """

    kinds = (monitors.ReplicaCheck,)
