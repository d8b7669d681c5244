"""Samples of a step, which are a site's weight in the mean over sites, and sites with different numbers of batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from ..hooks import eager
from .sameness import FirstBatch

_TENSORS = {Tensor}  # a subclass may be a container to pytree
_SEQUENCE_LAYERS = (nn.RNNBase, nn.MultiheadAttention)  # whose inputs begin with the position, unless batch_first


class SampleCounter:
    """Counter of the samples of a model's forward passes through which backward has run.

    The number of samples is the first dimension of the first tensor among the inputs of the outermost call: of the
    model, or of one of its direct children where the model itself is never called, as in a Lightning module. Mappings
    and plain objects among the inputs are searched too. Where no input has a tensor, the outputs are searched.

    Some inputs do not begin with the samples. Layers without ``batch_first`` show sequences that begin with the
    position, and packed sequences have their own number. Otherwise outputs decide, if none begins as the first input
    does: they may begin as another input, such as the offsets of bags, or with the second dimension of sequences.

    Args:
        model: the model.
        on_forward: called before every outermost forward that backward may follow.
        on_backward: called before a backward pass through such a forward is counted.

    Attributes:
        current: samples of the forward pass that is running; 0 outside of one, and where they are not known.
        known: whether `current` is known: by the inputs, or since `fixed` states it.
        forwards: number of outermost forward passes so far.
        called: the module that the last of them has called.
        backward_pass: number of the last backward pass that has been counted; -1 before.
        stated: samples that the last `fixed` of the step has stated; None where there was none.
        owned: addresses of the memory of inputs since the last `reset`, which a program may overwrite.
        first_batch: gets the inputs of the first outermost forward of a training; None where it is not wanted.
        on_outputs: called with the outputs of each outermost forward that backward may follow, and its samples.
    """

    def __init__(self, model: nn.Module, on_forward: Callable[[], None], on_backward: Callable[[], None]) -> None:
        self._on_forward = on_forward
        self._on_backward = on_backward
        self.current = 0
        self._shown = 0  # samples of the running forward pass by a layer whose inputs begin with the position
        self._others: set[int] = set()  # samples that outputs may show in place of `current`
        self.forwards = 0
        self.called: nn.Module = model
        self.backward_pass = -1
        self.owned: set[int] = set()
        self.first_batch: FirstBatch | None = None
        self.on_outputs: Callable[[list[Tensor], int], None] | None = None
        self._of_model = self._of_parts = 0
        self._reached = self._unknown = False  # whether backward has run, and through passes of unknown size
        self._generation = 0  # times that counting has begun anew
        self._part: tuple[int, nn.Module] | None = None  # the part that counts in the last backward pass through any
        self._depth = 0
        self.known = True  # whether `current` is known
        self.stated: int | None = None
        self._block: _Stated | None = None  # of the innermost `fixed` that is open
        self._handles: list[Any] = []
        self._model = model
        self._watched: dict[int, nn.Module] = {}
        self._layers: dict[int, nn.Module] = {}
        self.follow()

    def follow(self) -> None:
        """Watch modules that have been added to the model since."""
        for module in self._model.modules():
            if isinstance(module, _SEQUENCE_LAYERS) and not module.batch_first and id(module) not in self._layers:
                self._layers[id(module)] = module
                self._handles.append(module.register_forward_pre_hook(_Watch(self._show), with_kwargs=True))
        for module in (self._model, *self._model.children()):
            if id(module) not in self._watched:
                self._watched[id(module)] = module
                self._handles.append(module.register_forward_pre_hook(_Watch(self._enter), with_kwargs=True))
                self._handles.append(module.register_forward_hook(_Watch(self._leave), always_call=True))

    @property
    def count(self) -> int:
        """Samples that backward has reached since the last `reset`: by calls of the model, else of its children."""
        return self._of_model or self._of_parts

    @contextmanager
    def fixed(self, samples: int) -> Iterator[None]:
        """Count a stated number of samples, once, for all forward passes inside a ``with`` block.

        Args:
            samples: the number of samples.
        """
        before, self._block = self._block, _Stated(samples)
        self.stated = samples
        try:
            yield
        finally:
            self._block = before
            if before is not None:
                self.stated = before.samples

    def of_step(self, pending: bool, *, by_samples: bool, alone: bool) -> int:
        """Return the weight of a site's gradients in the mean over sites.

        Args:
            pending: whether the site has gradients in this step.
            by_samples: whether the weight is the number of samples; otherwise it is 1, or 0 without samples.
            alone: whether there is no other site, so that an unknown number needs no warning.
        """
        count = self.count
        if (not self._reached or self._unknown) and pending:
            if self.stated is not None:
                count = self.stated
            else:
                count = 1
                if by_samples and not alone:
                    warnings.warn(
                        "cannot tell how many samples a step has, since the loss does not come from a call of the "
                        "model; each site counts the same. Say it by `with reduction.samples(n):` around forward",
                        stacklevel=4,
                    )
        return count if by_samples else int(pending and count > 0)

    def discard(self) -> None:
        """Forget the backward passes so far, whose gradients have been cleared."""
        self._of_model = self._of_parts = 0
        self._reached = self._unknown = False
        self._generation += 1

    def reset(self) -> None:
        """Reset the counter, at the end of a step."""
        self.discard()
        self.owned.clear()
        self.stated = None
        if self._block is not None:
            self._block = _Stated(self._block.samples)
            self.stated = self._block.samples

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record that a watched module is called."""
        self._depth += 1
        if self._depth == 1:
            self.forwards += 1
            self.called = module
            only_tensors = not kwargs and _TENSORS.issuperset(map(type, args))
            inputs = list(args if only_tensors else tensors_of((args, kwargs)))
            if torch.is_grad_enabled():
                transformed = torch._C._functorch.peek_interpreter_stack() is not None  # whose tensors hide values
                if self.first_batch is not None and module.training and not transformed:
                    self.first_batch.look(inputs)
                self._on_forward()
                self.owned.update(leaf.untyped_storage().data_ptr() for leaf in inputs if _is_plain(leaf))
            size = _first_dimension(inputs) if only_tensors else _listed(args, kwargs) or batch_size((args, kwargs))
            self.current, self.known, self._shown = size or 0, size is not None, 0
            self._others = _further_sizes(inputs) if size == _first_dimension(inputs) else set()
            if self._block is not None:
                self.current, self.known = self._block.samples, True

    def _show(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the samples in the inputs of a layer, if they begin with the position, as those of the model do."""
        first = next(iter((*args, *kwargs.values())), None)
        if not self._shown and isinstance(first, Tensor) and first.dim() == 3 and len(first) == self.current:
            self._shown = first.shape[1]

    def _leave(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Record that a watched module returns, and count its samples once backward runs through the outputs."""
        self._depth -= 1
        if self._depth > 0:
            return
        samples, self.current = self.current, 0
        if not torch.is_grad_enabled():
            return
        known = self.known
        if not known and (size := batch_size(outputs)) is not None:
            samples, known = size, True
        leaves = [outputs] if type(outputs) is Tensor else list(tensors_of(outputs))
        if known and self._block is None:
            samples = self._shown or _shown_by_outputs(samples, self._others, leaves)
        reached = [leaf for leaf in leaves if leaf.requires_grad]
        stated = self._block or _Stated(samples)
        if self.on_outputs is not None:
            self.on_outputs(reached, samples)

        def count(_: Tensor) -> None:
            now = torch._C._current_graph_task_id()
            if now != self.backward_pass:
                self.backward_pass = now
                self._on_backward()
            if stated.counted_in != self._generation:
                stated.counted_in = self._generation
                self._reached = True
                self._unknown |= not known
                if module is self._model:
                    self._of_model += samples
                elif self._counts_part(module, now):
                    self._of_parts += samples

        for output in reached:
            output.register_hook(count)

    def _counts_part(self, part: nn.Module, backward_pass: int) -> bool:
        """Return whether a part of the model counts in a backward pass: the first that it reaches does, the rest not.

        The samples of a pass have to be known before gradients leave, and other parts are reached while they do.
        """
        if self._part is None or self._part[0] != backward_pass:
            self._part = backward_pass, part
        return self._part[1] is part


@dataclass
class _Stated:
    """A stated number of samples, counted once between two calls of `SampleCounter.discard`."""

    samples: int
    counted_in: int = -1


def batch_size(batch: Any) -> int | None:
    """Return the number of samples in a batch: the first dimension of its first tensor; None where there is none."""
    leaf = next(iter(tree_leaves(batch, is_leaf=lambda each: isinstance(each, PackedSequence))), None)
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    return _first_dimension(tensors_of(batch))


def _listed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of samples in lists of pictures and of their labels, as detectors take them; else None."""
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, tuple)) and each]
    pictures = next((each for each in lists if all(isinstance(one, Tensor) for one in each)), ())
    labels = next((each for each in lists if all(isinstance(one, Mapping) for one in each)), ())
    return len(labels) if len(labels) == len(pictures) else None


def _further_sizes(inputs: Iterable[Tensor]) -> set[int]:
    """Return what may be the number of samples, if it is not the first dimension of the first tensor."""
    first, *others = [leaf for leaf in inputs if leaf.dim() > 0] or [torch.empty(0)]
    sizes = {leaf.shape[0] for leaf in others}
    is_sequence = first.dim() == 3 or (first.dim() == 2 and not first.is_floating_point())
    return sizes | {first.shape[1]} if is_sequence else sizes


def _shown_by_outputs(samples: int, others: Collection[int], outputs: Iterable[Tensor]) -> int:
    """Return the number of samples: another one, if the outputs begin with it, and none begins with `samples`."""
    sizes = [leaf.shape[0] for leaf in outputs if leaf.dim() > 0]
    return sizes[0] if sizes and samples not in sizes and sizes[0] in others else samples


def _first_dimension(leaves: Iterable[Tensor]) -> int | None:
    first = next((leaf for leaf in leaves if leaf.dim() > 0), None)
    return None if first is None else first.shape[0]


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


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


class _Watch:
    """Hook of a watched module; a copied or pickled model has one without effect in its place."""

    def __init__(self, function: Callable[[nn.Module, Any, Any], None] = lambda module, args, further: None) -> None:
        self._function = function

    @eager
    def __call__(self, module: nn.Module, args: Any, further: Any) -> None:
        self._function(module, args, further)

    def __reduce__(self) -> Any:
        return _Watch, ()


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
