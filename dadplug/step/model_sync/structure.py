"""Structure of a model: what is compared step by step, and checks that turn silent mistakes into errors."""

from __future__ import annotations

import gc
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...hooks import OwnHook, overridden
from .private import is_private, whole_of

_MANAGED = "_dadplug_managed"  # attribute of a parameter
ATTACHED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by identity
"""What exchanges the gradients or parameters of a model in this process, from its construction to its `detach`."""


def attached() -> list[Any]:
    """Return what is in `ATTACHED`; others may end meanwhile."""
    return [each for each in (reference() for reference in ATTACHED.valuerefs()) if each is not None]


_TRAINING = operator.attrgetter("requires_grad", "dtype", "shape", "_cdata")


class ModelStructure:
    """The modules and parameters of a model at one time, without those that are private or managed elsewhere.

    Autograd calls all hooks of these parameters from then on, also after `torch.utils.swap_tensors`.

    Args:
        model: the model, or the shared part of it.

    Attributes:
        parameters: the parameters by `id`.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(whole_of(model).modules())
        self._tables: list[dict[str, Any]] = [module._modules for module in modules]
        self._tables += [module._parameters for module in modules]
        self._kept = [value for table in self._tables for value in table.values()]  # others cannot get their addresses
        self._place_then = self._place
        self._content = self._contents()
        self.parameters = {id(each): each for each in model.parameters() if not is_managed(each)}
        self._training = [*map(_TRAINING, self.parameters.values())]
        for parameter in self.parameters.values():  # swap_tensors leaves hooks that autograd does not call
            for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                setattr(parameter, hooks, getattr(parameter, hooks) or None)

    def _contents(self) -> list[tuple[str, int]]:
        items = (item for table in self._tables for item in table.items())
        others = (item for item in items if not (isinstance(item[1], Tensor) and _is_apart(item[1])))
        return [(name, id(value)) for name, value in others]

    @property
    def _place(self) -> tuple[list[str], list[int]]:
        values = itertools.chain.from_iterable(map(dict.values, self._tables))
        return list(itertools.chain.from_iterable(self._tables)), list(map(id, values))

    @property
    def is_present(self) -> bool:
        """Whether the model still has all the same modules and parameters, those managed elsewhere included."""
        return self._place == self._place_then

    def same_tensors(self) -> bool:
        """Return whether the model still has the same modules and parameters, each in its place."""
        return self.is_present or self._contents() == self._content

    def same_training(self) -> bool:
        """Return whether the parameters are trained or frozen, typed and shaped as they were.

        They are not if `torch.utils.swap_tensors` has given one the place of another, with its memory and its hooks.
        """
        return [*map(_TRAINING, self.parameters.values())] == self._training


def mark_managed(parameter: nn.Parameter, managed: bool) -> None:
    """Mark a parameter as managed elsewhere: a `GradientReduction` of its model does not send its gradients.

    Args:
        parameter: the parameter.
        managed: whether it is managed elsewhere.
    """
    setattr(parameter, _MANAGED, managed)


def is_managed(parameter: Any) -> bool:
    """Return whether a parameter is managed elsewhere."""
    return getattr(parameter, _MANAGED, False) is True


def _is_apart(parameter: Tensor) -> bool:
    return is_managed(parameter) or is_private(parameter)


@contextmanager
def without_managed(model: nn.Module) -> Iterator[None]:
    """Take the parameters that are managed elsewhere out of a model, inside a ``with`` block.

    Those are parameters, too, that have taken the place of one which torch's DistributedDataParallel is to ignore.
    """
    hidden, ignored = [], getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if f"{prefix}.{name}".lstrip(".") in ignored:
                mark_managed(parameter, True)
            if is_managed(parameter):
                hidden.append((module, name, module._parameters.pop(name)))
    try:
        yield
    finally:
        for module, name, parameter in hidden:
            module._parameters[name] = parameter


_DISTRIBUTED = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "ReplicateModule")


def check_types(model: object, optimizer: object) -> None:
    """Raise TypeError unless these are a model and an optimizer."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"the optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")


