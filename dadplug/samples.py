"""Counts the samples that a backward pass stands for: a site's share in the mean over sites."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
        current: samples of the forward pass that is running; 0 outside of one.
    """

    def __init__(self, model: nn.Module, on_forward: Callable[[], None]) -> None:
        self._on_forward = on_forward
        self.current = 0
        self._of_model = self._of_parts = 0
        self._depth = 0
        self._said: _Said | None = None
        self._inside = False
        self._handles: list[Any] = []
        for module in (model, *model.children()):
            self._handles.append(module.register_forward_pre_hook(_Before(self), with_kwargs=True))
            self._handles.append(module.register_forward_hook(_After(self, module is model), always_call=True))

    @property
    def count(self) -> int:
        """Samples that backward has reached since the last `reset`: by calls of the model, else of its children."""
        return self._of_model or self._of_parts

    @contextmanager
    def fixed(self, samples: int) -> Iterator[None]:
        """Counts this many samples, once, for the forward passes inside, whatever the inputs look like."""
        before, inside = self._said, self._inside
        self._said, self._inside = _Said(samples), True
        try:
            yield
        finally:
            self._inside = inside
            if inside:
                self._said = before

    @property
    def said(self) -> int | None:
        """What the last `fixed` said, where the step's backward passes have not come through a call of the model."""
        return None if self._said is None else self._said.samples

    def of_step(self, pending: bool, *, by_samples: bool, alone: bool) -> int:
        """Tells what a site's gradients weigh.

        Args:
            pending: whether it has any in this step.
            by_samples: whether they weigh by samples; otherwise 1, or 0 if they stand for none.
            alone: whether there is no other site, so that nobody need be told if samples cannot be.
        """
        count = self.count
        if count == 0 and pending:
            if self.said is not None:
                count = self.said
            else:
                count = 1
                if by_samples and not alone:
                    warnings.warn(
                        "cannot tell how many samples a step has, since the loss does not come from a call of the "
                        "model; each site counts the same. Say it by `with reduction.samples(n):` around forward",
                        stacklevel=4,
                    )
        return count if by_samples else int(pending and count > 0)

    def reset(self) -> None:
        """Starts counting anew."""
        self._of_model = self._of_parts = 0
        if self._inside and self._said is not None:
            self._said = _Said(self._said.samples)
        else:
            self._said = None

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
            self.current = batch_size(inputs) or 1
            if self._inside and self._said is not None:
                self.current = self._said.samples

    def leave(self, outputs: Any, of_model: bool) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        samples, self.current = self.current, 0
        if not torch.is_grad_enabled():
            return
        reached = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        said = self._said if self._inside and self._said is not None else _Said(samples)

        def count(_: Tensor) -> None:
            if not said.counted:
                said.counted = True
                if of_model:
                    self._of_model += samples
                else:
                    self._of_parts += samples

        for output in reached:
            output.register_hook(count)


@dataclass
class _Said:
    """A number of samples that is to be counted once."""

    samples: int
    counted: bool = False


def batch_size(batch: Any) -> int | None:
    """Tells the first dimension of the first tensor in a batch; None where there is none."""
    sized = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0)
    first = next(sized, None)
    return None if first is None else first.shape[0]


class _Before:
    """A hook that a copied or pickled model leaves behind."""

    def __init__(self, counter: SampleCounter) -> None:
        self._counter = counter

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._counter.enter((args, kwargs))

    def __reduce__(self) -> Any:
        return _Nothing, ()


class _After(_Before):
    def __init__(self, counter: SampleCounter, of_model: bool) -> None:
        super().__init__(counter)
        self._of_model = of_model

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> None:  # type: ignore[override]
        self._counter.leave(outputs, self._of_model)


class _Nothing:
    def __call__(self, *args: Any) -> None:
        pass
