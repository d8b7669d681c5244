"""Checks of local steps: policies of kits, parameters, and optimizers that the program calls itself."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..exchange import Transport
from ..hooks import OwnHook
from ..hub.project import check_restrictions
from ..model_sync.structure import is_managed


@dataclass(frozen=True)
class _Restricted:
    """Options that policies of kits restrict; deltas are sums of whole gradients, and contain no layer's inputs."""

    mode: str = "localsgd"
    share_inputs: bool = False


class Steps(Protocol):
    """Local steps that call the optimizer.

    Attributes:
        calls_optimizer: whether they do at the moment.
    """

    calls_optimizer: bool

    def form_gradients(self) -> None: ...


def check_policy() -> None:
    """Raise PolicyError if the kit by which this site has dialed a hub does not allow ``"localsgd"``."""
    check_restrictions(_Restricted(), sends_factors=False)


def raise_problems(problem: str, transport: Transport) -> None:
    """Raise ValueError on all sites if the arguments of one are not valid.

    Args:
        problem: what is wrong at this site; empty if nothing is.
        transport: the transport, closed before an error.
    """
    for rank, found in enumerate(transport.gather_objects(problem)):
        if found:
            text = problem or f"{transport.sites[rank]}: {found}"
            transport.close()
            raise ValueError(text)


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the optimizer has parameters that sites cannot agree on."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's: sites "
                    "would not agree on it"
                )
    for name, parameter in model.named_parameters():
        if is_managed(parameter):
            raise ValueError(f"the rows of {name!r} are spread over the sites by a parameter manager: no local steps")
        if parameter.requires_grad and parameter.is_complex():
            raise ValueError(f"parameter {name!r} is complex: local steps are for real parameters")


def refuse_other_steps(local: Steps) -> OwnHook:
    """Return a pre-hook for the optimizer that raises an error where the program calls it itself.

    Otherwise it has the gradients formed that the step reads; with a closure, these do not exist yet.
    """
    reference = weakref.ref(local)

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found = reference()
        if found is None:
            return
        if not found.calls_optimizer:
            raise RuntimeError("optimizer.step() beside local steps: call local.step() instead, which calls it")
        if not any(callable(given) for given in (*args, *kwargs.values())):
            found.form_gradients()

    return OwnHook(check)
