"""Adapters of the monitors to transformers' Trainer: values, as means, go where the Trainer's own logs go."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ..reduction import GradientReduction
from ..step.model_sync.structure import attached
from . import monitors


class MonitorCallback(monitors.Adapter, TrainerCallback):
    """Adapter that makes monitors a callback of transformers.

    With every log of training come the values of the steps since the last one: ranks and residuals of the last step,
    means of the others. `dadplug.transformers.attach` puts these callbacks before those that pass logs on, such as to
    TensorBoard, and adds that for the traffic by itself.
    """

    adds_to_logs = True
    on_epoch_begin = monitors.Adapter._start
    on_step_begin = monitors.Adapter._begin

    @property
    def at_logs(self) -> bool:
        """Whether to measure when the Trainer logs, all steps since the last time, in place of each step."""
        return monitors.RankMonitor in self.kinds

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Measure a step."""
        if not self.at_logs:
            self._measure(args, model)

    def _measure(self, args: Any, model: Any) -> None:
        reductions = [each for each in attached() if isinstance(each, GradientReduction)]
        reduction = next((each for each in reductions if getattr(each.model, "_orig_mod", each.model) is model), None)
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


BatchTimer, TrafficMonitor, PrivacyMonitor, RankMonitor, RankSchedule, ReplicaCheck, _ = monitors.build_adapters(
    lambda kind: (MonitorCallback,), __name__, "trainer = Trainer(model, args, callbacks=[{}])", with_ranks=True
)
