"""Catalyst's runner for training between sites by synchronous gradients."""

from __future__ import annotations

from typing import Any

import torch
from catalyst.core.callback import CallbackOrder, ICheckpointCallback
from catalyst.core.misc import get_original_callback

from ..options import Options
from ..reduction import GradientReduction
from ..support.signature import takes_keywords_of
from ._catalyst.runner import BaseRunner, RunnerArguments


class DistributedRunner(BaseRunner):
    """Catalyst runner that trains one model between sites; a drop-in replacement for `SupervisedRunner`.

    Every site runs the same script. The sites are connected by `dadplug.connect`, by torchrun's environment, or by an
    existing process group; without any of them the runner trains as a single site. Stock callbacks, loggers and
    progress bars work as for one process: metrics of a loader are those of all sites together, and only site 0 prints
    and writes files.

    With ``min_sites``, over a hub, training goes on without a site that leaves. Metrics, early stopping and checkpoints
    are then those of the sites that are present, the first of which prints, and each of them writes the checkpoints. Of
    a data set that is split, the share of an absent site is left out; it is drawn anew for each epoch. A site that has
    left returns if its program is started again: it goes on at the batch of the epoch that the others are at.

    Args:
        model: model to train; may be passed to `train` instead.
        criterion: loss, the mean over the samples of its batch; may be passed to `train` instead.
        optimizer: optimizer of the model; may be passed to `train` instead.
        mode: name of a method, such as ``"dsgd"``, ``"dad"`` or ``"rankdad"``.
        fused: whether optimizer steps are those of `GradientReduction.apply`, which do not form the agreed gradients of
            factored weights: ``.grad`` of these stays None. Clipping by ``torch.nn.utils.clip_grad_norm_`` includes
            them. Where callbacks, precision or the optimizer need the gradients, they are formed, and the plan says
            why.
        arguments: options of the gradient reduction, with the names and defaults of `dadplug.options.Options`;
            ``input_key``, ``output_key``, ``target_key`` and ``loss_key`` as in `SupervisedRunner`;
            ``split_data``, True: all sites' loaders hold the same data set, which is split over the sites; False: each
            site has data of its own; ``"auto"``: split those loaders that hold the same data set on all sites;
            ``process_group`` of the sites, the default group if None.

    Attributes:
        options: the options of the gradient reduction.
        reduction: the `GradientReduction` of the last training, with its plan and traffic.

    Raises:
        ValueError: if a mode or an option is unknown; the message lists the valid ones.

    Example:
        >>> runner = DistributedRunner(mode="rankdad", rank=4)
        >>> runner.train(model=model, criterion=criterion, optimizer=optimizer, loaders=loaders, num_epochs=5)
        >>> print(runner.reduction.plan)
    """

    options: Options
    reduction: GradientReduction

    @takes_keywords_of(RunnerArguments, Options)
    def __init__(
        self,
        model: Any = None,
        criterion: Any = None,
        optimizer: Any = None,
        mode: str = "rankdad",
        *,
        fused: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(model, criterion, optimizer, Options, {"mode": mode} | arguments)
        self._agreed_before = 0
        self._wants_fused = fused

    # The exchange

    def _build_exchange(self, model: torch.nn.Module, scaled: bool) -> GradientReduction:
        settings = {name: getattr(self.options, name) for name in Options.names()}
        settings["check_finite"] &= not scaled
        settings["state"] = self._elastic_state()
        return self._build_reduction(model, {"process_group": self._process_group} | settings)

    def _reason_against_fusing(self) -> str:
        may_leave = self.options.min_sites is not None
        return super()._reason_against_fusing() or "sites may leave, by min_sites" * may_leave

    def _build_reduction(self, model: torch.nn.Module, settings: dict[str, Any]) -> GradientReduction:
        return GradientReduction(model, **settings)

    # The loop

    def _stops_before_step(self) -> bool:
        self._agreed_before = self.reduction.step
        if self.need_early_stop:
            self.need_early_stop = False
            self._idle(stop=True)
            return True
        return False

    def _stops_after_step(self) -> bool:
        return self.reduction.stopped

    def _idle(self, stop: bool = False) -> None:
        """Participate in a step without data; only callbacks that follow backward and change the model are called."""
        if stop or self.update_due:
            self.reduction.idle(stop=stop)
            self.engine.end_step()
        else:
            with self.reduction.no_sync():
                self.reduction.idle()
        for callback in self.callbacks.values():
            changes_model = CallbackOrder.Backward < callback.order <= CallbackOrder.Scheduler
            if changes_model and not isinstance(get_original_callback(callback), ICheckpointCallback):
                callback.on_batch_end(self)

    def take_part(self) -> None:
        """Participate in the other sites' step if this site has skipped its batch, without a backward pass."""
        if self.reduction.step == self._agreed_before:
            self.reduction.idle()
            self.engine.end_step()

    def _make_equal(self) -> None:
        """Average running statistics before an evaluation uses them."""
        if self.options.average_buffers:
            self.reduction.average_buffers()
