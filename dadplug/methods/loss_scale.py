"""Loss scale of gradients, observed at `torch.amp.GradScaler` without a call by the program.

Error memory and rounding memory are kept in units of the unscaled gradient, since a scaler may change its scale
between two steps. The scale of a gradient is that of the backward pass in which it arrives.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.utils._pytree import tree_leaves


class LossScale:
    """Loss scale, and the scaler that it comes from.

    Args:
        value: the scale.
        scaler: the scaler; None where the program has stated the scale.
    """

    def __init__(self, value: float, scaler: GradScaler | None = None) -> None:
        self.value = value
        self._scaler = None if scaler is None else weakref.ref(scaler)

    def now(self) -> float:
        """Return the present scale of the scaler, or the last known one if the scaler has been deleted."""
        scaler = None if self._scaler is None else self._scaler()
        return self.value if scaler is None else scaler.get_scale()


class _Backward:
    """Backward pass of a scaled loss."""

    def __init__(self, scale: LossScale) -> None:
        self.scale = scale

    def finish(self) -> None:
        """Do nothing: autograd holds this method, and so the object, until the backward pass has ended or failed."""


class LossScales:
    """Loss scales of the present step's gradients, by name of the unit."""

    def __init__(self) -> None:
        self._stated: LossScale | None = None
        self._last = LossScale(1.0)
        self._known: dict[str, LossScale] = {}
        self._arrived: set[str] = set()

    def record(self, name: str) -> None:
        """Record that a unit's gradient has arrived in the backward pass that is running."""
        self._last = self._known[name] = self._stated or running()
        self._arrived.add(name)

    def of(self, name: str) -> float:
        """Return the scale of a unit's gradient; of one without a gradient in this step, the scale it would have."""
        known = self._known.get(name, self._last)
        return known.value if name in self._arrived else known.now()

    def end_step(self) -> None:
        """Forget which gradients have arrived."""
        self._arrived.clear()

    @contextmanager
    def stated(self, value: float) -> Iterator[None]:
        """Use this scale for all gradients that arrive inside, instead of a scaler's; a context manager."""
        before, self._stated = self._stated, LossScale(value)
        try:
            yield
        finally:
            self._stated = before


_UNSCALED = LossScale(1.0)
_running: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()  # by its number
_watchers = 0
_scale: Callable[[GradScaler, Any], Any] | None = None  # the method of torch, while ours is in its place


def running() -> LossScale:
    """Return the loss scale of the running backward pass; a nested one, as for a checkpoint, has the outer scale."""
    found = _running.get(torch._C._current_graph_task_id()) or next(reversed(list(_running.values())), None)
    return _UNSCALED if found is None else found.scale


def watch() -> None:
    """Observe all scalers of the process, until `unwatch` has been called as often."""
    global _watchers, _scale
    _watchers += 1
    if _scale is None:
        _scale = GradScaler.scale
        GradScaler.scale = _observed(_scale)  # type: ignore[method-assign, assignment]


def unwatch() -> None:
    """End what `watch` began; the last call restores the scaler's method."""
    global _watchers, _scale
    _watchers -= 1
    if not _watchers and getattr(GradScaler.scale, "__wrapped__", None) is _scale:  # nobody has wrapped it since
        GradScaler.scale, _scale = _scale, None  # type: ignore[method-assign, assignment]


def _observed(scale: Callable[[GradScaler, Any], Any]) -> Callable[[GradScaler, Any], Any]:
    @functools.wraps(scale)
    def observe(self: GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if _watchers and self.is_enabled():
            found = LossScale(self.get_scale(), self)
            for leaf in tree_leaves(scaled):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(functools.partial(_begin, found))
        return scaled

    return observe


def _begin(scale: LossScale, _: Tensor) -> None:
    """Attach a scale to the backward pass that is running."""
    backward = _running[torch._C._current_graph_task_id()] = _Backward(scale)
    torch.autograd.Variable._execution_engine.queue_callback(backward.finish)
