"""Optimizer steps of Catalyst's callbacks on gradients that are not formed: where that is possible, and clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from catalyst.core.callback import Callback, CallbackOrder, CallbackWrapper

from ...fused import HeldGradients
from .base_runner import BaseRunner
from .fixes import FixedBackward, FixedOptimizer

_CLIPPING = {"max_norm", "norm_type"}


class FusedCallbacks:
    """Backward and optimizer callbacks of a run whose steps may be fused.

    Args:
        callbacks: the callbacks of the run.
        reduction: the reduction, whose plan gets remarks, or the local steps.
        refused: why steps cannot be fused whatever the callbacks are; empty if they can.

    Attributes:
        reason: why steps are not fused; empty if they are.
    """

    def __init__(self, callbacks: Iterable[Callback], reduction: HeldGradients, refused: str = "") -> None:
        self._reduction = reduction
        chosen = [each for each in callbacks if CallbackOrder.Backward <= each.order <= CallbackOrder.Optimizer]
        self._stepping = [each for each in chosen if type(each) is FixedOptimizer]
        reason = refused or next(filter(None, map(_reason_against, chosen)), "")
        if not reason and not self._stepping:
            reason = "there is no OptimizerCallback"
        self.reason = reason
        self._known = False  # whether the optimizers are known, and the remarks name their weights
        if reason:
            reduction.remarks = (f"fused steps: no, {reason}",)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that step after the next backward pass; none where gradients are formed."""
        if self.reason:
            return []
        found = [plain(callback.optimizer) for callback in self._stepping]
        if not self._known:
            self._known = True
            self._reduction.remark_on(found)
        return found

    def clip(self, function: Callable[[Any], Any]) -> Any:
        """Clip the gradients, held ones among them, by a function that `_reason_against` has accepted."""
        assert isinstance(function, partial)
        return self._reduction.clip_held(self._reduction.model.parameters(), **function.keywords)


class FusedRunner(BaseRunner):
    """Catalyst runner whose optimizer steps may be fused."""

    _fused: FusedCallbacks | None = None

    @property
    def _fuses(self) -> bool:
        """Whether the user asks for fused steps."""
        raise NotImplementedError

    def _reason_against_fusing(self) -> str:
        """Return why steps cannot be fused whatever the callbacks are; empty if they can."""
        return "" if getattr(self.engine, "scaler", None) is None else "a GradScaler scales the loss"

    def _setup_callbacks(self) -> None:
        super()._setup_callbacks()
        self._fused = None
        if self._fuses and self.engine.reduction is not None:
            self._fused = FusedCallbacks(self.callbacks.values(), self.reduction, self._reason_against_fusing())
            self.engine.fused_optimizers = self._fused.optimizers

    def clip_gradients(self, function: Callable[[Any], Any]) -> Any:
        """Clip the agreed gradients by a function of the parameters, held ones among them; return what it returns."""
        if self._fused is not None and self.reduction.holds:
            return self._fused.clip(function)
        return super().clip_gradients(function)

    def step_optimizer(self, optimizer: Any) -> None:
        """Step an optimizer with the agreed gradients, held ones among them."""
        if self._fused is not None and self.reduction.holds:
            self.reduction.apply_held(plain(optimizer), optimizer.step)
        else:
            super().step_optimizer(optimizer)


def plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that Accelerate has wrapped."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _reason_against(callback: Callback) -> str:
    """Return why gradients are formed for a callback from backward to the step; empty if they need not be."""
    inner = callback.callback if isinstance(callback, CallbackWrapper) else callback
    if type(callback) not in (FixedBackward, FixedOptimizer):
        return f"{type(inner).__name__} may read the gradients"
    clip = callback.grad_clip_fn
    if clip is None:
        return ""
    known = isinstance(clip, partial) and clip.func is torch.nn.utils.clip_grad_norm_ and not clip.args
    return "" if known and clip.keywords.keys() <= _CLIPPING else "gradients are not clipped by clip_grad_norm_"
