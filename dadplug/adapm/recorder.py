"""Automatic intent: the rows that a batch will look up, from a forward pass on shapes.

In such a pass whole numbers are computed, and floating-point tensors are stubs, which have only a shape. The output
shapes of an operation or a layer of torch are cached by its input shapes. The model's own Python code runs in every
pass.
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..errors import IntentError
from ..hooks.capture import ForwardOverride, overridden
from ..lowrank import rows, sparse

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_CACHE_SIZE = 10_000  # cached results
_META = torch.device("meta")
_PLAIN = {bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
_READERS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default}


def stub(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape on torch's meta device."""
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")


class _Unknown(Exception):
    """An argument that cannot be part of a cache key."""


def _describe(item: Any, tensors: list[Tensor]) -> Any:
    """Return the part of an argument that output shapes depend on, as a cache key; append its tensors to a list."""
    if item is None or item.__class__ in _PLAIN:
        return item.__class__, item
    if isinstance(item, Tensor):
        tensors.append(item)
        return item.shape, item.stride(), item.dtype
    if item.__class__ in (list, tuple, torch.Size):
        return tuple([_describe(part, tensors) for part in item])
    if item.__class__ is dict:
        return tuple([(name, _describe(part, tensors)) for name, part in item.items()])
    raise _Unknown


class _Shapes:
    """Cache of results that consist of stubs."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def get(self, key: Any) -> Any:
        """Return new stubs for a key; None if it is not in the cache."""
        known = self._known.get(key)
        if known is None:
            return None
        if known.__class__ is tuple:
            return torch.empty_strided(*known[:2], dtype=known[2], device=_META)
        leaves, spec = known
        made = [
            torch.empty_strided(*leaf[:2], dtype=leaf[2], device=_META) if leaf is not None else None for leaf in leaves
        ]
        return tree_unflatten(made, spec)

    def put(self, key: Any, result: Any) -> None:
        """Add a result to the cache if it consists of stubs only."""
        leaves, spec = tree_flatten(result)
        kept: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_meta and leaf.layout == torch.strided:
                kept.append((leaf.shape, leaf.stride(), leaf.dtype))
            elif leaf is None:
                kept.append(None)
            else:
                return
        if len(self._known) >= _CACHE_SIZE:
            self._known.clear()
        self._known[key] = kept[0] if isinstance(result, Tensor) else [kept, spec]


class ShapesOnly(TorchDispatchMode):
    """Dispatch mode that runs operations with stub arguments on shapes only, and all others unchanged."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = _Shapes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(map(_has_stub, args)) and not any(map(_has_stub, kwargs.values())):
            if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("device") != _META:
                raise IntentError("it draws random numbers, which the training step would draw anew")
            return func(*args, **kwargs)
        if func in _READERS:
            raise IntentError("it needs the value of a floating-point number, of which only the shape is known")
        mutable = func._schema.is_mutable
        if mutable:  # an operation with stub arguments must not write into a tensor that has values
            for given, argument in zip(args, func._schema.arguments, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and isinstance(given, Tensor) and not given.is_meta:
                    raise IntentError(
                        "it writes floating-point results, of which only the shape is known, into a tensor"
                    )
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], _without_masks(args[1]))
        key = None
        if not mutable:
            try:
                key = (func, _describe(args, []), _describe(kwargs, []) if kwargs else ())
            except _Unknown:
                pass
            else:
                if (result := self._shapes.get(key)) is not None:
                    return result
        args, kwargs = tree_map_only(Tensor, stub, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = _META
        result = func(*args, **kwargs)
        if key is not None:
            self._shapes.put(key, result)
        return result


def _has_stub(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.is_meta
    return item.__class__ in (list, tuple) and any(map(_has_stub, item))


def _without_masks(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Replace masks with known values by the positions that they select."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and not index.is_meta and index.dtype in (torch.bool, torch.uint8):
            found.extend(index.nonzero().unbind(1))
        else:
            found.append(index)
    return found


class _ShapeLayer(ForwardOverride):
    """Forward of a layer of torch.nn that caches its results for stubs.

    Args:
        module: the layer.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._shapes = _Shapes()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []
        try:
            key = (self.module.training, _describe(args, tensors), _describe(kwargs, tensors))
        except _Unknown:
            return self.plain(*args, **kwargs)
        if not tensors or not all(tensor.is_meta for tensor in tensors):
            return self.plain(*args, **kwargs)
        result = self._shapes.get(key)
        if result is None:
            result = self.plain(*args, **kwargs)
            self._shapes.put(key, result)
        return result


def keep_shapes(model: nn.Module) -> None:
    """Cache the output shapes of the torch.nn layers of a model.

    Layers are left out if they contain other classes than those of torch.nn, hooks, or integer buffers.
    """
    for module in list(model.modules()):
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and all(map(_is_torchs, module.modules())):
            _ShapeLayer(module)


def _is_torchs(module: nn.Module) -> bool:
    hooks: list[Callable[[], Any]] = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and not isinstance(module, LazyModuleMixin)
        and (not overridden(module) or isinstance(vars(module)["forward"], _ShapeLayer))
        and not hooks
        and all(buffer.is_floating_point() for buffer in module.buffers(recurse=False))
    )


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
            found[key] = torch.from_numpy(distinct[: rows.unique(flat, inverse, distinct)])
    return {name: found[tuple(map(id, each))] for name, each in lookups.items()}


def count_missing(keys: Tensor, announced: Tensor) -> int:
    """Count the keys that have not been announced.

    Args:
        keys: int64 on the CPU, of shape (k,).
        announced: int64 on the CPU, of shape (n,).
    """
    if keys.numel() <= announced.numel() and torch.equal(keys, announced[: keys.numel()]):
        return 0  # one lookup, whose distinct keys are in the same order
    _, places = sparse.unique(torch.cat([announced, keys]))  # numbers in the order of the first occurrence
    known = int(places[: announced.numel()].max()) + 1 if announced.numel() else 0
    return int((places[announced.numel() :] >= known).sum())


def _line_of(error: BaseException) -> str:
    """Return the last line of the user's code in an error's traceback, for a message."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_TORCH, _HERE)):
            return f" at {frame.filename}:{frame.lineno} ({frame.line})"
    return ""
