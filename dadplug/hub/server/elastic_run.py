"""Requirements of a run for the sites that have to stay, and the frames of its open round.

Recovery of a run at a hub that has been restarted, by what its sites report.

A hub writes nothing down: all that it knows of a run, the sites know as well. Sites whose hub is lost dial again, and
name the last round that has been closed for them. A new hub asks them for a `Report`, and nothing of the run goes on
until all that take part have sent theirs, or `site_timeout` is over.

**The highest closed round wins.** The old hub may have closed round k for some sites, and not for others, which have
ended it and wait. No site is further ahead: round k + 1 closes only after all of them. The first ones know the
contributors. If there are sites of both kinds, all send the frames of round k again (`Repeat`), the new hub passes them
on to those that lack some, and then announces the close to these, with the same contributors. If all sites of the first
kind are lost meanwhile, round k counts as open again.

**The open round is repeated.** Then all sites send the frames again that they have sent in the open round (`Continue`),
in their old order, and end it if they had. A site takes the frames of one sender in the order in which that one has
sent them, and has counted them: it skips as many as it had, also the first pieces of a message, so that the buffers it
has filled stay as they are. Every message arrives once, and the result of the round is the same to the bit.

**Who takes part.** A site is not taken back into the open round if another one knows that the old hub had dropped it,
if it holds another round, or if frames of round k that it lacks are lost with their sender. It is told so by `Accept`,
as a new process, and joins in a later step with the state of another one. The number of a life of the hub is part of
each position, so that rounds which two hubs have closed under the same number are told apart. Where all sites have to
stay, all must come; sites do not wait for closes there, and only the frames after the highest closed step are repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ...errors import FrameError
from ...exchange.transport import Requirements
from ..wire.frames import Head, Kind
from ..wire.messages import (
    IDLE,
    Accept,
    Action,
    Close,
    Continue,
    Drop,
    Join,
    Position,
    Repeat,
    Report,
    RoundKind,
    Rules,
    Skip,
    pack_control,
)
from ..wire.streams import PackedFrame
from .journal import Journal
from .membership import Membership, Phase
from .session import Session

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

    def take(self, action: Action, kind: RoundKind, nbytes: int) -> None:
        """Take an action of the membership.

        Args:
            action: the action.
            kind: kind of the open round.
            nbytes: bytes of its payloads.
        """
        if isinstance(action, Skip):
            self._backlog[action.slot] = self._backlog.get(action.slot, 0) + nbytes
            if kind is RoundKind.FIRST:
                self._skip(action.slot)
        elif isinstance(action, Drop):
            self._end(action.slot, "has left")
        elif isinstance(action, Close) and kind is RoundKind.FIRST:
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


_LIMIT = 1 << 30  # bytes


class OpenRound:
    """Frames that all sites are sent in a round, with their senders.

    Args:
        limit: bytes that are kept at most.

    Attributes:
        nbytes: bytes of all frames of the round.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._frames: list[tuple[int, PackedFrame]] = []
        self.nbytes = 0

    @property
    def complete(self) -> bool:
        """Whether all frames of the round have been kept."""
        return self.nbytes <= self._limit

    def append(self, slot: int, frame: PackedFrame) -> None:
        """Keep a frame of a site."""
        self.nbytes += len(frame)
        if self.complete:
            self._frames.append((slot, frame))
        else:
            self._frames.clear()

    def forget(self, slot: int) -> None:
        """Forget the frames of a site that has left."""
        self._frames = [each for each in self._frames if each[0] != slot]

    def clear(self) -> None:
        """Begin a round."""
        self._frames.clear()
        self.nbytes = 0

    def frames(self) -> Iterator[PackedFrame]:
        """Yield the frames, in the order in which they were sent."""
        return (frame for _, frame in self._frames)


SHORT_GRACE = 0.2  # seconds for which a site may dial again where others wait for it
_ABSENT = "it was absent when this site joined"
_HANDSHAKE = 2  # times as long where a connection is in its handshake, which may be that of the site


