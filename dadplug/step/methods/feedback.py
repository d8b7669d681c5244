"""Memories of what a lossy method did not send in one step, which is added to the next step's gradient; loss scales.

Error feedback: arXiv:1901.09847 (error feedback fixes sign descent and other compression), section 4.

The memories are kept in units of the unscaled gradient, since a scaler may change its scale between two steps. The
loss scale of a gradient is that of the backward pass in which it arrives. It is observed at `torch.amp.GradScaler`
without a call by the program.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.utils._pytree import tree_leaves

from ...exchange.wire import rescale


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
    """Loss scales of the present step's gradients, by name of the unit.

    Attributes:
        scaled: whether a loss of this process has ever had a scale; before that, every gradient has the scale 1.
    """

    scaled = False

    def __init__(self) -> None:
        self._stated: LossScale | None = None
        self._last = LossScale(1.0)
        self._known: dict[str, LossScale] = {}
        self._arrived: set[str] = set()

    def present(self) -> LossScale:
        """Return the scale of the backward pass that is running."""
        return self._stated or running()

    def record(self, name: str) -> None:
        """Record that a unit's gradient has arrived in the backward pass that is running."""
        self._last = self._known[name] = self._stated or (running() if _running else _UNSCALED)
        self._arrived.add(name)

    def adopt(self, name: str, value: float) -> None:
        """Record that a unit has the gradient of another process of the site, with its scale, and none of this one."""
        LossScales.scaled |= value != 1.0
        if name not in self._arrived:
            self._last = self._known[name] = copy.copy(self._known.get(name, self._last))
            self._last.value = value
            self._arrived.add(name)

    def of(self, name: str) -> float:
        """Return the scale of a unit's gradient; of one without a gradient in this step, the scale it would have."""
        known = self._known.get(name, self._last)
        return known.value if name in self._arrived else (self._stated or known).now()

    def end_step(self) -> None:
        """Forget which gradients have arrived."""
        self._arrived.clear()

    @contextmanager
    def stated(self, value: float) -> Iterator[None]:
        """Use this scale for all gradients that arrive inside, instead of a scaler's; a context manager."""
        before, self._stated = self._stated, LossScale(value)
        LossScales.scaled = True
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
    if not _running:  # to look into it takes ten times as long
        return _UNSCALED
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
    if not _watchers and getattr(GradScaler.scale, "__wrapped__", None) is _scale:  # it has not been wrapped since
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
    LossScales.scaled = True
    backward = _running[torch._C._current_graph_task_id()] = _Backward(scale)
    torch.autograd.Variable._execution_engine.queue_callback(backward.finish)


class ErrorFeedback:
    """Error memory: the part of each weight's gradients that has not been sent yet, without the loss scale.

    It is in units of the mean over sites, so that nothing is lost or added where a site's weight changes. A step may
    prepare the next memory beside the present one: `prepare` returns a buffer for it, `commit` makes it the
    present one, `rollback` drops it.

    Args:
        enabled: whether anything is kept at all.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._errors: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}

    def of(self, name: str, like: Tensor) -> Tensor:
        """Return the memory of a weight, of the shape of `like`, to be changed in place; zeros where there is none."""
        error = self.find(name, like)
        if error is None:
            error = self._errors[name] = torch.zeros_like(like, memory_format=torch.contiguous_format)
        return error

    def find(self, name: str, like: Tensor, shape: tuple[int, ...] | None = None) -> Tensor | None:
        """Return the memory of a weight, the staged one where there is one; None where nothing is kept.

        Args:
            name: the name of the weight.
            like: a tensor of its type and device.
            shape: the shape of the memory; that of `like` where None.
        """
        kept = self._staged if name in self._staged else self._errors
        error = kept.get(name) if self.enabled else None
        if error is None or error.shape != (shape or like.shape) or error.dtype != like.dtype:
            return None
        if error.device != like.device:
            error = kept[name] = error.to(like.device)
        return error

    def prepare(self, name: str, like: Tensor, shape: tuple[int, ...] | None = None) -> tuple[Tensor | None, Tensor]:
        """Return what `find` does, and a buffer for the next memory, to be filled by the caller.

        The two may be the same, in a further call of a step.
        """
        shape, staged = shape or tuple(like.shape), self._staged.get(name)
        error = (self._errors.get(name) if staged is None else staged) if self.enabled else None
        if error is not None and (error.shape != shape or error.dtype != like.dtype or error.device != like.device):
            error = self.find(name, like, shape)  # moved to the device, or None
        if staged is None:
            staged = self._spare.pop(name, None)
        if staged is None or staged.shape != shape or staged.dtype != like.dtype or staged.device != like.device:
            staged = like.new_empty(shape)
        self._staged[name] = staged
        return error, staged

    def commit(self, name: str, scale: float = 1.0, expected: float = 1.0) -> None:
        """Make the staged memory of a weight the present one; see `dadplug.exchange.wire.rescale`."""
        staged = self._staged.pop(name, None)
        if staged is None:
            return
        before = self._errors.get(name)
        if not scale == expected == 1.0:
            rescale(staged, before, scale, expected)
        if self.enabled:
            self._errors[name] = staged
        else:
            before = staged
        if before is not None:
            self._spare[name] = before

    def add(self, name: str, factor: float, rows: tuple[Tensor, Tensor] | None) -> None:
        """Add the present memory of a weight, and a product of rows, to the staged one, times a factor."""
        staged, before = self._staged.get(name), self._errors.get(name)
        if staged is not None and before is not None and before.shape == staged.shape:
            staged.add_(before, alpha=factor)
            if rows is not None:
                staged.addmm_(rows[0].T.to(staged), rows[1].to(staged), alpha=factor)

    def rollback(self, name: str) -> None:
        """Drop the staged memory of a weight."""
        staged = self._staged.pop(name, None)
        if staged is not None:
            self._spare[name] = staged

    def update(self, other: ErrorFeedback) -> None:
        """Take over the memory of another object, in place of what is here of the same weights."""
        self._errors |= other._errors

    def forget(self, name: str) -> None:
        """Drop the memory of a weight, and its buffers."""
        for kept in (self._errors, self._staged, self._spare):
            kept.pop(name, None)

    def retain(self, names: Container[str]) -> None:
        """Drop the memory of all other weights."""
        for name in [name for name in self._errors if name not in names]:
            self.forget(name)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the memory."""
        return {"errors": {name: error.clone() for name, error in self._errors.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._errors = {name: error.clone() for name, error in state["errors"].items()}
