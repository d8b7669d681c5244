"""Optimizer steps of a fit on gradients that are not formed: where that is possible, and the trainer's clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...reduction import GradientReduction

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
def clipping(precision: Any, reduction: GradientReduction) -> Iterator[None]:
    """Clip gradients by norm, in a step, together with those that are held.

    Args:
        precision: the trainer's precision plugin.
        reduction: the reduction.
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
