"""Automatic intent: the rows that a batch will look up, from a forward pass in which floats are only shapes."""

from __future__ import annotations

import copy
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..hooks.override import ForwardOverride

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


class IntentError(RuntimeError):
    """The rows that a batch looks up cannot be known before its forward pass; the message names the line."""


def _ghost(tensor: Tensor) -> Tensor:
    """A tensor of which only the shape is known: on torch's meta device."""
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")


class _ShapesOnly(TorchDispatchMode):
    """Runs operations on ghosts as shapes, and all others as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise IntentError("it draws random numbers, which the training step would draw anew")
            return func(*args, **kwargs)
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise IntentError("it needs the value of a floating-point number, of which only the shape is known")
        for given, argument in zip(args, func._schema.arguments, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(given, Tensor) and not given.is_meta:
                raise IntentError("it writes floating-point results, of which only the shape is known, into a tensor")
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], _without_masks(args[1]))
        args, kwargs = tree_map_only(Tensor, _ghost, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def _without_masks(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Replaces masks whose values are known by the positions that they choose, whose number is a shape."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and not index.is_meta and index.dtype in (torch.bool, torch.uint8):
            found.extend(index.nonzero().unbind(1))
        else:
            found.append(index)
    return found


class _Recording(ForwardOverride):
    """A lookup that notes its ids, and returns a shape."""

    def __init__(self, module: nn.Module, name: str, recorder: Recorder) -> None:
        super().__init__(module)
        self.name, self.recorder = name, recorder

    def __call__(self, input: Tensor, offsets: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if input.is_meta:
            raise IntentError(f"the ids for {self.name} come out of floating-point numbers")
        self.recorder.ids.setdefault(self.name, []).append(input.detach().reshape(-1).long().cpu())
        assert isinstance(self.module, (nn.Embedding, nn.EmbeddingBag))
        width = self.module.embedding_dim
        shape: tuple[int, ...] = (*input.shape, width)
        if isinstance(self.module, nn.EmbeddingBag):
            bags = input.shape[0]
            if input.dim() == 1 and offsets is not None:
                bags = offsets.shape[0] - int(self.module.include_last_offset)
            shape = (bags, width)
        return torch.empty(shape, device="meta")


class Recorder:
    """A copy of a model, without its numbers, that tells which rows a batch looks up.

    Integer and boolean tensors are computed as the model does; floating-point ones have a shape only, so that a pass
    costs next to nothing, and every lookup is seen that does not hang on a floating-point value. Where one does, an
    error names the line. The model's own Python state is copied when the recorder is made.

    Args:
        model: the model, not yet managed.
        layers: for each managed weight's name, the paths of its layers.
    """

    def __init__(self, model: nn.Module, layers: dict[str, list[str]]) -> None:
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(_ghost(parameter.detach()), requires_grad=False)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                memo[id(buffer)] = _ghost(buffer)
        self.ids: dict[str, list[Tensor]] = {}
        self._skeleton = copy.deepcopy(model, memo)
        self._lock = threading.Lock()
        for name, paths in layers.items():
            for path in paths:
                _Recording(self._skeleton.get_submodule(path), name, self)

    def record(self, forward: Any, batch: Any, training: bool = True) -> dict[str, Tensor]:
        """Runs a batch through the copy.

        Args:
            forward: called with a model and the batch, ``lambda model, batch: model(batch[0])``.
            batch: tensors in any nesting; floating-point ones count by their shape.
            training: the mode of the model.

        Returns:
            The distinct ids by the name of their weight.

        Raises:
            IntentError: if what is looked up hangs on a floating-point value, or on chance.
        """
        shapes = tree_map_only(Tensor, lambda t: _ghost(t) if t.is_floating_point() else t, batch)
        with self._lock:
            self.ids = {}
            self._skeleton.train(training)
            try:
                with torch.no_grad(), _ShapesOnly():
                    forward(self._skeleton, shapes)
            except Exception as error:
                raise IntentError(
                    f"automatic intent cannot follow the model{_line_of(error)}: {error}. Give AdaDataLoader "
                    "intent=, a function from a batch to its ids"
                ) from error
            return {name: torch.cat(ids).unique() for name, ids in self.ids.items()}


def _line_of(error: BaseException) -> str:
    """Names the last line of the user's code that an error came through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_TORCH, _HERE)):
            return f" at {frame.filename}:{frame.lineno} ({frame.line})"
    return ""
