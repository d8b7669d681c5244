"""Samples of a step, which may be a site's weight in the mean over sites, and sites with different numbers of batches.

**The rule.** A forward pass has as many samples as the first tensor that the model gets has elements in its first
dimension. The first tensor is that of the first argument that has one; an argument may be a tensor, a tuple or a
mapping. A pass counts once a backward pass through its outputs has delivered gradients to the model's parameters:
passes of `torch.autograd.grad` for inputs, and transforms of `torch.func`, do not count. Where the rule does not fit,
the number of samples has to be stated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ...hooks import CallOverride, EagerForward, eager
from .sameness import FirstBatch
from .structure import weak_hook

_SEQUENCE_LAYERS = (nn.RNNBase, nn.MultiheadAttention)  # which know the dimension of their positions
_DOUBT, _SAMPLES = attrgetter("doubt"), attrgetter("samples")
_STATE_IT = "state the number of samples by `with reduction.samples(n):` around forward, or pass weighting='uniform'"


class SampleCounter:
    """Counter of the samples of a model's forward passes whose gradients have arrived.

    It watches the calls of the model, and of its direct children, which are called alone where the model itself is
    never called, as in a Lightning module. Only calls of the model count by the rule.

    Args:
        model: the model.
        on_forward: called before every outermost forward that backward may follow.
        on_backward: called before a backward pass through such a forward is counted.
        by_samples: whether samples are a site's weight, so that they have to be known.
        has_arrived: returns whether a backward pass that is ending has delivered gradients of which `deliver` was not
            called.
        watches_parameters: whether to call `deliver` whenever autograd has added to the gradient of a parameter.

    Attributes:
        by_samples: as the argument.
        current: samples of the forward pass that is running; 0 outside of one, and where they are not known.
        known: whether `current` is known: by the rule, or since `fixed` states it.
        pending: whether the site has gradients in this step; set by what exchanges them.
        forwards: number of outermost forward passes so far.
        called: the module that the last of them has called.
        backward_pass: number of the last backward pass that has reached the outputs of a forward pass; -1 before.
        stated: samples that the last `fixed` of the step has stated; None where there was none.
        dealt: samples of the step, as the loader that deals the batches of all sites states, which are the site's
            weight then; None without such a loader.
        of_site: weight and samples of all processes of the site in this step, where these act as one; None before they
            have added them up.
        owned: addresses of the memory of inputs since the last `reset`, which a program may overwrite.
        undelivered: passes that running backward passes have reached, which have delivered no gradient yet, with the
            numbers of those.
        first_batch: gets the inputs of the first outermost forward of a training; None where it is not wanted.
        on_outputs: functions that are called with the outputs of each outermost forward that backward may follow, its
            samples, and its inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        on_forward: Callable[[], None],
        on_backward: Callable[[], None],
        by_samples: bool,
        has_arrived: Callable[[], bool] = bool,
        watches_parameters: bool = False,
    ) -> None:
        self._on_forward, self._on_backward, self._has_arrived = on_forward, on_backward, has_arrived
        self.by_samples = by_samples
        self.current = self.forwards = 0
        self.known = True
        self.pending = False
        self.called: nn.Module = model
        self.backward_pass = -1
        self.owned: set[int] = set()
        self.first_batch: FirstBatch | None = None
        self.on_outputs: list[Callable[[list[Tensor], int, Any], None]] = []
        self.stated: int | None = None
        self.dealt: int | None = None
        self.of_site: tuple[int, int] | None = None
        self._counted: set[_Passes] = set()  # whose gradients have arrived in this step
        self._discarded: set[_Passes] = set()  # whose gradients have been cleared or replaced last
        self.undelivered: list[tuple[int, _Passes]] = []
        self._block: _Passes | None = None  # of the innermost `fixed` that is open
        self._pass = _Passes(0)  # of the running forward pass, or the last one
        self._running: list[bool] = []  # not empty while a forward pass is running; compiled code can read a list
        self._model = model
        self._overrides: dict[int, CallOverride] = {}
        inlined = type(model).__module__.startswith("torch.nn.") and any(True for _ in model.children())
        self._forward = EagerForward(model) if inlined and "forward" not in vars(model) else None
        self._watches_parameters = watches_parameters
        self._hooks: dict[tuple[int, int], tuple[Tensor, RemovableHandle]] = {}  # of parameters, by identity
        self.follow()

    def follow(self) -> None:
        """Watch modules that have been added to the model since, or compiled."""
        watched = [self._model, *self._model.children()]
        if self.by_samples:
            watched += [each for each in self._model.modules() if isinstance(each, _SEQUENCE_LAYERS)]
        for module in watched:
            known = self._overrides.get(id(module))
            if known is None or not (module._compiled_call_impl is known or known.holds):
                passed = () if isinstance(module, _SEQUENCE_LAYERS) else self._running
                self._overrides[id(module)] = CallOverride(module, self._around, passed)

    @property
    def count(self) -> int:
        """Samples of this step, as far as they are known."""
        if self.of_site is not None:
            return self.of_site[1]
        return self._known_of(self._counted) if self.dealt is None else self.dealt

    @property
    def reached(self) -> int:
        """Samples of this step with those that the running backward pass has reached, as far as they are known."""
        return self._known_of(self._counted | self._waiting()) or self.dealt or 0

    def _known_of(self, counted: set[_Passes]) -> int:
        doubtful = any(map(_DOUBT, counted)) or not counted
        return self.stated or 0 if doubtful else sum(map(_SAMPLES, counted))

    def _waiting(self) -> set[_Passes]:
        """Return the passes that count once a gradient arrives.

        Those that a pass with ``create_graph`` has reached count where there are no others, as where the loss is a
        penalty on input gradients: autograd does not show whether a later pass goes through what that has made.
        """
        return {passes for task, passes in self.undelivered if task != -1} or {passes for _, passes in self.undelivered}

    @contextmanager
    def fixed(self, samples: int) -> Iterator[None]:
        """Count a stated number of samples, once, for all forward passes inside a ``with`` block.

        Args:
            samples: the number of samples.
        """
        before, self._block = self._block, _Passes(samples, stated=True)
        self.stated = samples
        try:
            yield
        finally:
            self._block = before
            if before is not None:
                self.stated = before.samples

    def weight(self, pending: bool | None = None, provisional: bool = True) -> int:
        """Return the weight of a site's gradients so far in the step in the mean over sites.

        Args:
            pending: whether the site has gradients in this step; None for `pending` of this object.
            provisional: whether it need not be known: there is no other site, or the backward pass has not ended.

        Raises:
            ValueError: if samples are the weight, and the rule cannot count them.
        """
        if self.of_site is not None:
            return self.of_site[0]
        pending = self.pending if pending is None else pending
        if self.dealt is not None:
            return self.dealt if pending else 0
        if not self.by_samples:
            for passes in self._counted:
                if passes.samples or not passes.stated:
                    return int(pending)
            return int(pending and not self._counted and self.stated != 0)
        unknown = "the loss does not come from a call of the model"
        if self._discarded:
            unknown = "all gradients of its backward passes have been cleared or replaced"
        doubts = [passes.doubt for passes in self._counted] or [unknown]
        if not pending or not any(doubts):
            return sum(passes.samples for passes in self._counted)
        if self.stated is not None:
            return self.stated
        if provisional:
            return 1
        reason = next(filter(None, doubts))
        raise ValueError(f"weighting='samples' cannot count the samples of this step: {reason}; {_STATE_IT}")

    def weight_of_pass(self, rows: int) -> float:
        """Return the weight of the running forward pass in statistics over sites.

        Args:
            rows: rows of the layer, where the samples of the pass are not known.
        """
        return float(self.current or rows) if self.by_samples or self.dealt is not None else 1.0

    def deliver(self, *given: Any) -> None:
        """Count the passes that the running backward pass has reached, since it has delivered a gradient."""
        if self.undelivered:
            self._counted |= self._waiting()
            self.undelivered.clear()

    def discard(self) -> None:
        """Forget the backward passes so far, whose gradients have been cleared or replaced."""
        self._discarded = self._counted.copy()
        self._counted.clear()
        self.undelivered.clear()

    def count_replaced(self) -> None:
        """Count the passes of `discard` again, as the program has replaced their gradients and run no other pass."""
        if not self._counted and self._pass in self._discarded:
            self._counted |= self._discarded

    def reset(self) -> None:
        """Reset the counter, at the end of a step."""
        self._counted.clear()
        self._discarded.clear()
        self.undelivered.clear()
        self.owned.clear()
        self.stated = self.of_site = None
        if self._block is not None:
            self._block = _Passes(self._block.samples, stated=True)
            self.stated = self._block.samples

    def detach(self) -> None:
        """Watch the model no longer."""
        for override in (*self._overrides.values(), self._forward):
            if override is not None:
                override.restore()
        for _, handle in self._hooks.values():
            handle.remove()
        self._overrides.clear()
        self._hooks.clear()

    @eager(nested=True)
    def _around(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a watched module."""
        if self._running:
            if isinstance(module, _SEQUENCE_LAYERS):
                self._check_positions(module, args, kwargs)
            return call(*args, **kwargs)
        self._running.append(True)
        try:  # an interrupted pass leaves nothing behind
            self._enter(module, args, kwargs)
            outputs = call(*args, **kwargs)
            self._leave(outputs, (args, kwargs))
            return outputs
        finally:
            self._running.clear()
            self.current = 0

    @eager
    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Record that an outermost forward pass begins."""
        self.forwards += 1
        self.called = module
        inputs = list(tensors_of((args, kwargs)))
        transformed = torch._C._functorch.peek_interpreter_stack() is not None  # whose tensors hide values
        if torch.is_grad_enabled() and not transformed:
            if self.first_batch is not None and module.training:
                self.first_batch.look(inputs)
            if torch._C._current_graph_task_id() == -1:  # what an earlier backward pass has reached was for nothing
                self.undelivered.clear()
            self._on_forward()
            if self._watches_parameters:
                self._watch_parameters()
            for leaf in inputs:
                if leaf.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(leaf):
                    self.owned.add(leaf.untyped_storage().data_ptr())
        self._pass = self._block or _by_rule((*args, *kwargs.values()))
        self.current, self.known = self._pass.samples, bool(self._pass.samples or not self._pass.doubt)
        if isinstance(module, _SEQUENCE_LAYERS):
            self._check_positions(module, args, kwargs)

    def _watch_parameters(self) -> None:
        """Watch the parameters that are trained now, also after `torch.utils.swap_tensors`."""
        parameters: Iterable[Any] = self._model.parameters()
        for parameter in parameters:
            key = id(parameter), parameter._cdata
            if parameter.requires_grad and key not in self._hooks:
                parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks or None
                handle = parameter.register_post_accumulate_grad_hook(weak_hook(self.deliver))
                self._hooks[key] = parameter, handle

    def _check_positions(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Doubt the samples where the inputs of a layer begin with the position, and those of the model as they do."""
        if self._block is not None:
            return
        first = next(iter((*args, *kwargs.values())), None)
        if not isinstance(first, Tensor) or first.is_nested or first.dim() not in (2, 3):
            return
        positions = 0 if first.dim() == 2 or not module.batch_first else 1
        rows = 1 if first.dim() == 2 else first.size(1 - positions)
        if first.size(positions) == self._pass.samples != rows:
            which = (
                f"its inputs begin with the position, and not with the {rows} sequences of its {type(module).__name__}"
            )
            self._pass.doubt = self._pass.doubt or which

    @eager
    def _leave(self, outputs: Any, inputs: Any) -> None:
        """Record that an outermost forward pass has ended; it counts once backward has run through its outputs."""
        if not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        passes = self._pass
        leaves = list(tensors_of(outputs))
        if passes is not self._block:
            passes.compare([leaf.size(0) for leaf in leaves if leaf.dim() > 0 and leaf.numel() != 1])
        if self.first_batch is not None and self.called.training and not passes.doubt:
            self.first_batch.samples = self.first_batch.samples or passes.samples
        reached = [leaf for leaf in leaves if leaf.requires_grad]
        for function in self.on_outputs:
            function(reached, passes.samples, inputs)
        counts = self.called is self._model or passes is self._block
        if not (counts or self.by_samples):  # parts of a model may be called beside it: their samples are not added
            passes, counts = _Passes(0, "a part of the model is called alone"), True

        def reach(*_: Any) -> None:
            now = torch._C._current_graph_task_id()
            if now != self.backward_pass:
                self.backward_pass = now
                self._on_backward()
                torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(now))
            if counts:
                self.undelivered.append((-1 if torch.is_grad_enabled() else now, passes))  # -1: by ``create_graph``

        for output in reached:  # a hook of the tensor would be lost, or crash, where a program writes into it
            if output.grad_fn is not None:  # not a parameter or an input, which lasts longer than the pass
                output.grad_fn.register_prehook(reach)

    def _end_backward(self, backward_pass: int) -> None:
        """Forget what a backward pass has reached that delivers nothing, as those of `torch.autograd.grad`."""
        if self.undelivered and self._has_arrived():
            self.deliver()
        self.undelivered = [each for each in self.undelivered if each[0] != backward_pass]


@dataclass(eq=False)
class _Passes:
    """Forward passes that count together: one, or all inside of a block that states their samples.

    Attributes:
        samples: their samples; 0 where they are not known.
        doubt: why they are not known; empty where they are.
        stated: whether the program states them.
    """

    samples: int
    doubt: str = ""
    stated: bool = False

    def compare(self, sizes: Sequence[int]) -> None:
        """Doubt the samples if no output begins with them, or with a multiple of them.

        Args:
            sizes: first dimensions of the outputs.
        """
        fits = not sizes or any(each == self.samples or (self.samples and each % self.samples == 0) for each in sizes)
        if not fits:
            which = f"the first tensor that the model gets has the length {self.samples}, and its output {sizes[0]}"
            self.doubt = self.doubt or which


def _by_rule(arguments: Iterable[Any]) -> _Passes:
    """Return the samples of a forward pass with some arguments, by the rule at the top of the module."""
    return _first(arguments) or _Passes(0, "the model gets no tensor")


def _first(arguments: Iterable[Any]) -> _Passes | None:
    for argument in arguments:
        found = None
        if isinstance(argument, PackedSequence):
            found = _Passes(int(argument.batch_sizes[0]))
        elif isinstance(argument, Tensor):
            found = _Passes(argument.size(0)) if argument.dim() > 0 else None
        elif isinstance(argument, (Mapping, tuple)):
            found = _first(argument.values() if isinstance(argument, Mapping) else argument)
        elif any(True for _ in tensors_of(argument)):
            found = _Passes(0, f"its first tensor is in an argument of type {type(argument).__name__}")
        if found is not None:
            return found
    return None


def batch_size(batch: Any) -> int | None:
    """Return the number of samples in a batch by the rule, where its items are the arguments; None if it has none."""
    passes = _by_rule(batch if isinstance(batch, (list, tuple)) else (batch,))
    return None if passes.doubt else passes.samples


def warn_of_unequal(batches: Collection[int]) -> None:
    """Warn of batches of different sizes at sites that count equally.

    Args:
        batches: samples of each site that has a batch in the first step; 0 where they are not known.
    """
    if all(batches) and len({*batches}) > 1:
        warnings.warn(
            f"the sites' batches have {', '.join(map(str, batches))} samples in the first step, and each site counts "
            "the same, as in DistributedDataParallel (weighting='uniform', the default). weighting='samples' weights "
            "sites by their samples: by the first dimension of the first tensor that the model gets, or as `with "
            "reduction.samples(n):` around forward states",
            stacklevel=3,
        )


def tensors_of(batch: Any, depth: int = 3) -> Iterator[Tensor]:
    """Find the tensors in a batch: in containers that pytree knows, in mappings, and in attributes of objects.

    Args:
        batch: anything.
        depth: how many objects that pytree does not know may lie within one another.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and isinstance(leaf, Mapping):
            yield from tensors_of(list(leaf.values()), depth - 1)
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module, ModuleType)):
            yield from tensors_of(list(vars(leaf).values()), depth - 1)
        elif depth and (slots := getattr(type(leaf), "__slots__", None)):
            names = (slots,) if isinstance(slots, str) else slots
            yield from tensors_of([getattr(leaf, name, None) for name in names], depth - 1)


def batches_before(step: int, own: int, steps: int) -> int:
    """Return the number of batches that a site has used before a step of an epoch.

    A site with fewer batches than steps skips steps that are spread over the epoch: it uses batch i in step
    ``i (steps - 1) // (own - 1)``, the first batch in the first step and the last one in the last. If it skipped the
    last steps of the epoch instead, the model would end the epoch on the data of some sites alone.

    Args:
        step: number of the step, from 0; the number of steps for the whole epoch.
        own: number of the site's batches.
        steps: number of steps, at least as many.
    """
    if own < 2 or steps < 2:
        return min(step, own)
    return min(own, -(-step * (own - 1) // (steps - 1)))


def takes_part(step: int, own: int, steps: int) -> bool:
    """Return whether a site participates in a step with a batch of its own; see `batches_before`."""
    return batches_before(step + 1, own, steps) > batches_before(step, own, steps)
