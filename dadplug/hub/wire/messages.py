"""Rules, positions and actions of the hub's membership: plain values that `Membership` takes and returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple


class Position(NamedTuple):
    """The last step that a site or the hub has closed.

    Attributes:
        life: number of the history that the step belongs to; each start from the sites' positions begins a new one.
        step: number of the step; 0 where none has been closed.
    """

    life: int
    step: int


FRESH = Position(0, 0)


class Round(IntEnum):
    """Kind of a step of the hub, which is one round of exchanges.

    Attributes:
        COLLECTIVE: a round of its own, beside training steps. All members are waited for, and it closes with any number
            of them, since others have begun it.
        FIRST: the first round of a training step. Sites may join in it, late ones may miss it; it needs `min_sites`.
        FURTHER: another round of a training step. It closes with any number of sites, and those that have missed the
            first round are not waited for.
    """

    COLLECTIVE = 0
    FIRST = 1
    FURTHER = 2


IDLE = 4
"""Bit beside the `Round` in the number of an END: the site contributes nothing to the step."""


@dataclass(frozen=True)
class Rules:
    """Rules of membership.

    Attributes:
        min_sites: number of sites below which no step closes.
        late: "wait": every member's END is waited for; "skip": a late member misses the step and stays a member.
        patience: with "skip", how many times the median step a member may take.
        site_timeout: seconds without any bytes after which a site counts as lost.
        progress_timeout: seconds for which others wait for a site that is alive and does not get on.
        start_timeout: seconds after which training starts with `min_sites`, without those of the roster that have not
            dialled in; None to wait for all. Without all of them, the site with the most steps may be missing.
        kept_steps: number of closed steps whose frames are kept for replay.
        max_lag: with "skip", number of steps by which a member may be behind.

    Raises:
        ValueError: if a rule is out of range.
    """

    min_sites: int
    late: Literal["wait", "skip"] = "wait"
    patience: float = 3.0
    site_timeout: float = 10.0
    progress_timeout: float = 300.0
    start_timeout: float | None = None
    kept_steps: int = 16
    max_lag: int = 256

    def __post_init__(self) -> None:
        if self.min_sites < 1:
            raise ValueError(f"min_sites={self.min_sites}: at least one site has to stay")
        if self.late not in ("wait", "skip"):
            raise ValueError(f"late={self.late!r}: choose 'wait' or 'skip'")
        if not self.patience > 1:
            raise ValueError(f"patience={self.patience}: it has to exceed 1, the median step")
        for name in ("site_timeout", "progress_timeout", "kept_steps", "max_lag"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: it has to be positive")
        if self.start_timeout is not None and not self.start_timeout >= 0:
            raise ValueError(f"start_timeout={self.start_timeout}: it cannot be negative")


@dataclass(frozen=True)
class Accept:
    """Attach the connection that has dialled in to its slot.

    Attributes:
        slot: the site.
        position: the hub's position; None where training has not started. A site that needs no state adopts its life.
        needs_state: whether the site will be sent parameters and progress; unknown, and False, before the start.
        session: number of this connection among those of the slot.
    """

    slot: int
    position: Position | None
    needs_state: bool
    session: int


@dataclass(frozen=True)
class Refuse:
    """Send the reason to the connection that has dialled in, and close it.

    Attributes:
        name: the name it has given.
        reason: the reason.
        retry: whether it may be accepted later.
    """

    name: str
    reason: str
    retry: bool


@dataclass(frozen=True)
class Start:
    """Announce that training starts, or starts again from an older position since no site holds the last step.

    A hub that knows its last closed step, from a log that is written before a close is announced, goes on with the
    sites that hold it. Without a log it waits for all sites of the roster, since an absent one may have closed the most
    steps, and the highest closed step wins. The same happens where all sites are here and none holds the last step.
    Every such start is a new life, with a number never used before: steps with equal numbers in different lives are
    different steps, so a site that comes later from an older life is sent the state.

    Attributes:
        position: the position that training starts from.
        holders: slots that are at this position; the other sites will be sent the state. A holder that has loaded
            another state meanwhile has to dial again.
    """

    position: Position
    holders: Sequence[int]


@dataclass(frozen=True)
class Join:
    """Announce a participant.

    Attributes:
        slot: the site.
        step: the first step that it takes part in. What it has sent for this step before is void.
        session: number of its connection. A site that is replayed its own earlier `Join` has to ignore it.
    """

    slot: int
    step: int
    session: int


@dataclass(frozen=True)
class Grow:
    """Announce the names of all sites, since a site that is new in the roster has dialled in: an elastic run grows.

    Attributes:
        step: the open step. Sites take the new ones into their exchanges at the end of the first training step that
            begins with this one or a later one, so that all do so in the same place.
        names: names of all sites, by slot; those that are known keep theirs.
    """

    step: int
    names: Sequence[str]


@dataclass(frozen=True)
class SendState:
    """Ask a member for its state after a closed step, which it holds until the next step closes.

    Attributes:
        donor: the member.
        joiner: the site that needs the state; what it has received from other donors is void.
        step: the closed step.
    """

    donor: int
    joiner: int
    step: int


@dataclass(frozen=True)
class Replay:
    """Send the kept frames of the steps from `first` on, those of the open step included, and all later ones.

    Attributes:
        slot: the site.
        first: the first step.
    """

    slot: int
    first: int


@dataclass(frozen=True)
class Drop:
    """Announce that a site has gone, and close its connection.

    Attributes:
        slot: the site.
        step: the open step, in which it counts as a site with 0 samples; what it has sent for this step is void.
        reason: the reason.
    """

    slot: int
    step: int
    reason: str


@dataclass(frozen=True)
class Skip:
    """Announce that a member is late: it counts as a site with 0 samples in this step, and stays a member.

    Attributes:
        slot: the site.
        step: the step.
    """

    slot: int
    step: int


@dataclass(frozen=True)
class Redo:
    """Compute the sums of the open step again, which have been computed from others' summands.

    Attributes:
        step: the step.
        attempt: number of the attempt, which the new sums carry; older ones are void.
        participants: slots whose summands count.
    """

    step: int
    attempt: int
    participants: Sequence[int]


@dataclass(frozen=True)
class Close:
    """Announce that a step is closed: all apply it.

    Attributes:
        step: the step.
        contributors: slots whose frames count, in ascending order.
        attempt: the attempt whose sums count.
    """

    step: int
    contributors: Sequence[int]
    attempt: int


@dataclass(frozen=True)
class Pause:
    """Announce that the open step cannot close, or training not start, until a site dials in.

    Attributes:
        waiting_for: slots of the sites that are waited for.
        reason: the reason, with their names.
    """

    waiting_for: Sequence[int]
    reason: str


@dataclass(frozen=True)
class Resume:
    """Announce that training goes on.

    Attributes:
        step: the open step.
    """

    step: int


Action = Accept | Refuse | Start | Join | SendState | Replay | Drop | Skip | Redo | Close | Pause | Resume


class Report(NamedTuple):
    """Report of a site on a run that the hub does not know.

    Attributes:
        run: number of the run, the life of the hub at which it has started.
        position: the last round that has been closed for this site.
        before: the round before it.
        contributors: slots of the contributors of the last closed round.
        joined: slots of those of them that had joined in it, and do not count.
        gone: slots of the sites that take no part in the open round, as far as this site knows.
        received: number of frames in the last closed round, by slot of their sender.
        arrived: the same for the open round.
        listens: whether this site has joined in the open round.
        min_sites: number of sites that are required; 0 where all have to stay.
        timeout_ms: milliseconds of silence after which a site counts as lost; 0 where all have to stay.
        skips: as in `dadplug.exchange.transport.Requirements`, like the next.
        patience_percent: time after which a site is late.
    """

    run: int
    position: Position
    before: Position
    contributors: tuple[int, ...]
    joined: tuple[int, ...]
    gone: tuple[int, ...]
    received: tuple[int, ...]
    arrived: tuple[int, ...]
    listens: bool
    min_sites: int
    timeout_ms: int
    skips: bool
    patience_percent: int


class Repeat(NamedTuple):
    """Request to send the frames of the last closed round again, for sites that the close has not reached.

    Attributes:
        position: the round.
    """

    position: Position


class Continue(NamedTuple):
    """Announcement that the run goes on: all send the frames of the open round again.

    Attributes:
        life: number of this life of the hub, which closes the rounds from now on.
        position: the last closed round.
    """

    life: int
    position: Position
