"""Catalyst's runner for local steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from ..local_steps import LocalOptions, LocalSGD
from ..local_steps.options import Schedule
from ..model_sync.uneven_inputs import takes_part
from ..signature import takes_keywords_of
from .distributed_runner import DistributedRunner


class LocalSGDRunner(DistributedRunner):
    """Catalyst runner for local steps (local SGD, DiLoCo); a drop-in replacement for `SupervisedRunner`.

    Sites train alone for ``every`` steps and then agree on their parameters. After each training loader they agree, so
    that evaluations and checkpoints are those of one model. Everything else is as in `DistributedRunner`: the sites'
    connection, data, metrics and files. Callbacks that stop training stop it at the end of an epoch.

    Args:
        model: model to train; may be passed to `train` instead.
        criterion: loss, the mean over the samples of its batch; may be passed to `train` instead.
        optimizer: optimizer of the model; may be passed to `train` instead.
        every: steps between two agreements, or a function of the number of steps so far that returns them.
        input_key: as in `SupervisedRunner`.
        output_key: as in `SupervisedRunner`.
        target_key: as in `SupervisedRunner`.
        loss_key: as in `SupervisedRunner`.
        split_data: as in `DistributedRunner`.
        process_group: process group of the sites; the default group if None.
        options: options of the local steps, with the names and defaults of `dadplug.local_steps.LocalOptions`.

    Attributes:
        local_options: the options of the local steps.
        reduction: the `LocalSGD` of the last training, with its traffic.

    Raises:
        ValueError: if an option or its value is unknown; the message lists the valid ones.

    Example:
        >>> runner = LocalSGDRunner(every=64, wire="int8")
        >>> runner.train(model=model, criterion=criterion, optimizer=optimizer, loaders=loaders, num_epochs=5)
        >>> print(runner.reduction.traffic.total_bytes_sent)
    """

    reduction: Any

    @takes_keywords_of(LocalOptions)
    def __init__(
        self,
        model: Any = None,
        criterion: Any = None,
        optimizer: Any = None,
        every: int | Schedule = LocalOptions.every,
        *,
        input_key: Any = "features",
        output_key: Any = "logits",
        target_key: str = "targets",
        loss_key: str = "loss",
        split_data: bool | str = "auto",
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.local_options = LocalOptions.create(every=every, **options)
        super().__init__(
            model,
            criterion,
            optimizer,
            self.local_options.warm_up_mode,
            input_key=input_key,
            output_key=output_key,
            target_key=target_key,
            loss_key=loss_key,
            split_data=split_data,
            process_group=process_group,
            timeout=self.local_options.timeout,
            check_finite=self.local_options.check_finite,
        )

    def _build_reduction(self, model: torch.nn.Module, settings: dict[str, Any]) -> Any:
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise ValueError("local steps need one optimizer; DistributedRunner takes several")
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it
        own = vars(self.local_options) | {"check_finite": settings["check_finite"]}
        return LocalSGD(model, optimizer, process_group=self._process_group, **own)

    def _run_loader(self) -> None:
        """Run a loader; in training all sites count as many steps as the site with the most batches."""
        if not self.is_train_loader or self.engine.reduction is None:
            super()._run_loader()
            return
        with torch.set_grad_enabled(True):
            batches = iter(self.loader)
            for step in range(self.steps):
                self.micro_step = step
                batch = next(batches, None) if takes_part(step, self._own_steps, self.steps) else None
                if batch is not None:
                    self.batch = batch
                    self._run_event("on_batch_start")
                    self._train_batch()
                    self._run_event("on_batch_end")
                elif self.update_due:
                    self.reduction.idle()

    def take_part(self) -> None:
        """Do nothing: a local step without a backward pass changes nothing, and waits for nobody."""

    def stepping(self) -> AbstractContextManager[Any]:
        """Return the context in which the optimizer takes a step."""
        context: AbstractContextManager[Any] = self.reduction.stepping()
        return context

    def on_loader_end(self, runner: Any) -> None:
        """Agree on one model after training, and merge the metrics of all sites."""
        if self.is_train_loader and self.engine.reduction is not None:
            self.reduction.finish()
        super().on_loader_end(runner)

    def own_state(self) -> Any:
        """Return what a checkpoint holds of this site: its local steps and its optimizer."""
        return {"local": self.reduction.state_dict(), "optimizer": self.reduction.optimizer.state_dict()}

    def load_states(self, states: list[Mapping[str, Any] | None]) -> None:
        """Restore this site's state from those of all sites."""
        self.reduction.load_states([state and state["local"] for state in states])
        rank = self.reduction.site_rank
        own = states[rank] if rank < len(states) else None
        if own is not None:
            self.reduction.optimizer.load_state_dict(own["optimizer"])
