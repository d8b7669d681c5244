"""Common part of the Catalyst runners whose sites may leave and return."""

from __future__ import annotations

from typing import Any

from .base_runner import BaseRunner
from .elastic_training import ElasticTraining


class ElasticRunner(BaseRunner):
    """Catalyst runner at whose sites `_elastic` is the state of the training, where sites may leave and return."""

    _elastic: ElasticTraining | None = None

    @property
    def _joins(self) -> bool:
        return self._joined is not None

    @property
    def _joined(self) -> dict[str, Any] | None:
        """State of the other sites that this one joins in mid-training, up to the end of its first step; else None."""
        return None if self._elastic is None else self._elastic.joined

    def on_experiment_start(self, runner: Any) -> None:
        """Restore the state of the other sites, if this one joins them in mid-training."""
        super().on_experiment_start(runner)
        if self._elastic is not None:
            self._elastic.restore()

    def _run_epoch(self) -> None:
        loaders = self.loaders
        if (state := self._joined) is not None:  # others have gone through the loaders before this one
            self.loaders = dict([*loaders.items()][[*loaders].index(state["loader"]) :])
            self.epoch_metrics.update(state["metrics"])
        try:
            super()._run_epoch()
        finally:
            self.loaders = loaders

    def on_loader_start(self, runner: Any) -> None:
        """Compute the number of steps with the other sites; of a site that joins them, that of their epoch."""
        super().on_loader_start(runner)
        if (state := self._joined) is not None:
            self.steps, self.micro_step = state["steps"], state["micro_step"]
            self._own_steps = min(self._own_steps, self.steps)
