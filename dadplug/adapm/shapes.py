"""Forward passes in which whole numbers are computed and floating-point tensors are stubs, which have only a shape.

The output shapes of an operation or a layer of torch are cached by its input shapes. The model's own Python code runs
in every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..errors import IntentError
from ..hooks.capture import ForwardOverride, overridden

_CACHE_SIZE = 10_000  # cached results
_META = torch.device("meta")


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


_PLAIN = {bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format}


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
        if mutable:
            _check_outputs(func, args)
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


def _check_outputs(func: Any, args: Any) -> None:
    """Raise if an operation with stub arguments writes into a tensor that has values.

    Raises:
        IntentError: if so.
    """
    for given, argument in zip(args, func._schema.arguments, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and isinstance(given, Tensor) and not given.is_meta:
            raise IntentError("it writes floating-point results, of which only the shape is known, into a tensor")


_READERS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default}


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
    for module in _pure(model):
        _ShapeLayer(module)


def _pure(model: nn.Module) -> Iterator[nn.Module]:
    for module in list(model.modules()):
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and all(map(_is_torchs, module.modules())):
            yield module


def _is_torchs(module: nn.Module) -> bool:
    hooks: list[Callable[[], Any]] = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and not isinstance(module, LazyModuleMixin)
        and (not overridden(module) or isinstance(vars(module)["forward"], _ShapeLayer))
        and not hooks
        and all(buffer.is_floating_point() for buffer in module.buffers(recurse=False))
    )
