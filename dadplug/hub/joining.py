"""Sites that join in a step: what they need, and who sends it to them."""

from __future__ import annotations

from collections.abc import Sequence

from .actions import Accept, Action, Join, Position, Replay, SendState, Start
from .history import History
from .sites import Phase, Sites


class Joining:
    """Part of the membership that makes sites participants of the open step.

    Args:
        sites: the sites.
        history: the closed steps.
        actions: list that actions are appended to.
    """

    def __init__(self, sites: Sites, history: History, actions: list[Action]) -> None:
        self._sites, self._history, self._actions = sites, history, actions

    def accept(self, slot: int) -> None:
        """Accept a site that dials in during training, and have the frames replayed that it lacks."""
        site = self._sites[slot]
        position = self._history.continued(site.position)
        site.needs_state = position is None
        self._actions.append(Accept(slot, self._history.position, site.needs_state, site.session))
        if position is not None:
            site.position = position
            self._actions.append(Replay(slot, position.step + 1))

    def start(self, now: float) -> None:
        """Start training from the highest position of the connected sites."""
        connected = self._sites.connected()
        winner = self._history.start([self._sites[slot].position for slot in connected])
        holders = [slot for slot in connected if self._sites[slot].position == winner]
        self._actions.append(Start(Position(self._history.life, winner.step), tuple(holders)))
        for slot in connected:
            self._sites[slot].needs_state, self._sites[slot].donor = slot not in holders, None
            self._join(slot, now)
            self._actions.append(Replay(slot, self._history.open_step))

    def admit(self, slots: Sequence[int], now: float) -> None:
        """Make waiting sites participants of the open step."""
        for slot in slots:
            self._join(slot, now)
            if self._sites[slot].needs_state:
                self._actions.append(Replay(slot, self._history.open_step))

    def _join(self, slot: int, now: float) -> None:
        site = self._sites[slot]
        site.phase = Phase.JOINING if site.needs_state else Phase.MEMBER
        site.ended, site.progressed = self._history.step, now
        site.awaited = True
        self._actions.append(Join(slot, self._history.open_step, site.session))

    def assign_donors(self, now: float) -> None:
        """Ask a member for its state for each joiner without a donor, the one that was asked least often.

        A member that is behind does not hold the last closed step yet.
        """
        members = self._sites.up_to(self._history.step)
        for slot in self._sites.in_phase(Phase.JOINING) if members else ():
            joiner = self._sites[slot]
            if joiner.donor is None:
                joiner.donor = min(members, key=lambda member: self._sites[member].donations)
                joiner.progressed = now
                self._sites[joiner.donor].donations += 1
                self._actions.append(SendState(joiner.donor, slot, self._history.step))
