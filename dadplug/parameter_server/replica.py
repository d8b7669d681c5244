"""Replica of one site: the model that the log is applied to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import SiteError
from ..exchange.failure_reports import PeerNames
from ..methods import Method
from ..model_sync.replicated_model import JoinState
from ..model_sync.sameness import tables_with_max_norm, tensors_of
from ..model_sync.structure import is_managed
from .contribution import ContributionCodec
from .gradients import ModelGradients
from .log import Commit
from .optimizer import LoggedOptimizer
from .statistics import CommittedBatchNorms

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
        norms: batch normalisations with the statistics of all sites; None where these are not exchanged.

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
        norms: CommittedBatchNorms | None,
    ) -> None:
        self.version = self.dropped = 0
        self._gradients = gradients
        self._codec = codec
        self._method = method
        self._optimizer = optimizer
        self._sites = sites
        self._norms = norms

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
            merged = self._codec.merge(contents, samples, scales, self._optimizer.fused)
            self._gradients.write(merged.gradients)
        scale = sum(count * each for count, each in zip(samples, scales, strict=True)) / sum(samples)
        self._optimizer.step(unpacked[0].settings, scale, merged.products)
        self._gradients.clear()
        self._move_to(decision.version)
        if self._norms is not None:
            for entry, each in zip(decision.entries, unpacked, strict=True):
                self._norms.follow(entry.site, each.statistics or {}, self.version)

    def _move_to(self, version: int) -> None:
        self.version = version
        if self._norms is not None:
            self._norms.version = version

    def _statistics(self) -> Any:
        return {} if self._norms is None else self._norms.state_dict()

    def _load_statistics(self, state: Any) -> None:
        if self._norms is not None:
            self._norms.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return what this site has beside its model and its optimizer."""
        state = {"dropped": self.dropped, "reference": self._gradients.reference}
        state["statistics"] = self._statistics()
        return state | {"method": self._method.state_dict(), "codec": self._codec.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: the state.
        """
        self.dropped = state["dropped"]
        self._gradients.expected_reference = state["reference"]
        self._method.load_state_dict(state["method"])
        self._codec.load_state_dict(state["codec"])
        self._load_statistics(state.get("statistics", {}))

    def snapshot(self, model: nn.Module, description: dict[str, str], further: dict[str, Any]) -> JoinState:
        """Return the state that a site needs which takes over this version.

        Args:
            model: the model.
            description: what has to be the same at that site.
            further: further state.
        """
        further = further | {"optimizer": self._optimizer.state_dict(), "reference": self._gradients.reference}
        further |= {"fused": self._optimizer.kind, "statistics": self._statistics()}
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
        self._optimizer.load_state_dict(state.further["optimizer"])
        self._move_to(state.step)
        self._load_statistics(state.further["statistics"])


def check_site_model(model: nn.Module) -> None:
    """Raise ValueError for models whose parameters change outside of the optimizer's steps."""
    if tables_with_max_norm(model):
        raise ValueError("a ParameterServer cannot train embeddings with max_norm, whose lookups change parameters")
    for name, parameter in model.named_parameters():
        if is_managed(parameter):
            raise ValueError(f"a ParameterServer cannot train {name!r}, whose rows are spread over the sites")
