"""Lightning's strategy for synchronous gradients, for either of Lightning's packages, neither of which it imports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ..errors import PrivacyError
from ..options import Options
from ..reduction import GradientReduction
from ..support.signature import takes_keywords_of
from ._lightning.strategy import HubStrategy, StrategyArguments


class DADStrategyBase(HubStrategy):
    """Lightning strategy that trains one model between sites; for ``Trainer(strategy=)``.

    Processes, samplers, metrics and evaluation are those of Lightning's ``DDPStrategy``. Gradients are agreed on at the
    end of each backward pass (the last one, with accumulation), before any hook, clipping or optimizer reads them.

    If the sites are connected already, by `dadplug.connect`, Lightning starts no processes: pass ``devices=1``. Sites
    may have different numbers of batches: a site with fewer repeats a batch with weight zero in some steps.

    With ``min_sites``, over a hub, training goes on without a site that leaves, and the site returns if its program is
    started again: it goes on at the batch of the epoch that the others are at, with their states of model, optimizer,
    schedules and callbacks. Metrics and collectives are those of the sites that are present. The first of them prints
    and logs, and each of them writes the checkpoints.

    `dadplug.DADStrategy` is the strategy for the one of Lightning's two packages that is in use;
    `dadplug.runners.lightning.DADStrategy` and `dadplug.runners.pytorch_lightning.DADStrategy` are those for a given
    package.

    Args:
        mode: name of a method, such as ``"dsgd"``, ``"dad"`` or ``"rankdad"``.
        fused: whether optimizer steps are those of `GradientReduction.apply`, which do not form the agreed gradients of
            factored weights: ``.grad`` of these stays None. The trainer's clipping by norm includes them. Where hooks,
            precision or the optimizer need the gradients, they are formed, and the plan says why.
        arguments: options of the gradient reduction, with the names and defaults of `dadplug.options.Options`, and
            arguments of ``DDPStrategy``: ``accelerator``, ``parallel_devices``, ``cluster_environment``,
            ``checkpoint_io``, ``precision_plugin``, ``process_group_backend``, ``start_method``.

    Attributes:
        options: the options of the gradient reduction.
        reduction: the `GradientReduction` of the last fit, with its plan and traffic; None before it.

    Raises:
        ValueError: if the mode, an option or its value is unknown; the message lists the valid ones. If there is no hub
            with ``min_sites``.
        RuntimeError: if both of Lightning's packages are imported and the strategy is not that of a given package.

    Example:
        >>> trainer = pl.Trainer(strategy=DADStrategy(mode="rankdad"), accelerator="cpu", devices=2)
        >>> trainer.fit(module, loader)
        >>> print(trainer.strategy.reduction.plan)
    """

    options: Options
    reduction: GradientReduction | None = None

    @takes_keywords_of(StrategyArguments, Options)
    def __init__(self, mode: str = "rankdad", *, fused: bool = False, **arguments: Any) -> None:
        super().__init__(Options, {"mode": mode} | arguments)
        self._wants_fused = fused

    # Start and end

    def configure_ddp(self) -> None:
        """Build the reduction, where DDP would wrap the model."""
        if getattr(self.precision_plugin, "scaler", None) is not None:  # it looks for Inf itself
            self.options = dataclasses.replace(self.options, check_finite=False)
        super().configure_ddp()
        state = None if self._elastic is None else {"trainer": self._elastic}
        self.reduction = GradientReduction(self.lightning_module, state=state, **dataclasses.asdict(self.options))
        self._exchange = self.reduction
        self._load_states()

    # Training

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run backward, and synchronize the gradients before any hook reads them.

        With `privacy` the loss is not divided by the number of micro-batches: the gradients of samples are clipped, and
        their sum is divided by the expected batch, which is that of all micro-batches.
        """
        module = self.lightning_module
        if self.options.privacy is not None and module.automatic_optimization:
            closure_loss = closure_loss * module.trainer.accumulate_grad_batches
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _synchronize(self) -> None:
        super()._synchronize()
        if self._stepping is None and self.reduction is not None and not self.reduction.contributors:
            self.lightning_module.zero_grad()  # no site has a loss: optimizers leave the weights, as in one process

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step an optimizer; one that uses the loss gets the mean over sites, so that all sites decide alike."""
        if self._transport is not None and isinstance(getattr(optimizer, "_optimizer", optimizer), torch.optim.LBFGS):
            closure = self._with_mean_loss(closure)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _with_mean_loss(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        if self.options.privacy is not None:
            raise PrivacyError("LBFGS decides by losses, which sites would share: take another optimizer with privacy")

        def agreed() -> Any:
            loss = closure()
            assert self._transport is not None
            assert self.reduction is not None
            value = None if loss is None else float(loss)
            losses = self._transport.gather_objects((value, self.reduction.share or 0.0))
            if any(value is None for value, _ in losses):
                return loss
            return torch.as_tensor(sum(value * share for value, share in losses), dtype=loss.dtype, device=loss.device)

        return agreed

    def _make_equal(self) -> None:
        if self._in_fit and self.reduction is not None and self.options.average_buffers:
            self.reduction.average_buffers()
