"""Run of a training: its sites, their membership, the sums of the hub, and what it keeps of the open round.

**Recovery of a run**, at a hub that has been restarted, by what its sites report; and at one that could hear no site.
A hub stores nothing on disk: its sites have all state of a run, too. Sites whose hub is lost reconnect, and
name the last round that has been closed for them. A new hub asks them for a `RunReport`, and nothing of the run goes on
until all that take part have sent theirs, or `site_timeout` is over, and the time that sites need to come back, which
is longer after a long outage (`dadplug.hub.wire.streams`).

**No site is believed alone.** A report may be false. What more than half of the sites report wins over all else. What
fewer report counts if no such majority does in the time in which every site can come back, and what the run requires is
what most state. Of two sites, the hub cannot find out which one states the truth.

**The highest closed round wins**, among those. The old hub may have closed round k for some sites, and not for others,
which have ended it and wait. No site is further ahead: round k + 1 closes only after all of them. The first ones know
the contributors. If there are sites of both kinds, all send the frames of round k again (`Repeat`), the new hub passes
them on to those that lack some, and then announces the close to these, with the same contributors. If all sites of the
first kind are lost meanwhile, round k counts as open again.

**The open round is repeated.** Then all sites send the frames again that they have sent in the open round (`Continue`),
in their old order, and end it if they had. A site takes the frames of one sender in the order in which that one has
sent them, and has counted them: it skips as many as it had, also the first pieces of a message, so that the buffers it
has filled stay as they are. Every message arrives once, and the result of the round is the same to the bit.

**Who takes part.** A site is not taken back into the open round if another one knows that the old hub had dropped it,
if it holds another round, or if frames of round k that it lacks are lost with their sender. It is told so by `Accept`,
as a new process, and joins in a later step with the state of another one. The number of a life of the hub is part of
each position, so that rounds which two hubs have closed under the same number are told apart. Where all sites have to
stay, all must come; sites do not wait for closes there, and only the frames after the highest closed step are repeated.

**A hub that hears no site** may have lost its own connection. It gives no site up until it hears one again, and then
lets the others have the time that sites need to come back (`Outage`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from ...errors import FrameError
from ...exchange.rounds import Contribution, Outsized, Requirements
from ...support.logs import span
from ..wire.messages import (
    DTYPES,
    IDLE,
    Accept,
    Action,
    Close,
    Continue,
    Drop,
    Head,
    Join,
    Kind,
    Pause,
    Position,
    Repeat,
    Resume,
    RoundKind,
    Rules,
    RunReport,
    Skip,
    Start,
    add_up,
    pack_control,
)
from ..wire.streams import PackedFrame, return_seconds
from .journal import Journal
from .membership import Membership, Phase
from .session import Session, Sessions, pass_payload

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
        self.counts = [0] * len(names)
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
        match action:
            case Skip(slot=slot):
                self._backlog[slot] = self._backlog.get(slot, 0) + nbytes
                begins, first = slot not in self._first, kind is RoundKind.FIRST
                if first or begins:  # a further round belongs to the step before
                    self.counts[slot] += action.late
                if begins and (first or action.late):
                    step = self._first[slot] = self._step - (not first)
                    what = f"{self._names[slot]} {'is late' if action.late else 'joins'}"
                    self._journal.write(f"{what}: training goes on without it from step {step} on")
            case Drop():
                self._end(action.slot, "has left")
            case Close() if kind is RoundKind.FIRST:
                for slot in action.contributors:
                    self._end(slot, "takes part again")
                self._step += 1

    def _end(self, slot: int, what: str) -> None:
        self._backlog.pop(slot, None)
        first = self._first.pop(slot, None)
        if first is not None:
            steps = f"step {first}" if first == self._step - 1 else f"steps {first} to {self._step - 1}"
            self._journal.write(f"{self._names[slot]} {what}: it has missed {steps}")

    def overdue(self) -> list[int]:
        """Return the slots of late sites for which too much waits."""
        return [slot for slot, nbytes in self._backlog.items() if nbytes > LIMIT]


_Pieces = dict[int, deque[tuple[Head, memoryview]]]  # of equal exchange and offset, by slot

SUMS_LIMIT = 256 << 20  # bytes that wait for other sites' pieces, above which sites that are ahead are not read


class Sums:
    """Pieces of sums that wait for those of other sites; they are added up as soon as all have arrived.

    They are added in the order of slots, so that the result does not depend on the order of arrival. Elements of 16
    bits are added in 32 bits and rounded once. Pieces belong together by exchange and offset, the first ones of all
    sites, then the second ones, and so on.

    Args:
        world_size: number of sites.
        limit: bytes that may wait.

    Attributes:
        nbytes: bytes that wait, by slot.
    """

    def __init__(self, world_size: int, limit: int = SUMS_LIMIT) -> None:
        self.nbytes = [0] * world_size
        self._limit = limit
        self._waiting: dict[tuple[int, int], _Pieces] = {}  # by exchange and offset

    def extend(self, world_size: int) -> None:
        """Take the number of all sites, since there are further ones."""
        self.nbytes += [0] * (world_size - len(self.nbytes))

    def add(self, head: Head, body: memoryview, slots: Sequence[int]) -> bytes | None:
        """Take a piece.

        Args:
            head: its head.
            body: its body.
            slots: slots of the sites whose pieces count, in ascending order.

        Returns:
            The frame of the sum, if all its pieces are here.

        Raises:
            FrameError: if the piece does not fit those of other sites, or too much waits.
        """
        dtype = DTYPES.get(head.tag)
        if dtype is None:
            raise FrameError(f"summands have an unknown type of elements, number {head.tag}")
        if len(body) % dtype.itemsize or head.offset % dtype.itemsize:
            raise FrameError(f"{len(body)} bytes at byte {head.offset} are no summands of type {dtype}")
        if sum(self.nbytes) > 2 * self._limit:
            raise FrameError(f"more than {2 * self._limit} bytes of summands wait for those of other sites")
        key = head.exchange, head.offset
        pieces = self._waiting.setdefault(key, {})
        pieces.setdefault(head.slot, deque()).append((head, body))
        self.nbytes[head.slot] += len(body)
        if not all(slot in pieces for slot in slots):
            return None
        found = [pieces[slot].popleft() for slot in slots]
        for slot, (_, each) in zip(slots, found):
            self.nbytes[slot] -= len(each)
            if not pieces[slot]:
                del pieces[slot]
        if not pieces:
            del self._waiting[key]
        first = found[0][0]
        if len({(other.tag, len(each)) for other, each in found}) > 1:
            parts = zip(slots, found)
            where = ", ".join(f"{len(each)} bytes of type {other.tag} of site {slot}" for slot, (other, each) in parts)
            raise FrameError(
                f"the summands of exchange {head.exchange} differ, so that not all run one program: {where}"
            )
        total = add([each for _, each in found], dtype)
        return first._replace(kind=Kind.SUM, slot=0, tag=0).pack() + total

    @property
    def full(self) -> bool:
        """Whether sites that are ahead are not to be read."""
        return sum(self.nbytes) > self._limit

    def is_ahead(self, slot: int) -> bool:
        """Return whether a site is not to be read, since too much of it waits for others."""
        return self.full and self.nbytes[slot] > min(self.nbytes)


def add(summands: Sequence[bytearray | memoryview], dtype: torch.dtype) -> bytes:
    """Return a sum.

    Args:
        summands: arrays of equal sizes, at least one.
        dtype: type of their elements.
    """
    first, *others = summands  # the first one is copied, since the others are added to it
    total = add_up([torch.frombuffer(each, dtype=dtype) for each in (bytearray(first), *others)])
    return total.to(dtype).view(torch.uint8).numpy().tobytes()


_LIMIT = 1 << 30  # bytes


class OpenRound:
    """Frames that all sites are sent in a round, with their senders.

    Args:
        limit: bytes that are kept at most.

    Attributes:
        frames: senders and frames, in the order in which they were sent.
        nbytes: bytes of all frames of the round.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self.frames: list[tuple[int, PackedFrame]] = []
        self.nbytes = 0

    @property
    def complete(self) -> bool:
        """Whether all frames of the round have been kept."""
        return self.nbytes <= self._limit

    def append(self, slot: int, frame: PackedFrame) -> None:
        """Keep a frame of a site."""
        self.nbytes += len(frame)
        if self.complete:
            self.frames.append((slot, frame))
        else:
            self.frames.clear()

    def forget(self, slot: int) -> None:
        """Forget the frames of a site that has left."""
        self.frames = [each for each in self.frames if each[0] != slot]


