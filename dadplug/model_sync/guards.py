"""What keeps a user from mistakes that would go unseen."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..hooks import overridden

if TYPE_CHECKING:
    from ..reduction import GradientReduction


def check_model(model: nn.Module) -> None:
    """Refuses a model with parameters that have no shape yet, or that another capture works on."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run one forward pass before GradientReduction")
    for name, module in model.named_modules():
        if overridden(module):
            raise ValueError(f"layer {name!r} is in another GradientReduction or LayerCapture: detach() that first")


def refuse_unsynchronised(reduction: GradientReduction) -> Any:
    """A hook on optimizers that finds a forgotten `synchronize` before it lets the replicas drift apart."""
    reference = weakref.ref(reduction)

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found = reference()
        if found is None or not found.pending or any(callable(given) for given in (*args, *kwargs.values())):
            return  # a closure may do what is left of the step
        ours = {id(parameter) for parameter in found.model.parameters()}
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise RuntimeError(
                "optimizer.step() before the gradients are agreed: call reduction.synchronize() after backward()"
            )

    return check
