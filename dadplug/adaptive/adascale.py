"""AdaScale: learning rates for batches larger than the one for which they were chosen. Source: arXiv:2007.05105."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from .adaptive_loader import GradientSource

_RULES: dict[type[Optimizer], str] = {SGD: "linear", Adam: "sqrt", AdamW: "sqrt", RMSprop: "sqrt"}


class AdaScale:
    """Scaling of the learning rate by AdaScale's gain, as a wrapper of any scheduler.

    A step with a batch larger than the base batch is worth more than one with the base batch, but less than the ratio
    of the two: how many it is worth, the gain, follows from the gradient's noise. In every step of the optimizer, its
    learning rates are multiplied by the gain (SGD) or the square root of the gain (Adam, AdamW, RMSprop). Before and
    after it, ``param_groups`` have the learning rates of the scheduler. `progress` counts the steps with the base
    batch that have been made up for, and the scheduler follows it.

    Args:
        optimizer: the optimizer.
        reduction: the reduction of the gradients; its noise is estimated from now on.
        scheduler: a scheduler of the optimizer, or None.
        base_batch: samples of all sites in a step for which the learning rate has been chosen. Where None, it is what
            ``reduction.noise.base_batch`` says, which an adaptive loader sets, or else the batch of the first step.
        scheduler_every: progress after which the scheduler makes a step: 1.0 for a scheduler that makes one in every
            step of the optimizer, ``len(dataset) / base_batch`` for one that makes one in every epoch.
        rule: ``"linear"`` to multiply by the gain, ``"sqrt"`` by its square root; None to choose by the optimizer.

    Attributes:
        optimizer: the optimizer.
        scheduler: the scheduler, or None.
        progress: sum of the gains of the optimizer's steps.
        gain: gain of the optimizer's last step.
        factor: number by which the learning rates were multiplied in it.

    Raises:
        ValueError: if it is not known how the learning rate of the optimizer is to be scaled, or an argument is out of
            its range.

    Example:
        >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
        >>> scaler = dadplug.AdaScale(optimizer, reduction, scheduler, base_batch=64)
        >>> while scaler.progress < 1000:
        ...     train(*next(batches))  # backward, reduction.synchronize(), optimizer.step()
        ...     scaler.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reduction: GradientSource,
        scheduler: Any = None,
        *,
        base_batch: int | None = None,
        scheduler_every: float = 1.0,
        rule: str | None = None,
    ) -> None:
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner  # of a trainer's wrapper, which calls its step
        self._rule = _rule_of(optimizer, rule)
        if base_batch is not None and (not isinstance(base_batch, int) or base_batch < 1):
            raise ValueError(f"base_batch must be a whole number of at least 1, got {base_batch!r}")
        if not scheduler_every > 0.0:
            raise ValueError(f"scheduler_every must be a number over 0, got {scheduler_every!r}")
        self.optimizer, self.scheduler = optimizer, scheduler
        self.progress = 0.0
        self.gain = self.factor = 1.0
        self._noise = reduction.noise
        if base_batch is not None:
            self._noise.base_batch = base_batch
        self._every = scheduler_every
        self._scheduled = 0  # steps of the scheduler
        self._rates: list[Any] | None = None  # learning rates while they are scaled
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    # Hooks of the optimizer

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Scale the learning rates; with a closure, after it has computed the gradients."""
        self._restore()  # the last step may have failed
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first one is the optimizer
        if closure is None:
            self._scale()
            return None
        scaled = self._after(closure)
        return ((args[0], scaled, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": scaled})

    def _after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def scaled() -> Any:
            result = closure()
            self._scale()
            return result

        return scaled

    def _scale(self) -> None:
        if self._noise.base_batch is None and self._noise.batch:
            self._noise.base_batch = self._noise.batch
        self.gain = self._noise.gain()
        self.factor = self.gain if self._rule == "linear" else math.sqrt(self.gain)
        if self._rates is None:
            self._rates = [group["lr"] for group in self.optimizer.param_groups]
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * self.factor

    def _after_step(self, *_: Any) -> None:
        if self._rates is not None:
            self._restore()
            self.progress += self.gain

    def _restore(self) -> None:
        if self._rates is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=False):
                group["lr"] = rate
            self._rates = None

    # As a scheduler

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Let the scheduler make as many steps as the progress says; call it after the optimizer's step.

        Args:
            args: positional arguments of the scheduler's ``step``, such as a metric.
            kwargs: its keyword arguments.
        """
        due = math.floor(self.progress / self._every + 1e-9)
        while self._scheduled < due:
            self._scheduled += 1
            if self.scheduler is not None:
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the parameter groups, as the scheduler has set them."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return progress and base batch, and the state of the scheduler."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {
            "progress": self.progress,
            "scheduled": self._scheduled,
            "base_batch": self._noise.base_batch,
            "scheduler": scheduler,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: the state.
        """
        self.progress, self._scheduled = state["progress"], state["scheduled"]
        self._noise.base_batch = state["base_batch"]
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])

    def detach(self) -> None:
        """Remove the hooks from the optimizer, whose learning rates are not scaled any more. May be called twice."""
        self._restore()
        for hook in self._hooks:
            hook.remove()


def _rule_of(optimizer: Optimizer, rule: str | None) -> str:
    """Return the rule by which the learning rate of an optimizer is scaled."""
    if rule not in (None, "linear", "sqrt"):
        raise ValueError(f"rule must be 'linear', 'sqrt' or None, got {rule!r}")
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"AdaScale needs a torch.optim.Optimizer, got {type(optimizer).__name__}")
    found = rule or next((each for kind, each in _RULES.items() if isinstance(optimizer, kind)), None)
    if found is None:
        known = ", ".join(kind.__name__ for kind in _RULES)
        raise ValueError(
            f"AdaScale does not know how to scale the learning rate of {type(optimizer).__name__}: it knows {known}. "
            "State it by rule='linear' (as for SGD) or rule='sqrt' (as for Adam), or use one of these"
        )
    return found
