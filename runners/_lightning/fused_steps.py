"""Optimizer steps of a fit on gradients that are not formed: where that is possible, and the trainer's clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...fused import HeldGradients

_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_MODULE_HOOKS = (*_HOOKS, "configure_gradient_clipping", "optimizer_step")
_LIGHTNING = ("lightning", "pytorch_lightning")


def reason_against(trainer: Any, precision: Any, sites_may_leave: bool) -> str:
    """Return why a fit's gradients have to be formed before the optimizer's step; empty if they need not be.

    Args:
        trainer: the trainer.
        precision: its precision plugin.
        sites_may_leave: whether training goes on without a site that leaves.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return "manual optimization"
    if sites_may_leave:
        return "sites may leave, by min_sites"
    if getattr(precision, "scaler", None) is not None:
        return "a GradScaler scales the loss"
    if trainer.gradient_clip_val and "VALUE" in str(trainer.gradient_clip_algorithm).upper():
        return "gradients are clipped by value"
    for owner, names in [(module, _MODULE_HOOKS), *((callback, _HOOKS) for callback in trainer.callbacks)]:
        for name in names:
            if _overrides(owner, name):
                return f"{type(owner).__name__}.{name} may read the gradients"
    return ""


def _overrides(owner: Any, name: str) -> bool:
    """Return whether a hook is not that of Lightning's base class."""
    if name in vars(owner):
        return True
    found = next((each for each in type(owner).__mro__ if name in vars(each)), None)
    return found is not None and not (
        found.__module__.split(".")[0] in _LIGHTNING and found.__name__ in ("Callback", "LightningModule", "ModelHooks")
    )


@contextmanager
def clipping(precision: Any, reduction: HeldGradients) -> Iterator[None]:
    """Clip gradients by norm, in a step, together with those that are held.

    Args:
        precision: the trainer's precision plugin.
        reduction: the reduction, or the local steps.
    """
    plain: Callable[..., Any] = precision.clip_grad_by_norm

    def clip(optimizer: Any, clip_val: float) -> None:
        if reduction.holds:
            reduction.clip_held(precision.main_params(optimizer), clip_val)
        else:
            plain(optimizer, clip_val)

    precision.clip_grad_by_norm = clip
    try:
        yield
    finally:
        del precision.clip_grad_by_norm


class FusedFit:
    """Optimizer steps of a fit on gradients that are held, and not formed.

    Args:
        exchange: the reduction, or the local steps, which hold them.
        precision: the trainer's precision plugin.

    Attributes:
        optimizer: the optimizer whose step is being taken; None between steps.
    """

    def __init__(self, exchange: HeldGradients, precision: Any) -> None:
        self._exchange, self._precision = exchange, precision
        self.optimizer: torch.optim.Optimizer | None = None

    def synchronize(self) -> None:
        """Synchronize after a backward pass in `take`, and hold the gradients that need not be formed."""
        assert self.optimizer is not None
        self._exchange.hold(self.optimizer)

    def take(self, optimizer: Any, step: Callable[[], Any]) -> Any:
        """Take a step.

        Args:
            optimizer: the optimizer.
            step: takes the trainer's step, with forward, backward and clipping; ordinary for what is not held.
        """
        self.optimizer = optimizer
        try:
            with clipping(self._precision, self._exchange):
                result = step()
        finally:
            self.optimizer = None
        self._exchange.apply_held(optimizer)
        return result
