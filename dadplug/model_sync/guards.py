"""Checks that turn silent mistakes into errors."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn

from ..hooks import OwnHook, overridden
from .structure import is_managed

_REMEDIES = dict.fromkeys(("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"), ", model.module")
_WRAPPERS = {*_REMEDIES, "FSDPModule", "FSDP"}  # the last two are of fully_shard, of newer and of older versions


class Synchronized(Protocol):
    """A model whose gradients are synchronized before the optimizer's step.

    Attributes:
        model: the model.
        pending: whether gradients have arrived that are not synchronized yet.
    """

    model: nn.Module

    @property
    def pending(self) -> bool: ...

    def on_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None: ...


def check_model(model: nn.Module) -> None:
    """Check that a model can be captured.

    Raises:
        TypeError: if it is no module.
        ValueError: if a parameter has no shape yet, or if a layer is captured already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    check_unwrapped(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run one forward pass before GradientReduction")
    for name, module in model.named_modules():
        if overridden(module):
            raise ValueError(f"layer {name!r} is in another GradientReduction or LayerCapture: detach() that first")


def check_unwrapped(model: nn.Module) -> None:
    """Check that no part of a model synchronizes its gradients, or divides its parameters, by itself.

    Raises:
        ValueError: if a module is wrapped by DistributedDataParallel, DataParallel or FSDP.
    """
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                where = f"its part {name!r}" if name else "it"
                raise ValueError(
                    f"the model synchronizes gradients already: {where} is wrapped by torch's {kind.__name__}. Pass "
                    f"the model as it was before{_REMEDIES.get(kind.__name__, '')}"
                )


def check_elastic(model: nn.Module) -> None:
    """Check that a model can be trained while sites leave and return.

    Raises:
        ValueError: if a parameter is managed elsewhere, as the tables of an AdaModel are: each site has a part of them.
    """
    for name, parameter in model.named_parameters():
        if is_managed(parameter):
            raise ValueError(f"min_sites: the rows of {name!r} are spread over the sites, and all of them must stay")


def refuse_unsynchronised(reduction: Synchronized) -> OwnHook:
    """Return a pre-hook for optimizers that reports their steps, and raises an error if `synchronize` was forgotten.

    Args:
        reduction: the reduction; the hook holds it weakly.
    """
    reference = weakref.ref(reduction)

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found = reference()
        if found is None:
            return
        ours = {id(parameter) for parameter in found.model.parameters()}
        if not any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            return
        found.on_optimizer_step(optimizer)
        if found.pending and not any(callable(given) for given in (*args, *kwargs.values())):
            raise RuntimeError(
                "optimizer.step() before gradients were synchronized: call reduction.synchronize() after backward()"
            )

    return OwnHook(check)
