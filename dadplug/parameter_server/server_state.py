"""State of a parameter server's site: in checkpoints, and for a site that returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import MismatchError
from ..exchange import codec
from ..model_sync.replicated_model import JoinState, ReplicatedModel
from .collector import GradientCollector
from .frames import Kind
from .gradients import UnsentGradients
from .log import Commit, Log
from .replica import Replica


class ServerState(ReplicatedModel):
    """Part of `dadplug.ParameterServer` that reads and restores its state."""

    phases: int
    _in_trainer: bool
    _unfinished: bool
    _log: Log
    _replica: Replica
    _collector: GradientCollector
    _held: UnsentGradients
    _earlier: int
    _described: dict[str, str]

    @property
    def version(self) -> int:
        """Number of commits that have been applied."""
        raise NotImplementedError

    def _apply_arrived(self) -> Commit | None:
        raise NotImplementedError

    def _end_phase(self, end: Commit) -> None:
        raise NotImplementedError

    # A site that returns

    def _answer(self, site: int) -> None:
        """Send the state of this site to one that returns."""
        objects = {name: each.state_dict() for name, each in self._further.items()}
        further = {"earlier": self._earlier, "phases": self.phases, "epochs": self._log.epochs, "objects": objects}
        state = self._replica.snapshot(self.model, self._described, further)
        self._log.send(Kind.SNAPSHOT, site, body=codec.encode(state))

    def _take_over(self, state: JoinState) -> None:
        """Go on from the state of another site: apply what has been committed since, and take part."""
        objects = state.further["objects"]
        if objects.keys() != self._further.keys():
            raise MismatchError(f"state= names {sorted(self._further)}, and at the other sites {sorted(objects)}")
        self._replica.take_over(state)
        for name, value in objects.items():
            self._further[name].load_state_dict(value)
        self._earlier, self.phases = state.further["earlier"], state.further["phases"]
        self._log.send(Kind.READY)
        while self._log.first is None:
            self._log.wait(lambda: self._log.first is not None)
            while (end := self._apply_arrived()) is not None:  # of a phase that this site has not taken part in
                self._end_phase(end)
        self._joined = None

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return this site's state beside its model and its optimizer, which are the same on all sites.

        It involves no other site. Each site saves its own, after `finish`.

        Raises:
            RuntimeError: in the middle of a phase, in which replicas differ.
        """
        if self._unfinished and not self._in_trainer:
            raise RuntimeError("this replica differs from those of the other sites: call finish() on all sites before")
        if self._held.samples or self._log.outstanding or self._collector.pending:
            raise RuntimeError("some gradients of this site are not committed yet: call finish() on all sites before")
        return {"version": self.version, "epochs": self._log.epochs} | self._replica.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; all sites must do so, before their first step.

        Args:
            state: the state.
        """
        self._earlier = state["version"] - self._replica.version
        if epochs := state.get("epochs", 0):  # 0 in earlier versions at other sites than 0
            self._log.epochs = epochs
            self._log.send(Kind.EPOCHS, epochs)
        self._replica.load_state_dict(state)

    def load_states(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        """Restore this site's state from those of all sites, as a checkpoint contains them.

        A site that has none in it begins with an empty compressor state, at the version of the others.

        Args:
            states: the states, by rank.
        """
        own = states[self.site_rank] if self.site_rank < len(states) else None
        if own is not None:
            self.load_state_dict(own)
        elif (other := next((each for each in states if each is not None), None)) is not None:
            empty = self._replica.state_dict() | {"reference": other["reference"]}
            self.load_state_dict(dict(other) | empty)
