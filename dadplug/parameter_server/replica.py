"""Replica of one site: the optimizer and the model that the log is applied to."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MismatchError
from ..exchange import Transport, codec
from ..step.fused.products import GradientProduct
from ..step.fused.steps import engine_for, reasons_against, take_step
from ..step.model_sync.private import is_of_site, is_private, shared_state
from ..step.model_sync.sameness import tables_with_max_norm
from ..step.model_sync.structure import OptimizerHook, is_managed, weak_hook
from ..support.refusals import refuse

Settings = list[dict[str, Any]]
"""By parameter group, the values of its settings by name: learning rate, momentum, betas and so on."""

_PLAIN = (bool, int, float, str, type(None))


class LoggedOptimizer:
    """An optimizer whose steps take place where the log says so.

    The settings of its groups travel with each contribution, and those of the first contribution of a commit hold for
    the commit's step: learning rates that schedulers change at each site would differ at one version otherwise. Groups
    of private parameters alone keep the settings of their site.

    Args:
        optimizer: the optimizer.
        model: the model.

    Attributes:
        optimizer: the optimizer.
        fused: weights whose gradients need not be formed, since the step takes them as products.

    Raises:
        ValueError: if the optimizer cannot be used.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("a ParameterServer cannot use LBFGS, whose step computes the gradient several times")
        self.optimizer = optimizer
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._applying = False
        self._guard: Any = None
        self._hooks = self._count_hooks()
        self.fused: Set[nn.Parameter] = frozenset()
        for group in optimizer.param_groups:
            refuse(
                (
                    isinstance(group.get("lr"), Tensor),
                    "a ParameterServer needs a learning rate that is a number, not a tensor",
                ),
                (
                    any(parameter not in self._names for parameter in group["params"]),
                    "the optimizer has parameters that are not the model's",
                ),
            )

    def agree_on_fused(self, transport: Transport, wanted: bool) -> None:
        """Take fused steps from now on if all sites want and can, and then take the same; all must call it together.

        Args:
            transport: the transport.
            wanted: whether this site wants to. A fused step rounds in another way than the ordinary one.
        """
        weights = self._fusible() if wanted else frozenset()
        if len(set(transport.gather_objects(self._kind(weights), str, "kind of steps"))) == 1:
            self.fused = weights

    def follow_fused(self, kind: str) -> None:
        """Take the fused steps of the other sites.

        Args:
            kind: what `kind` is at these.

        Raises:
            MismatchError: if this site cannot.
        """
        weights = self._fusible() if kind else frozenset()
        if self._kind(weights) != kind:
            raise MismatchError(
                f"the other sites take fused steps by {kind!r}, this one can take {self._kind(weights)!r}: it needs "
                "the same kind of device, numba where they have it, and an optimizer with the same options, no hooks"
            )
        self.fused = weights

    @property
    def kind(self) -> str:
        """Name of what takes the fused steps, with a digest of their weights; empty if there are none."""
        return self._kind(self.fused)

    def _fusible(self) -> frozenset[nn.Parameter]:
        reasons = reasons_against([self.optimizer])
        return frozenset(weight for weight, reason in reasons.items() if not reason and not is_private(weight))

    def _kind(self, weights: Set[nn.Parameter]) -> str:
        if not weights:
            return ""
        names = "\n".join(sorted(self._names[weight] for weight in weights))
        return f"{engine_for(weights)} {zlib.crc32(names.encode()):08x}"

    def _count_hooks(self) -> int:
        optimizer = self.optimizer
        return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)

    def describe(self) -> dict[str, str]:
        """Return what has to be the same at all sites: parameter groups, their settings, and state."""
        described = {"optimizer": type(self.optimizer).__name__}
        for number, (group, settings) in enumerate(zip(self._groups, self.settings(), strict=True)):
            described[f"parameter group {number} of the optimizer"] = ", ".join(
                self._names[parameter] for parameter in group["params"] if not is_private(parameter)
            )
            described |= {f"{name} of parameter group {number}": repr(value) for name, value in settings.items()}
        state = shared_state(self.optimizer)["state"]
        described["state of the optimizer"] = hashlib.sha256(codec.encode(state)).hexdigest()[:16] if state else "none"
        return described

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """Groups that have shared parameters."""
        return [group for group in self.optimizer.param_groups if not is_of_site(group)]

    def settings(self) -> Settings:
        """Return the present settings of the groups."""
        return [
            {name: value for name, value in group.items() if name != "params" and _is_plain(value)}
            for group in self._groups
        ]

    def step(self, settings: Any, scale: float, products: Mapping[nn.Parameter, GradientProduct]) -> None:
        """Make a step with the gradients in ``.grad``, and with others that are not formed.

        Args:
            settings: the settings of the groups, from a contribution.
            scale: factor of the learning rates.
            products: gradients of some of the weights in `fused`.

        Raises:
            MismatchError: if the settings are not those of this optimizer's groups.
            RuntimeError: if hooks of the optimizer would miss gradients that are not formed.
            ValueError: if the step has changed the settings, as those of Prodigy and schedule-free optimizers do.
        """
        if self.fused and self._count_hooks() != self._hooks + (self._guard is not None):
            raise RuntimeError("register hooks of the optimizer before the ParameterServer is made, on all sites")
        own = self.settings()
        if not _alike(own, settings):
            raise MismatchError("a contribution has other settings of parameter groups than the optimizer of this site")
        self._load(settings)
        for group in self._groups:
            if scale != 1.0:
                group["lr"] = group["lr"] * scale
        self._applying = True
        taken = self.settings()
        try:
            take_step([self.optimizer], products)
            pairs = zip(taken, self.settings(), strict=True)
            changed = {name for old, new in pairs for name, value in new.items() if value != old.get(name)}
        finally:
            self._applying = False
            self._load(own)
        if changed:
            raise ValueError(
                f"a ParameterServer cannot use {type(self.optimizer).__name__}, whose step changes settings of its "
                f"parameter groups ({', '.join(sorted(changed))}): those of each step are a site's"
            )

    def _load(self, settings: Settings) -> None:
        for group, values in zip(self._groups, settings, strict=True):
            group.update(values)

    def guard(self) -> None:
        """Raise an error from now on where the program itself calls the optimizer's ``step``."""
        self._guard = OptimizerHook(self.optimizer.register_step_pre_hook(weak_hook(self._check)))

    def _check(self, *_: Any) -> None:
        if not self._applying:
            raise RuntimeError("server.step() makes the optimizer's steps: call it in place of optimizer.step()")

    def release(self) -> None:
        """Let the program call the optimizer's ``step`` again."""
        if self._guard is not None:
            self._guard.remove()


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(each) for each in value)
    return type(value) in _PLAIN


def _alike(own: Settings, other: Any) -> bool:
    """Return whether settings have the same names, with values of the same types."""
    if not isinstance(other, list) or len(own) != len(other):
        return False
    return all(
        isinstance(theirs, dict) and ours.keys() == theirs.keys() and all(_is_plain(value) for value in theirs.values())
        for ours, theirs in zip(own, other, strict=True)
    )


ANY_STATE = {"state of the optimizer": "that of the training"}
"""Description of an optimizer's state where it need not be the same, since it is taken over."""


def check_site_model(model: nn.Module) -> None:
    """Raise ValueError for models whose parameters change outside of the optimizer's steps."""
    if tables_with_max_norm(model):
        raise ValueError("a ParameterServer cannot train embeddings with max_norm, whose lookups change parameters")
    for name, parameter in model.named_parameters():
        if is_managed(parameter):
            raise ValueError(f"a ParameterServer cannot train {name!r}, whose rows are spread over the sites")