class ElasticRun:
    """Rules of a run, which the sites may replace once it has started.

    Args:
        rules: rules of the hub.
        missed: counts the steps that late sites miss.

    Attributes:
        rules: the rules that hold.
        round: frames of the open round; kept only while the run is elastic.
        missed: training steps that late sites have missed.
        joined: announcements of the sites that have joined in the open round, by slot. A site that joins after them in
            the same round has to be told.
    """

    def __init__(self, rules: Rules, missed: MissedSteps) -> None:
        self.rules = self._first = rules
        self.round = OpenRound()
        self.missed = missed
        self.joined: dict[int, Join] = {}
        self._kind = RoundKind.COLLECTIVE  # of the open round, once a site has ended it
        self._required: Requirements | None = None

    @property
    def elastic(self) -> bool:
        """Whether the run goes on without a site that leaves."""
        return self._required is not None

    @property
    def admits(self) -> bool:
        """Whether sites may join in the open round."""
        return self._kind is RoundKind.FIRST

    def require(self, requirements: Requirements, membership: Membership) -> None:
        """Take what the sites require.

        Args:
            requirements: the requirements.
            membership: the membership, which gets rules that fit.

        Raises:
            FrameError: if other sites have required something else, or it cannot be met.
        """
        if self._required is None:
            self.joined.clear()  # at the start
        elif self._required != requirements:
            raise FrameError(f"it requires {requirements}, and another site {self._required}")
        timeout = requirements.timeout_ms / 1e3
        try:
            rules = replace(
                self.rules,
                min_sites=requirements.min_sites,
                site_timeout=timeout,
                late="skip" if requirements.skips else "wait",
                patience=requirements.patience_percent / 100,
            )
            membership.replace_rules(rules)
        except ValueError as error:
            raise FrameError(str(error)) from error
        self._required, self.rules = requirements, rules

    def given_up(self, membership: Membership) -> list[tuple[int, str]]:
        """Return the sites that cannot go on, and why.

        Args:
            membership: the membership.
        """
        if not self.elastic:
            return []
        late = [(slot, f"late: more than {LIMIT >> 20} MB wait for it") for slot in self.missed.overdue()]
        return late + [(slot, "no site is left that holds the state of the training") for slot in orphans(membership)]

    def begin_ending(self, head: Head, membership: Membership) -> bool:
        """Record the kind of the open round, which the first site that ends it gives.

        Args:
            head: head of the site's END.
            membership: the membership.

        Returns:
            Whether the site contributes nothing.

        Raises:
            FrameError: if it says something unknown.
        """
        if self.elastic and head.step == membership.open_step:
            try:
                membership.round = self._kind = RoundKind(head.exchange & ~IDLE)
            except ValueError as error:
                raise FrameError(f"it ends a round of an unknown kind, number {head.exchange}") from error
        return bool(head.exchange & IDLE)

    def grace(self, seconds: float, dials: bool) -> float:
        """Return for how long a lost connection is awaited: shortly, where others wait for it.

        Args:
            seconds: the time where all sites must stay.
            dials: whether a connection is in its handshake.
        """
        return min(seconds, SHORT_GRACE * (_HANDSHAKE if dials else 1)) if self.elastic else seconds

    def take(self, action: Action) -> None:
        """Take an action of the membership."""
        self.missed.take(action, self._kind, self.round.nbytes)
        if isinstance(action, Close):
            self.begin_round()
        elif isinstance(action, Join):
            self.joined[action.slot] = action
        elif isinstance(action, Drop):
            self.joined.pop(action.slot, None)

    def earlier(self, accept: Accept, world_size: int, membership: Membership) -> list[Action]:
        """Return the announcements that a site which joins has missed: who is absent, and who joins as well."""
        if not accept.needs_state:
            return []
        others = set(range(world_size)) - {accept.slot, *membership.participants}
        gone: list[Action] = [Drop(slot, membership.open_step, _ABSENT) for slot in sorted(others)]
        return [*gone, *self.joined.values()]

    def begin_round(self) -> None:
        """Begin a round."""
        self.round.clear()
        self.joined.clear()
        self._kind = RoundKind.COLLECTIVE

    def resize(self, names: Sequence[str], before: int) -> None:
        """Begin a run of other sites than before.

        Args:
            names: names of the sites.
            before: number of sites before.
        """
        self._require_sites(len(names), before)
        self.reset()
        self.missed.reset(names)

    def grow(self, names: Sequence[str], before: int) -> None:
        """Go on with further sites; arguments are those of `resize`. What the sites require of this run stays."""
        self._require_sites(len(names), before)
        self.missed.extend(names)

    def _require_sites(self, count: int, before: int) -> None:
        """Adapt the rule of the runs that follow to another number of sites."""
        every = self._first.min_sites == before
        self._first = replace(self._first, min_sites=count if every else min(self._first.min_sites, count))

    def reset(self) -> None:
        """Begin a run by the rules of the hub."""
        self.rules, self._required = self._first, None
        self.missed.reset()
        self.begin_round()


def orphans(membership: Membership) -> list[int]:
    """Return the slots of the sites that wait for a state which no member is left to send."""
    participants = membership.participants
    members = any(membership.phase(slot) is Phase.MEMBER for slot in participants)
    return [] if members or not membership.started else participants


