"""Adapter of a monitor to Lightning, for either of its packages, neither of which is imported here."""

from __future__ import annotations

from typing import Any

from ..model_sync.samples import batch_size
from . import monitors


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
