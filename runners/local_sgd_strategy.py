"""Lightning's strategy for local steps, for either of Lightning's packages, neither of which it imports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..local_steps import LocalOptions, LocalSGD
from ..local_steps.options import Schedule
from ..signature import split_keywords, takes_keywords_of
from ._lightning.fused_steps import FusedFit, reason_against
from ._lightning.site_strategy import SiteStrategy, StrategyArguments


class LocalSGDStrategyBase(SiteStrategy):
    """Lightning strategy for local steps (local SGD, DiLoCo); for ``Trainer(strategy=)``, also as ``"localsgd"``.

    Sites train alone for ``every`` steps and then agree on their parameters; ``"diloco"`` has DiLoCo's outer optimizer.
    Before an evaluation, in checkpoints and at the end of a fit the sites agree, so that they hold one model there.
    Processes, samplers, metrics and evaluation are those of Lightning's ``DDPStrategy``. Sites may have different
    numbers of batches: a site with fewer takes no step in some of the others' steps. The module needs automatic
    optimization and one optimizer. With ``fused=True``, ``gradient_clip_val`` by norm includes gradients that are not
    formed; where hooks, precision or clipping by value need gradients, they are formed, and ``local.remarks`` says why.

    `dadplug.LocalSGDStrategy` is the strategy for the one of Lightning's two packages that is in use.

    Args:
        every: steps between two agreements, or a function of the number of steps so far that returns them.
        arguments: options of the local steps, with the names and defaults of `dadplug.local_steps.LocalOptions`, and
            arguments of ``DDPStrategy``, as in `DADStrategy`.

    Attributes:
        options: the options of the local steps, also as `local_options`.
        local: the `LocalSGD` of the last fit, with its traffic; None before it.

    Raises:
        ValueError: if an option or its value is unknown; the message lists the valid ones.

    Example:
        >>> trainer = pl.Trainer(strategy=LocalSGDStrategy(every=64, wire="int8"), accelerator="cpu", devices=2)
        >>> trainer.fit(module, loader)
        >>> print(trainer.strategy.local.traffic.total_bytes_sent)
    """

    options: LocalOptions
    local: LocalSGD | None = None
    _fused: FusedFit | None = None  # of a fit whose steps are fused

    @takes_keywords_of(StrategyArguments, LocalOptions)
    def __init__(self, every: int | Schedule = LocalOptions.every, **arguments: Any) -> None:
        given, options = split_keywords(StrategyArguments, arguments)
        super().__init__(LocalOptions.create(every=every, **options), given)
        self._has_trained = False  # since the last step of the optimizer

    @property
    def local_options(self) -> LocalOptions:
        """The options of the local steps."""
        return self.options

    @property
    def _exchange(self) -> LocalSGD | None:
        return self.local

    # Start and end

    def configure_ddp(self) -> None:
        """Wrap nothing: the local steps are built once there is an optimizer."""
        if self._transport is not None:
            self._transport.gather_objects(None)  # a site that has failed by now builds no local steps

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        if not self.lightning_module.automatic_optimization or len(self.optimizers) != 1:
            raise ValueError("local steps need automatic optimization and one optimizer; DADStrategy takes any module")
        scaled = getattr(self.precision_plugin, "scaler", None) is not None
        self.options = dataclasses.replace(self.options, check_finite=self.options.check_finite and not scaled)
        self.local = LocalSGD(self.lightning_module, self.optimizers[0], **vars(self.options))
        self._fused = None
        if self.options.fused:
            if reason := reason_against(trainer, self.precision_plugin, sites_may_leave=False):
                self.local.stop_fusing(reason)
            else:
                self._fused = FusedFit(self.local, self.precision_plugin)
        if self._states is not None:
            self.local.load_states([state and state["local"] for state in self._states])

    # Training

    def _samples_of(self, batch: Any) -> AbstractContextManager[Any]:
        context = super()._samples_of(batch)
        self._has_trained |= not self._weightless
        return context

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step the optimizer, and agree with the other sites if it is time."""
        step = super().optimizer_step
        if self.local is None:
            return step(optimizer, closure, model, **kwargs)
        trains, self._has_trained = self._has_trained or self._has_batch, False
        if trains or self.local.synchronous:
            with self.local.stepping():
                if self._fused is None:
                    output = step(optimizer, closure, model, **kwargs)
                else:
                    output = self._fused.take(optimizer, lambda: step(optimizer, closure, model, **kwargs))
        else:  # a batch that this site has had before, as its loader repeats it
            output = closure()
            self.local.idle()
        self._has_trained = False
        return output

    def _synchronize(self) -> None:
        if self._fused is not None and self._fused.optimizer is not None and self.local is not None:
            if self.local.syncing:
                self._fused.synchronize()
        else:
            super()._synchronize()

    def on_train_end(self) -> None:
        self._average_buffers()
        super().on_train_end()

    def _average_buffers(self) -> None:
        """Agree on one model, before an evaluation, a checkpoint, and at the end."""
        if self._in_fit and self.local is not None:
            self.local.finish()

    # Checkpoints

    def _add_states(self, checkpoint: dict[str, Any]) -> None:
        if self._in_fit:  # after an error, changes that are in transit would not arrive
            super()._add_states(checkpoint)

    def _own_state(self, exchange: Any) -> Any:
        return {"local": exchange.state_dict(), "optimizer": exchange.optimizer.state_dict()}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the state of this site's optimizer; that of site 0 if the checkpoint has no other."""
        states, self._states = self._states, None
        if states is not None and self.global_rank < len(states) and states[self.global_rank] is not None:
            checkpoint = dict(checkpoint) | {"optimizer_states": [states[self.global_rank]["optimizer"]]}
        super().load_optimizer_state_dict(checkpoint)
