"""Sites of the hub's roster, each with the state of its membership."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from .actions import FRESH


class Phase(Enum):
    """State of a site.

    Attributes:
        ABSENT: not connected.
        WAITING: connected, takes part after the next boundary.
        JOINING: takes part in the open step, and waits for its state.
        MEMBER: takes part, and holds the last closed step.
    """

    ABSENT = "absent"
    WAITING = "waiting"
    JOINING = "joining"
    MEMBER = "member"


class Site:
    """Membership of one site.

    Attributes:
        name: its name in the roster.
        phase: its state.
        instance: random number of its process.
        session: number of connections so far.
        position: its position when it dialled in.
        needs_state: whether it needs a member's state, rather than a replay or nothing.
        heard: time at which bytes arrived from it.
        progressed: time at which frames of a step or a state arrived.
        ended: the last step that it has ended, or missed before it joined.
        idle: whether it has contributed nothing to this step.
        awaited: whether others wait for it, since it has ended a step after the last one that it has missed.
        donor: slot of the member that sends it the state.
        donations: number of states that it has been asked for.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.phase = Phase.ABSENT
        self.instance = self.session = 0
        self.position = FRESH
        self.needs_state = False
        self.heard = self.progressed = 0.0
        self.ended = 0
        self.idle, self.awaited = False, True
        self.donor: int | None = None
        self.donations = 0


class Sites:
    """Sites of the roster; a site's place is its slot.

    Args:
        roster: names of the sites.

    Raises:
        ValueError: if a name is used twice.
    """

    def __init__(self, roster: Sequence[str]) -> None:
        self._sites = [Site(name) for name in roster]
        self._slots = {name: slot for slot, name in enumerate(roster)}
        if len(self._slots) != len(roster):
            raise ValueError("a name is used twice in the roster")

    def append(self, name: str) -> None:
        """Append a site; raise ValueError if its name is used already."""
        if name in self._slots:
            raise ValueError(f"the name {name!r} is used twice in the roster")
        self._slots[name] = len(self._sites)
        self._sites.append(Site(name))

    def __len__(self) -> int:
        return len(self._sites)

    def __getitem__(self, slot: int) -> Site:
        return self._sites[slot]

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    def slot(self, name: str) -> int | None:
        """Return a site's slot; None if it is not in the roster."""
        return self._slots.get(name)

    def names(self, slots: Sequence[int]) -> str:
        """Return the names of sites for a message."""
        return ", ".join(self._sites[slot].name for slot in slots)

    def in_phase(self, *phases: Phase) -> list[int]:
        """Return the slots of the sites in one of some states."""
        return [slot for slot, site in enumerate(self._sites) if site.phase in phases]

    def connected(self) -> list[int]:
        """Return the slots of the connected sites."""
        return self.in_phase(Phase.WAITING, Phase.JOINING, Phase.MEMBER)

    def up_to(self, step: int) -> list[int]:
        """Return the slots of the members that have ended a step, or a later one."""
        return [slot for slot in self.in_phase(Phase.MEMBER) if self._sites[slot].ended >= step]

    def ended(self, step: int) -> list[int]:
        """Return the slots of the members that have ended a step."""
        return [slot for slot in self.in_phase(Phase.MEMBER) if self._sites[slot].ended == step]
