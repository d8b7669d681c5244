"""The end of backward passes, at which gradients are synchronized without a call of the program."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class BackwardEnd:
    """Calls a function at the end of each backward pass that reaches a model, once a pass.

    Where one pass runs inside of another one, as with reentrant checkpoints, the outer one counts.

    Args:
        model: the model.
        end: called at the end of a pass.
        misses: returns whether parameters have gradients of which `arrived` was not called.
        wants: returns whether the running pass is to be followed, such as outside of ``no_sync``.

    Attributes:
        end: as the argument.
        wants: as the argument.
        expects: whether passes are followed at all.
        forward_decides: whether a pass through the outputs of a forward pass is followed wherever `expects` was True in
            the forward pass, as with torch's DistributedDataParallel, whatever `wants` returns in the backward pass.
    """

    def __init__(
        self, model: nn.Module, end: Callable[[], None], misses: Callable[[], bool], wants: Callable[[], bool]
    ) -> None:
        self._model, self._misses = model, misses
        self.end, self.wants = end, wants
        self.expects, self.forward_decides = True, False
        self._queued = -1  # the backward pass at whose end the function is called
        self._arrives = False  # whether that pass has reached a parameter, or cannot reach one

    def begin(self) -> None:
        """Forget a backward pass that has failed; called before a forward pass."""
        if torch._C._current_graph_task_id() == -1:
            self._queued = -1

    def watch(self, outputs: Sequence[Tensor], samples: int, inputs: Any) -> None:
        """Follow a backward pass through outputs also where it reaches no parameter of the model.

        Other sites may use some of them in this step. Where the outputs depend on parameters, a pass that reaches none
        is one of `torch.autograd.grad`, which is not followed.

        Args:
            outputs: outputs of a forward pass that require gradients.
            samples: without effect.
            inputs: inputs of the forward pass.
        """
        if not self.expects or torch._C._current_graph_task_id() != -1:  # a checkpoint computes anew
            return
        given = any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(inputs))
        unused = given and not _depends(outputs, {id(each) for each in self._model.parameters()})
        if unused and not any(each.requires_grad for each in self._model.parameters()):
            return

        reference = weakref.ref(self)  # the graph may belong to the model, as where this stores its loss

        def reached(*_: Any) -> None:
            this = reference()
            if this is not None and (this.forward_decides or this.wants()):
                this._queue()
                this._arrives |= unused

        for output in outputs:
            if output.grad_fn is not None:  # a parameter or an input lasts longer than the pass
                output.grad_fn.register_prehook(reached)

    def arrived(self) -> None:
        """Record that the running backward pass has reached a parameter."""
        if self._queued == -1 and self.expects and self.wants():
            self._queue()  # where one pass runs inside of another one, the outer one is queued: it reached the outputs
        self._arrives = True

    def _queue(self) -> None:
        """Call the function at the end of the backward pass that is running, once."""
        now = torch._C._current_graph_task_id()
        if now != self._queued:
            self._queued, self._arrives = now, False
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        due = self._arrives or self._misses()
        self._queued, self._arrives = -1, False
        if due:
            self.end()


def _depends(outputs: Sequence[Tensor], parameters: Collection[int]) -> bool:
    """Return whether the graph of some tensors has one of the parameters, whose `id` are given."""
    waiting, seen = [each.grad_fn for each in outputs], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in parameters:
            return True
        waiting += [each for each, _ in node.next_functions]
    return False


def as_written(device_type: str) -> AbstractContextManager[Any]:
    """Compute in the types of the tensors also where a program calls ``backward()`` under `torch.autocast`."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