WAIT_SECONDS = 30.0  # for all sites, where all have to stay
_AWAY = "it has not dialled again since the hub was restarted"


class Host(Protocol):
    """The part of `dadplug.hub.server.relay.Relay` that a recovery needs."""

    names: tuple[str, ...]
    sessions: dict[tuple[str, int], Session]
    membership: Membership
    pause: str
    journal: Journal

    def go_on(
        self, position: Position, requirements: Requirements | None, slots: Sequence[int], now: float
    ) -> None: ...

    def begin_run(self, now: float) -> None: ...

    def tell_to_wait(self, session: Session) -> None: ...

    def drop(self, session: Session, reason: str, now: float) -> None: ...


class Recovery:
    """Recovery of one run.

    Args:
        host: the relay.

    Attributes:
        active: whether a run is being recovered, so that all sites that dial in wait.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.active = False
        self._reports: dict[Session, Report] = {}
        self._since = 0.0
        self._behind: list[Session] = []  # that wait for the end of a round
        self._sending: set[Session] = set()  # that have not sent their frames of it again
        self._repeated: Position | None = None  # the round
        self._lost_sender = False

    # What arrives

    def begin(self, now: float) -> None:
        """Begin, since a site has dialled in that takes part in a run."""
        self.active, self._since = True, now
        self._host.journal.write("a run that began before the restart goes on once its sites are connected")
        for session in self._live():
            session.waits = True

    def report(self, session: Session, report: Report, now: float) -> None:
        """Take the report of a site.

        Raises:
            FrameError: if it has lists of a wrong length.
        """
        if not len(report.received) == len(report.arrived) == len(self._host.names):
            raise FrameError("its report does not have one count for each site")
        self._reports[session] = report
        self.advance(now)

    def require(self, session: Session, requirements: Requirements) -> None:
        """Take the requirements of a site, which it has stated meanwhile."""
        session.ready = True
        if session in self._reports:
            self._reports[session] = self._reports[session]._replace(**requirements._asdict())

    def take(self, session: Session, head: Head, frame: PackedFrame, now: float) -> None:
        """Take a frame of the last closed round, and pass it on to the sites that wait for its end."""
        if session not in self._sending:
            return  # no site waits for it any more
        if head.kind is Kind.END:
            self._sending.discard(session)
            self.advance(now)
        elif head.kind is Kind.PAYLOAD:
            for other in self._behind:
                if other is not session:
                    other.send(frame)

    # Progress

    def advance(self, now: float) -> None:
        """Get on as far as possible; called at every tick, too."""
        self._reports = {session: each for session, each in self._reports.items() if session in self._live()}
        if not self._reports:
            if now >= self._since + WAIT_SECONDS or not any(each.recovers for each in self._live()):
                self._give_up("its sites have left", now)
        elif not self._elastic() and (again := [each.name for each in self._live() if not each.recovers]):
            self._give_up(f"{', '.join(again)} has been started again", now)
        elif self._behind:
            self._close_for_those_behind()
            if not self._behind:
                self.advance(now)
        elif missing := self._missing():
            self._wait_for(missing, now)
        else:
            self._conclude(now)

    def _live(self) -> list[Session]:
        return [each for (channel, _), each in self._host.sessions.items() if channel == "training"]

    def _winner(self) -> Report:
        """Return the report of a site for which the last round has been closed."""
        counts = Counter(each.position for each in self._reports.values())
        return max(
            self._reports.values(),
            key=lambda each: (each.position.step, counts[each.position], len(each.contributors)),  # 0 if it has joined
        )

    def _elastic(self) -> bool:
        return any(each.min_sites for each in self._reports.values())

    def _missing(self) -> list[int]:
        """Return the slots of sites that take part, and have not reported; not those that have started again."""
        if not self._elastic():
            return [slot for slot in range(len(self._host.names)) if slot not in {each.slot for each in self._reports}]
        winner = self._winner().position
        there = {each.slot for each in self._reports} | {each.slot for each in self._live() if not each.recovers}
        gone = [set(each.gone) for each in self._reports.values() if each.position == winner]
        return [slot for slot in range(len(self._host.names)) if slot not in there.union(*gone)]

    def _wait_for(self, missing: Sequence[int], now: float) -> None:
        """Wait for sites, or go on without them."""
        names = ", ".join(self._host.names[slot] for slot in missing)
        winner = self._winner()
        waited = now - self._since
        if self._elastic() and waited >= winner.timeout_ms / 1e3 and len(self._taking_part()) >= winner.min_sites:
            self._conclude(now)
        elif not self._elastic() and waited >= WAIT_SECONDS:
            self._give_up(f"{names} has not dialled again within {WAIT_SECONDS:g} s since the hub was restarted", now)
        elif self._host.pause != (reason := f"the hub has been restarted: waiting for {names}"):
            self._host.pause = reason
            self._host.journal.write(f"paused: {reason}")

    def _taking_part(self) -> list[Session]:
        """Return the sites that hold the last closed round, or can be brought to its end."""
        winner = self._winner()
        if not self._elastic():
            return list(self._reports)
        at = [session for session, each in self._reports.items() if each.position == winner.position]
        gone = {slot for session in at for slot in self._reports[session].gone}
        return [each for each in [*at, *self._curable(winner, at)] if each.slot not in gone]

    def _curable(self, winner: Report, at: Sequence[Session]) -> list[Session]:
        """Return the sites that lack the end of the last closed round only, all whose frames can be had.

        Args:
            winner: a report of a site that has closed it.
            at: the sites that have.
        """
        found = [
            session
            for session, each in self._reports.items()
            if each.position == winner.before and session.slot in winner.contributors
        ]
        senders = {each.slot for each in (*at, *found)}
        return [
            session
            for session in found
            if all(
                slot in senders or slot == session.slot or self._reports[session].arrived[slot] == winner.received[slot]
                for slot in winner.contributors
            )
        ]

    # The last closed round

    def _repeat(self, winner: Report, behind: Sequence[Session]) -> None:
        """Have the last closed round repeated for sites that it has not been closed for."""
        self._behind, self._repeated, self._lost_sender = list(behind), winner.position, False
        self._sending = {each for each in self._taking_part() if each.slot in winner.contributors}
        for session in self._sending:
            session.send(pack_control(Repeat(winner.position), 0))

    def _close_for_those_behind(self) -> None:
        """Announce the end of the round once all frames have been sent again; without it if a sender is lost."""
        live = set(self._live())
        self._lost_sender |= not self._sending <= live
        self._sending &= live
        if self._sending:
            return  # also after a loss: what the others still send again must not be taken for the open round
        ahead = [each for each in self._reports.values() if each.position == self._repeated]
        for session in self._behind:
            if session not in self._reports:
                continue
            if not ahead:  # all that knew the end of the round are lost: for the others it is still open
                break
            if self._lost_sender:
                del self._reports[session]  # it joins again
                continue
            winner = ahead[0]
            for slot in winner.joined:
                session.send(pack_control(Join(slot, winner.position.step, 0), 0))
            session.send(pack_control(Close(winner.position.step, winner.contributors, 0), 0))
            self._reports[session] = winner._replace(listens=False)
        self._behind, self._repeated = [], None

    # The open round

    def _conclude(self, now: float) -> None:
        """Let the run go on, and the sites join that do not take part."""
        winner, members = self._winner(), self._taking_part()
        behind = [each for each in members if self._reports[each].position != winner.position]
        if self._elastic() and behind:
            self._repeat(winner, behind)
            return
        reports, others = self._reports, [each for each in self._live() if each not in members]
        elastic = self._elastic()
        if not elastic and (others or len({each.run for each in reports.values()}) > 1):
            self._give_up("the sites do not take part in the same run", now)
            return
        self._end()
        requirements = Requirements(*winner[-4:]) if elastic else None
        for session in members:
            session.waits, session.ready = False, True
        slots = [each.slot for each in members]
        announcements: list[Any] = [Continue(self._host.membership.life + 1, winner.position)]
        step = winner.position.step + 1
        announcements += [Drop(slot, step, _AWAY) for slot in range(len(self._host.names)) if slot not in slots]
        announcements += [Join(each.slot, step, 0) for each in members if reports[each].listens]
        for session in members:
            for announcement in announcements:
                session.send(pack_control(announcement, 0))
        self._host.go_on(winner.position, requirements, slots, now)
        names = ", ".join(each.name for each in members)
        self._host.journal.write(
            f"the run that began before the restart goes on after step {winner.position.step} with {names}"
        )
        for session in others:
            self._host.tell_to_wait(session)

    def _give_up(self, reason: str, now: float) -> None:
        self._end()
        self._host.journal.write(f"the run that began before the restart ends: {reason}")
        for session in self._live():
            if session.recovers:
                self._host.drop(session, f"the hub has been restarted, and {reason}", now)
        self._host.begin_run(now)

    def _end(self) -> None:
        self.active, self._host.pause = False, ""
        self._reports, self._behind, self._sending, self._repeated = {}, [], set(), None
