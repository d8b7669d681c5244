"""Replica of one site: the model that the log is applied to."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MismatchError, SiteError
from ..exchange import Transport, codec
from ..exchange.failure_reports import PeerNames
from ..fused import GradientProduct, engine_for, reasons_against, take_step
from ..methods import Method
from ..model_sync.replicated_model import JoinState
from ..model_sync.sameness import tensors_of
from ..model_sync.structure import is_managed
from ..model_sync.tables import tables_with_max_norm
from .gradients import ContributionCodec, ModelGradients
from .streams import Commit

Settings = list[dict[str, Any]]
"""By parameter group, the values of its settings by name: learning rate, momentum, betas and so on."""

_PLAIN = (bool, int, float, str, type(None))


class LoggedOptimizer:
    """An optimizer whose steps take place where the log says so.

    The settings of its groups travel with each contribution, and those of the first contribution of a commit hold for
    the commit's step: learning rates that schedulers change at each site would differ at one version otherwise.

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
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._applying = False
        self._guard: Any = None
        self._hooks = self._count_hooks()
        self.fused: Set[nn.Parameter] = frozenset()
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), Tensor):
                raise ValueError("a ParameterServer needs a learning rate that is a number, not a tensor")
            if any(id(parameter) not in self._names for parameter in group["params"]):
                raise ValueError("the optimizer has parameters that are not the model's")

    def agree_on_fused(self, transport: Transport, wanted: bool) -> None:
        """Take fused steps from now on if all sites want and can, and then take the same; all must call it together.

        Args:
            transport: the transport.
            wanted: whether this site wants to. A fused step rounds in another way than the ordinary one.
        """
        weights = self._fusible() if wanted else frozenset()
        if len(set(transport.gather_objects(self._kind(weights)))) == 1:
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
        return frozenset(weight for weight, reason in reasons.items() if not reason)

    def _kind(self, weights: Set[nn.Parameter]) -> str:
        if not weights:
            return ""
        names = "\n".join(sorted(self._names[id(weight)] for weight in weights))
        return f"{engine_for(weights)} {zlib.crc32(names.encode()):08x}"

    def _count_hooks(self) -> int:
        optimizer = self.optimizer
        return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)

    def describe(self) -> dict[str, str]:
        """Return what has to be the same at all sites: parameter groups, their settings, and state."""
        described = {"optimizer": type(self.optimizer).__name__}
        for number, (group, settings) in enumerate(zip(self.optimizer.param_groups, self.settings(), strict=True)):
            described[f"parameter group {number} of the optimizer"] = ", ".join(
                self._names[id(parameter)] for parameter in group["params"]
            )
            described |= {f"{name} of parameter group {number}": repr(value) for name, value in settings.items()}
        state = self.optimizer.state_dict()["state"]
        described["state of the optimizer"] = hashlib.sha256(codec.encode(state)).hexdigest()[:16] if state else "none"
        return described

    def settings(self) -> Settings:
        """Return the present settings of the groups."""
        return [
            {name: value for name, value in group.items() if name != "params" and _is_plain(value)}
            for group in self.optimizer.param_groups
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
        """
        if self.fused and self._count_hooks() != self._hooks + (self._guard is not None):
            raise RuntimeError("register hooks of the optimizer before the ParameterServer is made, on all sites")
        own = self.settings()
        if not _alike(own, settings):
            raise MismatchError("a contribution has other settings of parameter groups than the optimizer of this site")
        self._load(settings)
        for group in self.optimizer.param_groups:
            if scale != 1.0:
                group["lr"] = group["lr"] * scale
        self._applying = True
        try:
            take_step([self.optimizer], products)
        finally:
            self._applying = False
            self._load(own)

    def _load(self, settings: Settings) -> None:
        for group, values in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(values)

    def guard(self) -> None:
        """Raise an error from now on where the program itself calls the optimizer's ``step``."""
        self._guard = self.optimizer.register_step_pre_hook(self._check)

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


class Replica:
    """Replica of the model at one site.

    Args:
        gradients: the model's gradients.
        codec: codec of contributions.
        method: the method.
        optimizer: the optimizer.
        sites: the sites by name.

    Attributes:
        version: number of commits of the sequencer's log that have been applied.
        dropped: number of this site's contributions that have been dropped as too late.
    """

    def __init__(
        self,
        gradients: ModelGradients,
        codec: ContributionCodec,
        method: Method,
        optimizer: LoggedOptimizer,
        sites: PeerNames,
    ) -> None:
        self.version = self.dropped = 0
        self._gradients = gradients
        self._codec = codec
        self._method = method
        self._optimizer = optimizer
        self._sites = sites
        self._norms = gradients.norms

    def apply(self, commit: Commit) -> None:
        """Make the optimizer's step of one commit.

        Raises:
            MismatchError: if a contribution does not fit this site's model.
        """
        decision = commit.decision
        self.dropped += sum(site == self._sites.rank for site, _ in decision.dropped)
        if not decision.entries:
            return
        unpacked = [
            self._codec.unpack(body, self._sites[entry.site])
            for entry, body in zip(decision.entries, commit.bodies, strict=True)
        ]
        samples = [float(entry.samples) for entry in decision.entries]
        scales = [entry.scale for entry in decision.entries]
        with torch.no_grad():
            contents = [each.content for each in unpacked]
            gradients, products = self._codec.merge(contents, samples, scales, self._optimizer.fused)
            self._gradients.write(gradients)
        scale = sum(count * each for count, each in zip(samples, scales, strict=True)) / sum(samples)
        self._optimizer.step(unpacked[0].settings, scale, products)
        self._gradients.clear()
        self._move_to(decision.version)
        if self._norms is not None:
            for entry, each in zip(decision.entries, unpacked, strict=True):
                self._norms.follow(entry.site, each.statistics or {}, self.version)

    def _move_to(self, version: int, statistics: Any = None) -> None:
        """Set the version; with those of another site or of a checkpoint, the statistics of batch normalisation."""
        self.version = version
        if self._norms is not None:
            self._norms.version = version
            if statistics is not None:
                self._norms.load_state_dict(statistics)

    def state_dict(self) -> dict[str, Any]:
        """Return what this site has beside its model and its optimizer."""
        state = {"dropped": self.dropped, "method": self._method.state_dict(), "codec": self._codec.state_dict()}
        return state | self._shared_state()

    def _shared_state(self) -> dict[str, Any]:
        statistics = {} if self._norms is None else self._norms.state_dict()
        return {"reference": self._gradients.reference, "statistics": statistics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: the state.
        """
        self.dropped = state["dropped"]
        self._gradients.expected_reference = state["reference"]
        self._method.load_state_dict(state["method"])
        self._codec.load_state_dict(state["codec"])
        self._move_to(self.version, state.get("statistics", {}))

    def snapshot(self, model: nn.Module, description: dict[str, str], further: dict[str, Any]) -> JoinState:
        """Return the state that a site needs which takes over this version.

        Args:
            model: the model.
            description: what has to be the same at that site.
            further: further state.
        """
        optimizer = {"optimizer": self._optimizer.optimizer.state_dict(), "fused": self._optimizer.kind}
        further = further | optimizer | self._shared_state()
        return JoinState(description, tensors_of(model), self.version, list(self._gradients.reports), further)

    def take_over(self, state: JoinState) -> None:
        """Take over the version of another site, whose tensors the model has already.

        Args:
            state: result of `snapshot` there.

        Raises:
            SiteError: if the sites have not made their first step.
            MismatchError: if this site cannot make the steps that the others make.
        """
        if not state.plan:
            raise SiteError("the sites have not made their first step, which needs all of them: start them again")
        self._optimizer.follow_fused(state.further["fused"])
        self._gradients.merge(state.plan)
        self._gradients.reference = state.further["reference"]
        self._optimizer.optimizer.load_state_dict(state.further["optimizer"])
        self._move_to(state.step, state.further["statistics"])


def check_site_model(model: nn.Module) -> None:
    """Raise ValueError for models whose parameters change outside of the optimizer's steps."""
    if tables_with_max_norm(model):
        raise ValueError("a ParameterServer cannot train embeddings with max_norm, whose lookups change parameters")
    for name, parameter in model.named_parameters():
        if is_managed(parameter):
            raise ValueError(f"a ParameterServer cannot train {name!r}, whose rows are spread over the sites")