def check_model(model: nn.Module) -> None:
    """Check that a model can be captured.

    Raises:
        TypeError: if it is no module.
        ValueError: if a parameter has no shape yet, if a layer is captured already, or if torch itself distributes it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    refuse_wrapped(model)
    refuse_attached(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run one forward pass before GradientReduction")
    for name, module in ("", model), *model.named_children():
        if isinstance(module, torch.jit._script.RecursiveScriptModule):
            raise ValueError(
                f"{f'layer {name!r}' if name else 'the model'} is compiled by torch.jit.script, which allows no hooks: "
                "pass the model as it was, speed it up by torch.compile, and script it after the training"
            )
    for name, module in model.named_modules():
        if overridden(module):
            raise ValueError(f"layer {name!r} is in another GradientReduction or LayerCapture: detach() that first")


def refuse_attached(model: nn.Module) -> None:
    """Raise ValueError if something exchanges gradients or parameters of the model already."""
    ours = {id(each) for each in model.parameters() if each.requires_grad and not is_managed(each)}

    def found() -> Any:
        return next((each for each in attached() if ours & {id(one) for one in each.model.parameters()}), None)

    if found() is not None:
        gc.collect()  # it may be one that nothing refers to any more
    if (other := found()) is not None:
        kind = type(other).__name__
        raise ValueError(
            f"a {kind} exchanges parameters of this model already, and two would disturb each other: use that one, or "
            "call its detach() first"
        )


def refuse_wrapped(model: nn.Module) -> None:
    """Raise ValueError if torch itself reduces or shards the gradients of a model or of a part of it.

    Both would exchange the same gradients: the traffic of the one with the losses of the other. The classes are found
    by name, since the import of torch's FSDP takes longer than that of dadplug.
    """
    for name, module in model.named_modules():
        classes = (each for each in type(module).__mro__ if each.__module__.startswith("torch."))
        found = next((each for each in classes if each.__name__ in _DISTRIBUTED), None)
        if found is None:
            continue
        part = f"layer {name!r}" if name else "the model"
        if found.__name__ == "FSDPModule":
            raise ValueError(f"{part} is sharded by torch's fully_shard: pass a model without it, dadplug replaces it")
        own = "model" + (f".{name}" if name else "") + ".module"
        if type(module).__module__.startswith("dadplug."):
            raise ValueError(
                f"{part} is wrapped in dadplug's {type(module).__name__} already: use {own.removesuffix('.module')}."
                f"reduction, or pass {own} after {own.removesuffix('.module')}.reduction.detach()"
            )
        raise ValueError(
            f"{part} is wrapped in torch's {found.__name__}, which dadplug replaces: pass the unwrapped model ({own}), "
            "and use it in the training loop"
        )
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor" or type(parameter).__name__ == "DTensor":
            raise ValueError(f"parameter {name!r} is a DTensor, sharded by torch: pass a model with whole parameters")


def check_elastic(model: nn.Module) -> None:
    """Check that a model can be trained while sites leave and return.

    Raises:
        ValueError: if a parameter is managed elsewhere, as the tables of an AdaModel are: each site has a part of them.
    """
    for name, parameter in model.named_parameters():
        if is_managed(parameter):
            raise ValueError(f"min_sites: the rows of {name!r} are spread over the sites, and all of them must stay")


def weak_hook(method: Callable[..., object]) -> OwnHook:
    """Return a hook that calls a method with what it is called with, as long as the object of the method lives.

    Models, optimizers and transports call what exchanges gradients by such hooks only, so that it ends with the last
    reference of the program.

    Args:
        method: the bound method; the hook does not keep its object alive.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = reference()
        return None if found is None else found(*args)

    return OwnHook(call)


_ended: list[OptimizerHook] = []  # of objects that are being collected
_collections = [0]  # that go on


@contextmanager
def collection() -> Iterator[None]:
    """Have hooks of optimizers removed later while an object is collected: torch may iterate over them meanwhile."""
    _collections[0] += 1
    try:
        yield
    finally:
        _collections[0] -= 1


class OptimizerHook:
    """Hook of one or all optimizers, as long as an object lives.

    Args:
        handle: what registering it has returned. It is not kept: where it is collected together with the object, the
            collector empties its weak reference to the hooks before the object can remove its own.
    """

    def __init__(self, handle: RemovableHandle) -> None:
        self._hooks, self._number = handle.hooks_dict_ref(), handle.id
        remove_ended()

    def remove(self) -> None:
        """Remove the hook; while an object is collected, as soon as a further hook is made or removed."""
        _ended.append(self)
        remove_ended()

    def _remove(self) -> None:
        if self._hooks is not None:
            self._hooks.pop(self._number, None)


def remove_ended() -> None:
    """Remove the hooks of objects that have been collected."""
    while _ended and not _collections[0]:
        _ended.pop()._remove()


def before_update(optimizer: torch.optim.Optimizer, action: Callable[[], object]) -> RemovableHandle:
    """Call a function in each step of an optimizer, before its update; with a closure, once that has the gradients.

    Args:
        optimizer: the optimizer.
        action: the function.

    Returns:
        The handle by which the hook is removed.
    """
    return optimizer.register_step_pre_hook(lambda _, args, kwargs: call_before_update(args, kwargs, action))


def call_before_update(args: tuple[Any, ...], kwargs: dict[str, Any], action: Callable[[], object]) -> Any:
    """Call a function now, or, in a step with a closure, after each call of that; for hooks before a step.

    Args:
        args: positional arguments of the step; the first one is the optimizer.
        kwargs: the others.
        action: the function.

    Returns:
        What the hook returns.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        action()
        return None

    def computed() -> Any:
        loss = closure()
        action()
        return loss

    return ((args[0], computed, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": computed})
