"""A replicated model whose gradients are exchanged by a plan, and the state that its site carries from step to step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ..exchange import Transport
from ..methods import Quality, make_method
from ..methods.feedback import ErrorFeedback
from ..model_sync.replicated_model import JoinState, ReplicatedModel
from ..model_sync.samples import SampleCounter
from ..options import Options
from ..reducer.attached import AttachedGradients
from ..signature import whole_number
from ..units.base import Unit
from .merging import check_merge
from .plan import Plan
from .planner import Planner


class PlannedModel(ReplicatedModel, ABC):
    """A model with a replica at every site and a plan for its gradients; the base of `dadplug.GradientReduction`.

    Arguments, attributes and errors are those of `ReplicatedModel`.
    """

    _counter: SampleCounter
    _planner: Planner
    _attached: AttachedGradients | None = None

    def __init__(self, model: nn.Module, process_group: dist.ProcessGroup | None, options: Options) -> None:
        super().__init__(model, process_group, options)
        self._step = 0
        self._pending = False
        self._method = make_method(self.options)

    @abstractmethod
    def _samples(self) -> int:
        """Return the samples that this site's gradients stand for so far in the step."""

    @abstractmethod
    def _arrived(self, unit: Unit) -> None:
        """Record that a backward pass has delivered a unit's gradient."""

    def _open_transport(self, process_group: dist.ProcessGroup | None) -> Transport:
        transport = super()._open_transport(process_group)
        try:
            check_merge(self.options, transport)
        except ValueError:
            transport.close()
            raise
        return transport

    remarks: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """The path of every parameter and the bytes that it costs; final after the first step. Prints as a table."""
        return self._planner.plan.with_remarks(self.remarks)

    @property
    def quality(self) -> dict[str, Quality]:
        """Effective rank and relative residual of this site's compressed gradients, by name of the weight."""
        return self._method.quality()

    @property
    def step(self) -> int:
        """Number of steps that have been agreed on, those before a resumption included."""
        return self._step

    @property
    def max_rank(self) -> int | None:
        """The largest rank of a layer's compressed gradient; None for methods without.

        May be set at any time, at each site to another value: the next step's gradients have it.
        """
        return self._method.max_rank

    @max_rank.setter
    def max_rank(self, rank: int) -> None:
        if self._method.max_rank is None:
            raise ValueError(f"mode {self.options.mode!r} has no rank to set")
        whole_number(1)("rank", rank)
        if self.options.merge != "all" and rank > self.options.rank:
            raise ValueError(
                f"with merge={self.options.merge!r} the rank may be lowered: it is {self.options.rank} at most"
            )
        self._method.max_rank = rank

    def state_dict(self) -> dict[str, Any]:
        """Return this site's state beside the model's: what the compressor carries from step to step.

        It involves no other site. Each site may save its own. A site that loads the state of another one approximates
        its gradients less well at first.
        """
        own = {"step": self._step, "mode": self.options.mode, "method": self._method.state_dict()}
        return own | self._planner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        In mode powersgd, where sites share state, all sites must call it once training has begun.

        Args:
            state: the state.

        Raises:
            ValueError: if the state is of another mode.
        """
        if state["mode"] != self.options.mode:
            raise ValueError(f"the state is of mode {state['mode']!r}, this reduction of {self.options.mode!r}")
        self._step = state["step"]
        self._method.load_state_dict(state["method"])
        self._planner.load_state_dict(state)

    def load_states(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Restore this site's state from those of all sites, as a checkpoint contains them.

        A site that has none in it, since the checkpoint was written by fewer sites, or without this one, takes over the
        number of the step, and its compressor begins anew.

        Args:
            states: the states, by rank; None for sites that were absent.

        Raises:
            ValueError: if the states are of another mode.
        """
        own = states[self.site_rank] if self.site_rank < len(states) else None
        other = next((each for each in states if each is not None), None)
        if own is not None:
            self.load_state_dict(own)
        elif other is not None:
            self.load_state_dict(
                other | {"method": self._method.state_dict(), "rounding": ErrorFeedback(True).state_dict()}
            )
        self._method.load_from_all([each["method"] for each in states if each is not None])

    def attach(self, gradients: AttachedGradients) -> None:
        """Weight, check and drop gradients that this reduction does not send with those that it sends.

        Args:
            gradients: gradients of parameters that are managed elsewhere.
        """
        self._attached = gradients

    @property
    def _has_attached(self) -> bool:
        return self._attached is not None and self._attached.arrived and not self._attached.cleared

    # Sites that join

    def _make_planner(self) -> Planner:
        return Planner(self.model, self._method, self.options, self._transport, self._samples, self._arrived)

    def _adopt(self, joined: JoinState) -> None:
        """Go on from the state of another site."""
        self._step = joined.step
        self._planner.adopt(joined.plan)
        self._join(joined)

    def _rejoin(self) -> None:
        """Join again after this site was dropped: its gradients of this step are lost, and its compressor begins anew.

        Raises:
            SiteError: if the others do not let it join.
        """
        self._transport.rejoin()
        self._planner.release(discard=True)
        joined = self._receive_state()
        assert joined is not None
        method, max_rank = make_method(self.options), self.max_rank
        if max_rank is not None:
            method.max_rank = max_rank
        self._method = method
        self._planner = self._make_planner()
        self.model.zero_grad()
        self._counter.reset()
        self._pending, self._epoch_samples = False, 0
        self._adopt(joined)
