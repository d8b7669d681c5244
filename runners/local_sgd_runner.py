"""Catalyst's runner for local steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..local_steps import LocalOptions, LocalSGD
from ..local_steps.options import Schedule
from ..support.signature import takes_keywords_of
from ._catalyst.runner import BaseRunner, RunnerArguments


class LocalSGDRunner(BaseRunner):
    """Catalyst runner for local steps (local SGD, DiLoCo); a drop-in replacement for `SupervisedRunner`.

    Sites train alone for ``every`` steps and then agree on their parameters. After each training loader they agree, so
    that evaluations and checkpoints are those of one model. Everything else is as in `DistributedRunner`: the sites'
    connection, data, metrics and files. Callbacks that stop training stop it at the end of an epoch. With
    ``min_sites``, over a hub, sites may leave and return, as with `DistributedRunner`.

    With ``fused=True`` clipping by ``torch.nn.utils.clip_grad_norm_`` includes gradients that are not formed. Where
    callbacks or precision need gradients, they are formed, and ``reduction.remarks`` says why.

    Args:
        model: model to train; may be passed to `train` instead.
        criterion: loss, the mean over the samples of its batch; may be passed to `train` instead.
        optimizer: optimizer of the model; may be passed to `train` instead.
        every: steps between two agreements, or a function of the number of steps so far that returns them.
        arguments: options of the local steps, with the names and defaults of `dadplug.local_steps.LocalOptions`, and
            the other arguments of `DistributedRunner`.

    Attributes:
        options: the options of the local steps, also as `local_options`.
        reduction: the `LocalSGD` of the last training, with its traffic.

    Raises:
        ValueError: if an option or its value is unknown; the message lists the valid ones.

    Example:
        >>> runner = LocalSGDRunner(every=64, wire="int8")
        >>> runner.train(model=model, criterion=criterion, optimizer=optimizer, loaders=loaders, num_epochs=5)
        >>> print(runner.reduction.traffic.total_bytes_sent)
    """

    options: LocalOptions
    reduction: LocalSGD

    @takes_keywords_of(RunnerArguments, LocalOptions)
    def __init__(
        self,
        model: Any = None,
        criterion: Any = None,
        optimizer: Any = None,
        every: int | Schedule = LocalOptions.every,
        **arguments: Any,
    ) -> None:
        super().__init__(model, criterion, optimizer, LocalOptions, {"every": every} | arguments)
        self._wants_fused = self.options.fused

    @property
    def local_options(self) -> LocalOptions:
        """The options of the local steps."""
        return self.options

    def _build_exchange(self, model: torch.nn.Module, scaled: bool) -> LocalSGD:
        own = vars(self.options) | {"check_finite": self.options.check_finite and not scaled}
        self.engine.steps_in_backward = False
        return LocalSGD(
            model,
            self._one_optimizer(),
            process_group=self._process_group,
            state=self._elastic_state(),
            in_trainer=True,
            **own,
        )

    def step_optimizer(self, optimizer: Any) -> None:
        """Step the optimizer, and agree with the other sites if it is time."""
        with self.reduction.stepping():
            super().step_optimizer(optimizer)
        self.engine.end_step()

    def _idle(self) -> None:
        if self.update_due:
            self.reduction.idle()
            self.engine.end_step()

    def _make_equal(self) -> None:
        """Agree on one model."""
        self.reduction.finish()

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