SHORT_GRACE = 0.2  # seconds for which a site may connect again where others wait for it
_ABSENT = "it was absent when this site joined"
_HANDSHAKE = 2  # times as long where a connection is in its handshake, which may be that of the site


class Run:
    """One run, by the rules of the hub, which the sites may replace once it has started.

    Args:
        names: names of the sites, by slot.
        site_timeout: seconds of silence after which a site counts as lost.
        life: number of the run's history, see `Membership`.
        now: the time, in seconds.
        journal: log of who comes and goes.

    Attributes:
        names: names of the sites, by slot.
        rules: the rules that hold.
        membership: the membership.
        round: frames of the open round; kept only while the run is elastic.
        missed: training steps that late sites have missed.
        contributions: the parts of sites in the run, by slot, as reported last.
        outsized: what sites have found of the gradients of others, by slot, as reported last.
        sums: summands that wait for those of other sites.
        ahead: ENDs of later steps than the open one, by slot.
        pause: for whom training waits; empty while it goes on.
        ending: whether a site has left without which the run ends; sites that connect wait for the next one.
        completed: the last closed step when a site has completed its training; 0 before.
        absent: instances of the sites that were lost, by slot; those that have joined again since included.

    Raises:
        ValueError: if the timeout is out of range.
    """

    def __init__(self, names: Sequence[str], site_timeout: float, life: int, now: float, journal: Journal) -> None:
        self.names = tuple(names)
        self.rules = Rules(len(names), site_timeout=site_timeout)
        self.membership = Membership(names, self.rules, life, now)
        self.round = OpenRound()
        self.missed = MissedSteps(names, journal)
        self.contributions: dict[int, Contribution] = {}
        self.outsized: dict[int, Outsized] = {}
        self.sums = Sums(len(names))
        self.ahead: defaultdict[int, deque[int]] = defaultdict(deque)
        self.pause = ""
        self.ending = False
        self.completed = 0
        self.absent: dict[int, int] = {}
        # Announcements of the sites that have joined in the open round, which one that joins after them has missed.
        self._joined: dict[int, Join] = {}
        self._kind = RoundKind.COLLECTIVE  # of the open round, once a site has ended it
        self._required: Requirements | None = None

    @property
    def elastic(self) -> bool:
        """Whether the run goes on without a site that leaves."""
        return self._required is not None

    @property
    def may_grow(self) -> bool:
        """Whether sites that are new in the roster can join in the run, which goes on without some sites."""
        return self.elastic and self.membership.started and not self.ending

    @property
    def admits(self) -> bool:
        """Whether sites may join in the open round."""
        return self._kind is RoundKind.FIRST and self.round.complete

    def require(self, requirements: Requirements) -> None:
        """Take what the sites require.

        Args:
            requirements: the requirements.

        Raises:
            FrameError: if other sites have required something else, or it cannot be met.
        """
        if self._required is None:
            self._joined.clear()  # at the start
        elif not self._required.provisional and self._required != requirements:
            raise FrameError(f"it requires {requirements}, and another site {self._required}")
        try:
            rules = dataclasses.replace(
                self.rules,
                min_sites=requirements.min_sites,
                site_timeout=requirements.timeout_ms / 1e3,
                late="skip" if requirements.skips else "wait",
                patience=requirements.patience_percent / 100,
            )
            self.membership.replace_rules(rules)
        except ValueError as error:
            raise FrameError(str(error)) from error
        self._required, self.rules = requirements, rules

    def given_up(self) -> list[tuple[int, str]]:
        """Return the slots of the sites that cannot go on, and why."""
        if not self.elastic:
            return []
        overdue = [slot for slot in self.missed.overdue() if not self.membership.sites[slot].hold()]
        late = [(slot, f"late: more than {LIMIT >> 20} MB wait for it") for slot in overdue]
        orphans = [(slot, "no site is left that holds the state of the training") for slot in orphaned(self.membership)]
        return late + orphans

    def begin_ending(self, head: Head) -> bool:
        """Record the kind of the open round, which the first site that ends it gives.

        Args:
            head: head of the site's END.

        Returns:
            Whether the site contributes nothing.

        Raises:
            FrameError: if it says something unknown.
        """
        if self.elastic and head.step == self.membership.open_step:
            try:
                self.membership.round = self._kind = RoundKind(head.exchange & ~IDLE)
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
        match action:
            case Start() if self.membership.start.sites:
                self.require(Requirements(1, round(1e3 * self.rules.site_timeout), provisional=True))
            case Close():
                self.round = OpenRound()
                self._joined.clear()
                self._kind = RoundKind.COLLECTIVE
            case Join():
                self._joined[action.slot] = action
            case Drop():
                self._joined.pop(action.slot, None)
                self.ahead[action.slot].clear()
                self.round.forget(action.slot)
            case Pause():
                self.pause = action.reason
            case Resume():
                self.pause = ""

    def earlier(self, accept: Accept) -> list[Action]:
        """Return the announcements that a site which joins has missed: who is absent, and who joins as well."""
        if not accept.needs_state:
            return []
        others = set(range(len(self.names))) - {accept.slot, *self.membership.participants}
        gone: list[Action] = [Drop(slot, self.membership.open_step, _ABSENT) for slot in sorted(others)]
        return [*gone, *self._joined.values()]

    def grow(self, names: Sequence[str]) -> None:
        """Go on with further sites. What the sites require of this run stays.

        Args:
            names: names of all sites; those that are known keep theirs.
        """
        self.membership.append(names[len(self.names) :])
        self.missed.extend(names)
        self.sums.extend(len(names))
        self.names = tuple(names)


