"""Automatic intent: the rows that a batch will look up, from a forward pass in which floats are only shapes."""

from __future__ import annotations

import copy
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..hooks.override import ForwardOverride
from ..lowrank import sparse_kernels
from . import kernels
from .shapes import IntentError, ShapesOnly, ghost, keep_shapes

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


class _Recording(ForwardOverride):
    """A lookup that notes its ids, and returns a shape."""

    def __init__(self, module: nn.Module, name: str, recorder: Recorder) -> None:
        super().__init__(module)
        self.name, self.recorder = name, recorder

    def __call__(self, input: Tensor, offsets: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if input.is_meta:
            raise IntentError(f"the ids for {self.name} come out of floating-point numbers")
        self.recorder.note(self.name, input)
        assert isinstance(self.module, (nn.Embedding, nn.EmbeddingBag))
        width = self.module.embedding_dim
        shape: tuple[int, ...] = (*input.shape, width)
        if isinstance(self.module, nn.EmbeddingBag):
            bags = input.shape[0]
            if input.dim() == 1 and offsets is not None:
                bags = offsets.shape[0] - int(self.module.include_last_offset)
            shape = (bags, width)
        with torch._C._DisableTorchDispatch():  # a shape needs no look from the mode
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
            memo[id(parameter)] = nn.Parameter(ghost(parameter.detach()), requires_grad=False)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                memo[id(buffer)] = ghost(buffer)
        self._skeleton = copy.deepcopy(model, memo)
        self._lock = threading.Lock()
        self._mode = ShapesOnly()
        self._training: bool | None = None
        self._notes: dict[str, list[NDArray[np.int64]]] = {}
        self._seen: dict[tuple[int, int], tuple[Tensor, NDArray[np.int64]]] = {}
        for name, paths in layers.items():
            for path in paths:
                _Recording(self._skeleton.get_submodule(path), name, self)
        keep_shapes(self._skeleton)

    def note(self, name: str, ids: Tensor) -> None:
        """Notes a lookup; ids are copied, since the model may change them afterwards."""
        key = (id(ids), ids._version)  # the tensor is kept, so that nothing else has its number
        if key not in self._seen:
            whole = ids if ids.device.type == "cpu" else ids.detach().cpu()
            self._seen[key] = ids, np.array(whole.numpy(), np.int64).reshape(-1)
        self._notes.setdefault(name, []).append(self._seen[key][1])

    def record(self, forward: Any, batch: Any, training: bool = True) -> dict[str, Tensor]:
        """Runs a batch through the copy.

        Args:
            forward: called with a model and the batch, ``lambda model, batch: model(batch[0])``.
            batch: tensors in any nesting; floating-point ones count by their shape.
            training: the mode of the model.

        Returns:
            The distinct ids by the name of their weight, in the order in which they occur first.

        Raises:
            IntentError: if what is looked up hangs on a floating-point value, or on chance.
        """
        shapes = tree_map_only(Tensor, lambda t: ghost(t) if t.is_floating_point() else t.clone(), batch)
        with self._lock:
            self._notes, self._seen = {}, {}
            if training != self._training:
                self._skeleton.train(training)
                self._training = training
            try:
                with torch.no_grad(), self._mode:
                    forward(self._skeleton, shapes)
                return _distinct(self._notes)
            except Exception as error:
                raise IntentError(
                    f"automatic intent cannot follow the model{_line_of(error)}: {error}. Give AdaDataLoader "
                    "intent=, a function from a batch to its ids"
                ) from error
            finally:
                self._notes, self._seen = {}, {}


def _distinct(notes: dict[str, list[NDArray[np.int64]]]) -> dict[str, Tensor]:
    """Finds the distinct ids by weight; those that several weights have in common are gone through once."""
    found: dict[tuple[int, ...], Tensor] = {}
    for each in notes.values():
        key = tuple(map(id, each))
        if key not in found:
            flat = each[0] if len(each) == 1 else np.concatenate(each)
            inverse, distinct = np.empty_like(flat), np.empty_like(flat)
            found[key] = torch.from_numpy(distinct[: sparse_kernels.unique(flat, inverse, distinct)])
    return {name: found[tuple(map(id, each))] for name, each in notes.items()}


def count_missing(keys: Tensor, announced: Tensor) -> int:
    """Counts the keys that are not among those that were announced; int64 on the CPU, both of one dimension."""
    if keys.numel() <= announced.numel() and torch.equal(keys, announced[: keys.numel()]):
        return 0  # one lookup, whose distinct keys come in the same order
    return int(kernels.count_absent(keys.contiguous().numpy(), announced.contiguous().numpy()))


def _line_of(error: BaseException) -> str:
    """Names the last line of the user's code that an error came through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_TORCH, _HERE)):
            return f" at {frame.filename}:{frame.lineno} ({frame.line})"
    return ""
