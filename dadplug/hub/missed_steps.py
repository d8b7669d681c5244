"""Training steps that late sites have missed, for the journal, the status page, and a bound of what waits for them."""

from __future__ import annotations

from collections.abc import Sequence

from .actions import Action, Close, Drop, Round, Skip
from .journal import Journal

LIMIT = 512 << 20  # bytes that a late site may leave to be received


class MissedSteps:
    """Training steps of a run, and those that members have missed.

    Steps are numbered from 0, as `GradientReduction.step` numbers them in a run that begins at 0.

    Args:
        names: names of the sites, by slot.
        journal: the journal.

    Attributes:
        counts: number of steps that each site has missed as a member, by slot.
    """

    def __init__(self, names: Sequence[str], journal: Journal) -> None:
        self._names, self._journal = names, journal
        self.reset()

    def reset(self, names: Sequence[str] | None = None) -> None:
        """Begin a run, with other sites if they are given."""
        self._names = self._names if names is None else names
        self.counts = [0] * len(self._names)
        self._step = 0
        self._first: dict[int, int] = {}  # the first step that a late site has missed, by slot
        self._backlog: dict[int, int] = {}  # bytes that have been sent to it since

    def extend(self, names: Sequence[str]) -> None:
        """Take the names of all sites, since there are further ones."""
        self.counts += [0] * (len(names) - len(self._names))
        self._names = names

    def take(self, action: Action, kind: Round, nbytes: int) -> None:
        """Take an action of the membership.

        Args:
            action: the action.
            kind: kind of the open round.
            nbytes: bytes of its payloads.
        """
        if isinstance(action, Skip):
            self._backlog[action.slot] = self._backlog.get(action.slot, 0) + nbytes
            if kind is Round.FIRST:
                self._skip(action.slot)
        elif isinstance(action, Drop):
            self._end(action.slot, "has left")
        elif isinstance(action, Close) and kind is Round.FIRST:
            for slot in action.contributors:
                self._end(slot, "takes part again")
            self._step += 1

    def _skip(self, slot: int) -> None:
        self.counts[slot] += 1
        if slot not in self._first:
            self._first[slot] = self._step
            self._journal.write(f"{self._names[slot]} is late: training goes on without it from step {self._step} on")

    def _end(self, slot: int, what: str) -> None:
        self._backlog.pop(slot, None)
        first = self._first.pop(slot, None)
        if first is not None:
            steps = f"step {first}" if first == self._step - 1 else f"steps {first} to {self._step - 1}"
            self._journal.write(f"{self._names[slot]} {what}: it has missed {steps}")

    def overdue(self) -> list[int]:
        """Return the slots of late sites for which too much waits."""
        return [slot for slot, nbytes in self._backlog.items() if nbytes > LIMIT]
