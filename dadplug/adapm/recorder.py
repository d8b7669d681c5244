"""Automatic intent: the rows that a batch will look up, from a forward pass on shapes."""

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

from ..errors import IntentError
from ..hooks.capture import ForwardOverride
from ..lowrank import kernels
from .index import count_absent
from .shapes import ShapesOnly, keep_shapes, stub

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


class _Recording(ForwardOverride):
    """Forward of an embedding layer that records its ids and returns a stub.

    Args:
        module: the layer.
        name: name of its weight.
        recorder: the recorder.
    """

    def __init__(self, module: nn.Module, name: str, recorder: Recorder) -> None:
        super().__init__(module)
        self.name, self.recorder = name, recorder

    def __call__(self, input: Tensor, offsets: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if input.is_meta:
            raise IntentError(f"the ids for {self.name} are computed from floating-point numbers")
        self.recorder.add(self.name, input)
        assert isinstance(self.module, (nn.Embedding, nn.EmbeddingBag))
        width = self.module.embedding_dim
        shape: tuple[int, ...] = (*input.shape, width)
        if isinstance(self.module, nn.EmbeddingBag):
            bags = input.shape[0]
            if input.dim() == 1 and offsets is not None:
                bags = offsets.shape[0] - int(self.module.include_last_offset)
            shape = (bags, width)
        with torch._C._DisableTorchDispatch():  # the mode need not handle a stub
            return torch.empty(shape, device="meta")


class Recorder:
    """Copy of a model, without values, that finds the rows that a batch looks up.

    Integer and boolean tensors are computed as in the model. Floating-point tensors are stubs, which have only a shape,
    so a pass takes little time. All lookups are found whose ids do not depend on floating-point values; otherwise an
    error names the line. The Python state of the model is copied when the recorder is created.

    Args:
        model: the model, before its weights are managed.
        layers: by the name of each managed weight, the paths of its layers.
    """

    def __init__(self, model: nn.Module, layers: dict[str, list[str]]) -> None:
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(stub(parameter.detach()), requires_grad=False)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                memo[id(buffer)] = stub(buffer)
        self._skeleton = copy.deepcopy(model, memo)
        self._lock = threading.Lock()
        self._mode = ShapesOnly()
        self._training: bool | None = None
        self._lookups: dict[str, list[NDArray[np.int64]]] = {}
        self._seen: dict[tuple[int, int], tuple[Tensor, NDArray[np.int64]]] = {}
        for name, paths in layers.items():
            for path in paths:
                _Recording(self._skeleton.get_submodule(path), name, self)
        keep_shapes(self._skeleton)

    def add(self, name: str, ids: Tensor) -> None:
        """Record a lookup; the ids are copied, since the model may change them afterwards."""
        key = (id(ids), ids._version)  # the tensor is kept alive, so that its id stays unique
        if key not in self._seen:
            whole = ids if ids.device.type == "cpu" else ids.detach().cpu()
            self._seen[key] = ids, np.array(whole.numpy(), np.int64).reshape(-1)
        self._lookups.setdefault(name, []).append(self._seen[key][1])

    def record(self, forward: Any, batch: Any, training: bool = True) -> dict[str, Tensor]:
        """Run the copy on a batch.

        Args:
            forward: function of the model and the batch, such as ``lambda model, batch: model(batch[0])``.
            batch: tensors in any nesting; only the shapes of floating-point tensors are used.
            training: whether the copy is in training mode.

        Returns:
            By the name of the weight, the distinct ids, int64, in the order of their first occurrence.

        Raises:
            IntentError: if the ids depend on floating-point values or random numbers.
        """
        shapes = tree_map_only(Tensor, lambda t: stub(t) if t.is_floating_point() else t.clone(), batch)
        with self._lock:
            self._lookups, self._seen = {}, {}
            if training != self._training:
                self._skeleton.train(training)
                self._training = training
            try:
                with torch.no_grad(), self._mode:
                    forward(self._skeleton, shapes)
                return _distinct(self._lookups)
            except Exception as error:
                raise IntentError(
                    f"automatic intent cannot follow the model{_line_of(error)}: {error}. Give AdaDataLoader "
                    "intent=, a function from a batch to its ids"
                ) from error
            finally:
                self._lookups, self._seen = {}, {}


def _distinct(lookups: dict[str, list[NDArray[np.int64]]]) -> dict[str, Tensor]:
    """Return the distinct ids by weight; lookups that several weights share are processed once."""
    found: dict[tuple[int, ...], Tensor] = {}
    for each in lookups.values():
        key = tuple(map(id, each))
        if key not in found:
            flat = each[0] if len(each) == 1 else np.concatenate(each)
            inverse, distinct = np.empty_like(flat), np.empty_like(flat)
            found[key] = torch.from_numpy(distinct[: kernels.unique(flat, inverse, distinct)])
    return {name: found[tuple(map(id, each))] for name, each in lookups.items()}


def count_missing(keys: Tensor, announced: Tensor) -> int:
    """Count the keys that have not been announced.

    Args:
        keys: int64 on the CPU, of shape (k,).
        announced: int64 on the CPU, of shape (n,).
    """
    if keys.numel() <= announced.numel() and torch.equal(keys, announced[: keys.numel()]):
        return 0  # one lookup, whose distinct keys are in the same order
    return int(count_absent(keys.contiguous().numpy(), announced.contiguous().numpy()))


def _line_of(error: BaseException) -> str:
    """Return the last line of the user's code in an error's traceback, for a message."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_TORCH, _HERE)):
            return f" at {frame.filename}:{frame.lineno} ({frame.line})"
    return ""
