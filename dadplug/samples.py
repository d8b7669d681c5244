"""Counts the samples that a backward pass stands for: a site's share in the mean over sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class SampleCounter:
    """Counts the samples of a model's forward passes once backward runs through them.

    The batch is taken to be the first dimension of the first tensor among the inputs of the outermost call: of the
    model, or of one of its direct children where the model itself is never called, as in a Lightning module.

    Args:
        model: the model.
        on_forward: called before every outermost forward that backward may follow.

    Attributes:
        count: samples that backward has reached since the last `reset`.
        current: samples of the forward pass that is running; 0 outside of one.
    """

    def __init__(self, model: nn.Module, on_forward: Callable[[], None]) -> None:
        self._on_forward = on_forward
        self.count = 0
        self.current = 0
        self._depth = 0
        self._fixed: int | None = None
        self._handles: list[Any] = []
        for module in (model, *model.children()):
            self._handles.append(module.register_forward_pre_hook(_Before(self), with_kwargs=True))
            self._handles.append(module.register_forward_hook(_After(self), always_call=True))

    @contextmanager
    def fixed(self, samples: int) -> Iterator[None]:
        """Counts this many samples for the backward passes inside, whatever the inputs look like."""
        self._fixed = samples
        try:
            yield
        finally:
            self._fixed = None

    def reset(self) -> None:
        """Starts counting anew."""
        self.count = 0

    def detach(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def enter(self, inputs: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            if torch.is_grad_enabled():
                self._on_forward()
            sized = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0)
            first = next(sized, None)
            self.current = self._fixed if self._fixed is not None else 1 if first is None else first.shape[0]

    def leave(self, outputs: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        samples, self.current = self.current, 0
        if not torch.is_grad_enabled():
            return
        reached = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        counted = False

        def count(_: Tensor) -> None:
            nonlocal counted
            if not counted:
                counted = True
                self.count += samples

        for output in reached:
            output.register_hook(count)


class _Before:
    """A hook that a copied or pickled model leaves behind."""

    def __init__(self, counter: SampleCounter) -> None:
        self._counter = counter

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._counter.enter((args, kwargs))

    def __reduce__(self) -> Any:
        return _Nothing, ()


class _After(_Before):
    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> None:  # type: ignore[override]
        self._counter.leave(outputs)


class _Nothing:
    def __call__(self, *args: Any) -> None:
        pass
