"""Lightning's strategy for local steps, for either of Lightning's packages, neither of which it imports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..local_steps import LocalOptions, LocalSGD
from ..local_steps.options import Schedule
from ..support.signature import takes_keywords_of
from ._lightning.strategy import HubStrategy, StrategyArguments


class LocalSGDStrategyBase(HubStrategy):
    """Lightning strategy for local steps (local SGD, DiLoCo); for ``Trainer(strategy=)``, also as ``"localsgd"``.

    Sites train alone for ``every`` steps and then agree on their parameters; ``"diloco"`` has DiLoCo's outer optimizer.
    Before an evaluation, in checkpoints and at the end of a fit the sites agree, so that they hold one model there.
    Processes, samplers, metrics and evaluation are those of Lightning's ``DDPStrategy``. Sites may have different
    numbers of batches: a site with fewer takes no step in some of the others' steps. The module needs automatic
    optimization and one optimizer. With ``fused=True``, ``gradient_clip_val`` by norm includes gradients that are not
    formed; where hooks, precision or clipping by value need gradients, they are formed, and ``local.remarks`` says why.

    With ``min_sites``, over a hub, training goes on without a site that leaves, and the site returns if its program is
    started again, as with `DADStrategy`: it goes on at the batch of the epoch that the others are at, with the agreed
    model, and the states of optimizer, schedules and callbacks of one of them.

    `dadplug.LocalSGDStrategy` is the strategy for the one of Lightning's two packages that is in use.

    Args:
        every: steps between two agreements, or a function of the number of steps so far that returns them.
        arguments: options of the local steps, with the names and defaults of `dadplug.local_steps.LocalOptions`, and
            arguments of ``DDPStrategy``, as in `DADStrategy`.

    Attributes:
        options: the options of the local steps, also as `local_options`.
        local: the `LocalSGD` of the last fit, with its traffic; None before it.

    Raises:
        ValueError: if an option or its value is unknown; the message lists the valid ones. If there is no hub with
            ``min_sites``.

    Example:
        >>> trainer = pl.Trainer(strategy=LocalSGDStrategy(every=64, wire="int8"), accelerator="cpu", devices=2)
        >>> trainer.fit(module, loader)
        >>> print(trainer.strategy.local.traffic.total_bytes_sent)
    """

    options: LocalOptions
    local: LocalSGD | None = None
    _steps_in_backward = False

    @takes_keywords_of(StrategyArguments, LocalOptions)
    def __init__(self, every: int | Schedule = LocalOptions.every, **arguments: Any) -> None:
        super().__init__(LocalOptions, {"every": every} | arguments)
        self._wants_fused = self.options.fused
        self._has_trained = False  # since the last step of the optimizer

    @property
    def local_options(self) -> LocalOptions:
        """The options of the local steps."""
        return self.options

    def _build(self) -> None:
        self._check_one_optimizer()
        scaled = getattr(self.precision_plugin, "scaler", None) is not None
        self.options = dataclasses.replace(self.options, check_finite=self.options.check_finite and not scaled)
        state = None if self._elastic is None else {"trainer": self._elastic}
        self.local = self._exchange = LocalSGD(
            self.lightning_module, self.optimizers[0], state=state, in_trainer=True, **vars(self.options)
        )
        joins = self._transport is not None and self._transport.joins  # others, whose state is newer
        if self._states is not None and not joins:
            self.local.load_states([state and state["local"] for state in self._states])

    # Training

    def _samples_of(self, batch: Any) -> AbstractContextManager[Any]:
        context = super()._samples_of(batch)
        self._has_trained |= not self._weightless
        return context

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step the optimizer, and agree with the other sites if it is time."""
        if self.local is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        trains, self._has_trained = self._has_trained or self._has_batch, False
        if trains or self.local.synchronous:
            with self.local.stepping():
                output = super().optimizer_step(optimizer, closure, model, **kwargs)
        else:  # a batch that this site has had before, as its loader repeats it
            output = closure()
            self.local.idle()
        self._end_step()
        self._has_trained = False
        return output

    def on_train_end(self) -> None:
        self._make_equal()
        super().on_train_end()

    def _make_equal(self) -> None:
        """Agree on one model, before an evaluation, a checkpoint, and at the end."""
        if self._in_fit and self.local is not None:
            self.local.finish()

    # Checkpoints

    def _add_states(self, checkpoint: dict[str, Any]) -> None:
        if self._in_fit:  # after an error, changes that are in transit would not arrive
            super()._add_states(checkpoint)

    def _own_state(self) -> Any:
        return {"local": self._exchange.state_dict(), "optimizer": self._exchange.optimizer.state_dict()}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the state of this site's optimizer; that of site 0 if the checkpoint has no other."""
        super().load_optimizer_state_dict(self._with_own_optimizer(checkpoint))