def orphaned(membership: Membership) -> list[int]:
    """Return the slots of the sites that wait for a state which no member is left to send."""
    return [] if any(site.phase is Phase.MEMBER for site in membership.sites) else membership.participants


WAIT_SECONDS = 30.0  # for all sites, where all have to stay
ALL_BACK_SECONDS = return_seconds(math.inf)  # in which every site that can has connected again
_AWAY = "it has not reconnected since the hub was restarted"
_UNHEARD_SECONDS = 3.0  # without a byte, after which a site cannot be heard; sites send one every second


class Outage:
    """Outage in which no site can be heard.

    Args:
        sessions: all sessions.

    Attributes:
        since: time at which a site was heard last; None while one can be heard.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.since: float | None = None

    @property
    def sessions(self) -> list[Session]:
        """The sessions that count; not those of checks, which may be of this machine."""
        return [each for each in self._sessions.values() if each.channel != "check"]

    def state(self, now: float) -> str:
        """Return for how long no site has been heard, in words; empty while one can be heard."""
        if self.since is None:
            return ""
        return f"no site has been heard for {span(now - self.since)}: the connection of this hub may be lost"

    def awaits_all(self, now: float) -> bool:
        """Return whether no site can be heard, or some have not come back since then."""
        back = any(each.stream is None and now < each.excused for each in self._sessions.values())
        return back or self.since is not None

    def silent(self, site_timeout: float, now: float) -> list[Session]:
        """Return the sessions whose connections are of no use any more, in an outage in which no site is given up.

        Args:
            site_timeout: seconds of silence after which a site counts as lost.
            now: the time, in seconds.
        """
        connected = [each for each in self._sessions.values() if each.stream is not None]
        return [each for each in connected if self.since is not None and now >= each.heard + site_timeout]

    def observe(self, site_timeout: float, now: float) -> tuple[str, float]:
        """Find out whether an outage begins or ends.

        Args:
            site_timeout: seconds of silence after which a site counts as lost.
            now: the time, in seconds.

        Returns:
            Text for the journal, empty if nothing has changed; and the seconds that sites have to come back at the end
            of an outage, else 0.
        """
        sessions = self.sessions
        silence = min(_UNHEARD_SECONDS, site_timeout)
        heard = any(each.stream is not None and now < each.heard + silence for each in sessions)
        if heard or not sessions:
            since, self.since = self.since, None
            if since is None or not heard:
                return "", 0.0
            wait = return_seconds(now - since)
            return (
                f"sites can be heard again, after {span(now - since)}: the others have {span(wait)} to come back",
                wait,
            )
        if self.since is not None:
            return "", 0.0
        self.since = max(each.heard for each in sessions)
        return "no site can be heard: the connection of this hub may be lost; it waits for all sites", 0.0


class Outcome(NamedTuple):
    """End of a recovery.

    Attributes:
        failure: why the run ends; empty where it goes on.
        step: the last closed round.
        requirements: requirements of the run; None where all sites have to stay.
        slots: slots of the sites that take part.
        joined: slots of those that have joined in the open round.
    """

    failure: str
    step: int = 0
    requirements: Requirements | None = None
    slots: Sequence[int] = ()
    joined: Sequence[int] = ()


class Recovery:
    """Recovery of one run. All sites that connect meanwhile wait.

    Args:
        run: the run, which has not started at this hub.
        sessions: all sessions.
        journal: log of who comes and goes.
        now: the time, in seconds.
    """

    def __init__(self, run: Run, sessions: Sessions, journal: Journal, now: float) -> None:
        self._run, self._sessions, self._journal, self._since = run, sessions, journal, now
        self._reports: dict[Session, RunReport] = {}
        self._behind: list[Session] = []  # that wait for the end of a round
        self._sending: set[Session] = set()  # that have not sent their frames of it again
        self._repeated: RunReport | None = None  # a report of a site that has closed the round
        self._lost_sender = False
        journal.write("a run that began before the restart goes on once its sites are connected")
        for session in self._sessions.of("training"):
            session.waits = True

    # What arrives

    def report(self, session: Session, report: RunReport) -> None:
        """Take the report of a site.

        Raises:
            FrameError: if it has lists of a wrong length, or states that the site itself has gone.
        """
        if not len(report.received) == len(report.arrived) == len(self._run.names) or session.slot in report.gone:
            raise FrameError("its report does not have one count for each site, or states that it has gone")
        self._reports[session] = report

    def require(self, session: Session, requirements: Requirements) -> None:
        """Take the requirements of a site, which it has stated meanwhile."""
        if session in self._reports:
            self._reports[session] = replace(self._reports[session], required=requirements)

    def take(self, session: Session, head: Head, frame: PackedFrame) -> None:
        """Take a frame of the last closed round, and pass it on to the sites that wait for its end."""
        if session not in self._sending:
            return  # no site waits for it any more
        if head.kind is Kind.END:
            self._sending.discard(session)
        elif head.kind is Kind.PAYLOAD:
            pass_payload(session, head, frame, self._behind)

    # Progress

    def advance(self, now: float) -> Outcome | None:
        """Get on as far as possible; to be called at every tick, too.

        Returns:
            The end of the recovery; None while it goes on.
        """
        live = self._sessions.of("training")
        self._reports = {session: each for session, each in self._reports.items() if session in live}
        if self._behind:
            self._close_for_those_behind(live)
        if not self._reports:
            if now >= self._since + WAIT_SECONDS or not any(each.recovers for each in live):
                return Outcome("its sites have left")
        elif not self._elastic and (again := [each.name for each in live if not each.recovers]):
            return Outcome(f"{', '.join(again)} has been started again")
        elif not self._behind:
            missing = self._missing(now)
            return self._wait_for(missing, now) if missing else self._conclude()
        return None

    @property
    def _winner(self) -> RunReport:
        """Report of a site for which the last round has been closed."""
        found = map(self._report_at, {each.position for each in self._reports.values()})
        return max(found, key=lambda each: (self._is_majority(each), each.position.step, len(self._holders(each))))

    def _report_at(self, position: Position) -> RunReport:
        """Return what most sites report that have closed a round; one that has joined in it lacks its contributors."""
        at = [each for each in self._reports.values() if each.position == position]
        counts = Counter((each.before, each.contributors, each.joined) for each in at)
        return max(
            at,
            key=lambda each: (
                bool(each.contributors),
                counts[each.before, each.contributors, each.joined],
                len(each.contributors),
            ),
        )

    def _is_majority(self, winner: RunReport) -> bool:
        """Return whether more than half of all sites hold a round, or can be brought to its end."""
        return 2 * len(self._holders(winner)) > len(self._run.names)

    @property
    def _elastic(self) -> bool:
        return any(each.required.min_sites for each in self._reports.values())

    @property
    def _required(self) -> Requirements:
        """Requirements of an elastic run, as most reports state them."""
        counts = Counter(each.required for each in self._reports.values())
        return max(counts, key=lambda each: (each.min_sites > 0, counts[each], not each.provisional, each.min_sites))

    @property
    def may_be_elastic(self) -> bool:
        """Whether the run goes on without a site that leaves, as far as it is known."""
        return self._elastic or not self._reports

    def _missing(self, now: float) -> list[int]:
        """Return the slots of sites that take part, and have not reported; not those that have started again."""
        there = {each.slot for each in self._reports}
        if self._elastic:
            there |= {each.slot for each in self._sessions.of("training") if not each.recovers}
            winner = self._winner
            if self._is_majority(winner) or now >= self._since + ALL_BACK_SECONDS:
                at = (each.gone for each in self._reports.values() if each.position == winner.position)
                there = there.union(*at)
        return [slot for slot in range(len(self._run.names)) if slot not in there]

    def _wait_for(self, missing: Sequence[int], now: float) -> Outcome | None:
        """Wait for sites, or go on without them."""
        names = ", ".join(self._run.names[slot] for slot in missing)
        waited = now - self._since
        back = min(max(each.return_ms for each in self._reports.values()) / 1e3, ALL_BACK_SECONDS)
        if self._elastic:
            winner, required = self._winner, self._required
            back = back if self._is_majority(winner) else ALL_BACK_SECONDS
            if waited >= max(required.timeout_ms / 1e3, back) and len(self._holders(winner)) >= required.min_sites:
                return self._conclude()
        if not self._elastic and waited >= max(WAIT_SECONDS, back):
            return Outcome(f"{names} has not reconnected within {waited:.0f} s since the hub was restarted")
        if self._run.pause != (reason := f"the hub has been restarted: waiting for {names}"):
            self._run.pause = reason
            self._journal.write(f"paused: {reason}")
        return None

    def _holders(self, winner: RunReport) -> list[Session]:
        """Return the sites that hold the last closed round, or can be brought to its end.

        A site that another one reports as gone is none of them, unless so few would be left: then those count that most
        of the sites agree with.
        """
        if not self._elastic:
            return list(self._reports)
        gone = {
            session: frozenset(each.gone) for session, each in self._reports.items() if each.position == winner.position
        }
        group = [*gone, *self._curable(winner, list(gone))]
        found = [each for each in group if each.slot not in frozenset().union(*gone.values())]
        ((most, count),) = Counter(gone.values()).most_common(1)
        if 2 * len(found) > len(group) or 2 * count <= len(gone):
            return found
        return [each for each in group if gone.get(each, most) == most and each.slot not in most]

    def _curable(self, winner: RunReport, at: Sequence[Session]) -> list[Session]:
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

    def _repeat(self, winner: RunReport, members: Sequence[Session], behind: list[Session]) -> None:
        """Have the last closed round repeated for sites that it has not been closed for."""
        self._behind, self._repeated, self._lost_sender = behind, winner, False
        self._sending = {each for each in members if each.slot in winner.contributors}
        for session in self._sending:
            session.send(pack_control(Repeat(winner.position), 0))

    def _close_for_those_behind(self, live: Sequence[Session]) -> None:
        """Announce the end of the round once all frames have been sent again; without it if a sender is lost."""
        self._lost_sender |= not self._sending.issubset(live)
        self._sending.intersection_update(live)
        if self._sending:
            return  # also after a loss: what the others still send again must not be taken for the open round
        winner, at = self._repeated, {each.position for each in self._reports.values()}
        # Otherwise all sites for which the round was closed are lost, and for the others it is still open.
        if winner is not None and winner.position in at:
            for session in self._reports.keys() & self._behind:
                if self._lost_sender:
                    del self._reports[session]  # it joins again
                    continue
                # Where all are waited for, a site accepts no close without one that it takes for a member.
                left = (
                    set()
                    if self._required.skips
                    else {*range(len(self._run.names))} - {*winner.contributors, session.slot}
                )
                for slot in sorted(left):
                    session.send(pack_control(Drop(slot, winner.position.step, _AWAY), 0))
                for slot in winner.joined:
                    session.send(pack_control(Join(slot, winner.position.step), 0))
                session.send(pack_control(Close(winner.position.step, winner.contributors), 0))
                self._reports[session] = replace(winner, listens=False)
        self._behind, self._repeated = [], None

    # The open round

    def _conclude(self) -> Outcome | None:
        """Let the run go on with the sites that take part, once all of them hold the last closed round."""
        winner, reports, elastic = self._winner, self._reports, self._elastic
        members = self._holders(winner)
        behind = [each for each in members if reports[each].position != winner.position]
        if elastic and behind:
            self._repeat(winner, members, behind)
            return None
        if not elastic and (
            len(members) < len(self._sessions.of("training")) or len({each.run for each in reports.values()}) > 1
        ):
            return Outcome("the sites do not take part in the same run")
        slots = [each.slot for each in members]
        step = winner.position.step + 1
        announcements: list[Any] = [Continue(self._run.membership.life, winner.position)]
        joined = [each.slot for each in members if reports[each].listens]
        # A site that has missed that one left takes a member that joins for a lie.
        absent = {*range(len(self._run.names))} - {*slots} | {*joined}
        announcements += [Drop(slot, step, _AWAY) for slot in sorted(absent)]
        announcements += [Join(slot, step) for slot in joined]
        for session in members:
            session.waits, session.ready = False, True
            for announcement in announcements:
                if not (isinstance(announcement, Drop) and announcement.slot == session.slot):
                    session.send(pack_control(announcement, 0))
        names = ", ".join(each.name for each in members)
        self._journal.write(
            f"the run that began before the restart goes on after step {winner.position.step} with {names}"
        )
        return Outcome("", winner.position.step, self._required if elastic else None, slots, joined)
