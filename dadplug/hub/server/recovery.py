"""Recovery of a run: at a hub that has been restarted, by what its sites report; and at one that could hear no site.

A hub stores nothing on disk: its sites have all state of a run, too. Sites whose hub is lost reconnect, and
name the last round that has been closed for them. A new hub asks them for a `Report`, and nothing of the run goes on
until all that take part have sent theirs, or `site_timeout` is over, and the time that sites need to come back, which
is longer after a long outage (`dadplug.hub.wire.redialing`).

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

**A hub that hears no site** may have lost its own connection. It gives no site up until it hears one again, and then
lets the others have the time that sites need to come back (`Outage`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import FrameError
from ...exchange.transport import Requirements
from ...logs import span
from ..wire.messages import Close, Continue, Drop, Head, Join, Kind, Position, Repeat, Report, pack_control
from ..wire.redialing import return_seconds
from ..wire.streams import PackedFrame
from .journal import Journal
from .run import Run
from .session import Session

WAIT_SECONDS = 30.0  # for all sites, where all have to stay
_AWAY = "it has not reconnected since the hub was restarted"
_UNHEARD_SECONDS = 3.0  # without a byte, after which a site cannot be heard; sites send one every second


class Outage:
    """Outage in which no site can be heard.

    Attributes:
        since: time at which a site was heard last; None while one can be heard.
    """

    def __init__(self) -> None:
        self.since: float | None = None

    def state(self, now: float) -> str:
        """Return for how long no site has been heard, in words; empty while one can be heard."""
        if self.since is None:
            return ""
        return f"no site has been heard for {span(now - self.since)}: the connection of this hub may be lost"

    def observe(self, sessions: Sequence[Session], site_timeout: float, now: float) -> tuple[str, float]:
        """Find out whether an outage begins or ends.

        Args:
            sessions: all sessions.
            site_timeout: seconds of silence after which a site counts as lost.
            now: the time, in seconds.

        Returns:
            Text for the journal, empty if nothing has changed; and the seconds that sites have to come back at the end
            of an outage, else 0.
        """
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
    """

    failure: str
    step: int = 0
    requirements: Requirements | None = None
    slots: Sequence[int] = ()


class Recovery:
    """Recovery of one run. All sites that connect meanwhile wait.

    Args:
        run: the run, which has not started at this hub.
        sessions: all sessions, by channel and slot.
        journal: log of who comes and goes.
        now: the time, in seconds.
    """

    def __init__(self, run: Run, sessions: Mapping[tuple[str, int], Session], journal: Journal, now: float) -> None:
        self._run, self._sessions, self._journal, self._since = run, sessions, journal, now
        self._reports: dict[Session, Report] = {}
        self._behind: list[Session] = []  # that wait for the end of a round
        self._sending: set[Session] = set()  # that have not sent their frames of it again
        self._repeated: Position | None = None  # the round
        self._lost_sender = False
        journal.write("a run that began before the restart goes on once its sites are connected")
        for session in self._live():
            session.waits = True

    # What arrives

    def report(self, session: Session, report: Report) -> None:
        """Take the report of a site.

        Raises:
            FrameError: if it has lists of a wrong length.
        """
        if not len(report.received) == len(report.arrived) == len(self._run.names):
            raise FrameError("its report does not have one count for each site")
        self._reports[session] = report

    def require(self, session: Session, requirements: Requirements) -> None:
        """Take the requirements of a site, which it has stated meanwhile."""
        if session in self._reports:
            self._reports[session] = self._reports[session]._replace(**requirements._asdict())

    def take(self, session: Session, head: Head, frame: PackedFrame) -> None:
        """Take a frame of the last closed round, and pass it on to the sites that wait for its end."""
        if session not in self._sending:
            return  # no site waits for it any more
        if head.kind is Kind.END:
            self._sending.discard(session)
        elif head.kind is Kind.PAYLOAD:
            for other in self._behind:
                if other is not session:
                    other.send(frame)

    # Progress

    def advance(self, now: float) -> Outcome | None:
        """Get on as far as possible; to be called at every tick, too.

        Returns:
            The end of the recovery; None while it goes on.
        """
        live = self._live()
        self._reports = {session: each for session, each in self._reports.items() if session in live}
        if self._behind:
            self._close_for_those_behind(live)
        if not self._reports:
            if now >= self._since + WAIT_SECONDS or not any(each.recovers for each in live):
                return Outcome("its sites have left")
        elif not self._elastic and (again := [each.name for each in live if not each.recovers]):
            return Outcome(f"{', '.join(again)} has been started again")
        elif not self._behind:
            missing = self._missing()
            return self._wait_for(missing, now) if missing else self._conclude()
        return None

    def _live(self) -> list[Session]:
        return [each for (channel, _), each in self._sessions.items() if channel == "training"]

    @property
    def _winner(self) -> Report:
        """Report of a site for which the last round has been closed."""
        counts = Counter(each.position for each in self._reports.values())
        return max(
            self._reports.values(),
            key=lambda each: (each.position.step, counts[each.position], len(each.contributors)),  # 0 if it has joined
        )

    @property
    def _elastic(self) -> bool:
        return any(each.min_sites for each in self._reports.values())

    @property
    def may_be_elastic(self) -> bool:
        """Whether the run goes on without a site that leaves, as far as it is known."""
        return self._elastic or not self._reports

    def _missing(self) -> list[int]:
        """Return the slots of sites that take part, and have not reported; not those that have started again."""
        there = {each.slot for each in self._reports}
        if self._elastic:
            there |= {each.slot for each in self._live() if not each.recovers}
            winner = self._winner.position
            there = there.union(*(each.gone for each in self._reports.values() if each.position == winner))
        return [slot for slot in range(len(self._run.names)) if slot not in there]

    def _wait_for(self, missing: Sequence[int], now: float) -> Outcome | None:
        """Wait for sites, or go on without them."""
        names = ", ".join(self._run.names[slot] for slot in missing)
        winner, waited = self._winner, now - self._since
        back = max(each.return_ms for each in self._reports.values()) / 1e3
        if (
            self._elastic
            and waited >= max(winner.timeout_ms / 1e3, back)
            and len(self._taking_part()) >= winner.min_sites
        ):
            return self._conclude()
        if not self._elastic and waited >= max(WAIT_SECONDS, back):
            return Outcome(f"{names} has not reconnected within {waited:.0f} s since the hub was restarted")
        if self._run.pause != (reason := f"the hub has been restarted: waiting for {names}"):
            self._run.pause = reason
            self._journal.write(f"paused: {reason}")
        return None

    def _taking_part(self) -> list[Session]:
        """Return the sites that hold the last closed round, or can be brought to its end."""
        winner = self._winner
        if not self._elastic:
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

    def _repeat(self, winner: Report, members: Sequence[Session], behind: list[Session]) -> None:
        """Have the last closed round repeated for sites that it has not been closed for."""
        self._behind, self._repeated, self._lost_sender = behind, winner.position, False
        self._sending = {each for each in members if each.slot in winner.contributors}
        for session in self._sending:
            session.send(pack_control(Repeat(winner.position), 0))

    def _close_for_those_behind(self, live: Sequence[Session]) -> None:
        """Announce the end of the round once all frames have been sent again; without it if a sender is lost."""
        self._lost_sender |= not self._sending.issubset(live)
        self._sending.intersection_update(live)
        if self._sending:
            return  # also after a loss: what the others still send again must not be taken for the open round
        winner = next((each for each in self._reports.values() if each.position == self._repeated), None)
        if winner is not None:  # otherwise all that knew the end of the round are lost: for the others it is still open
            for session in self._reports.keys() & self._behind:
                if self._lost_sender:
                    del self._reports[session]  # it joins again
                    continue
                for slot in winner.joined:
                    session.send(pack_control(Join(slot, winner.position.step), 0))
                session.send(pack_control(Close(winner.position.step, winner.contributors), 0))
                self._reports[session] = winner._replace(listens=False)
        self._behind, self._repeated = [], None

    # The open round

    def _conclude(self) -> Outcome | None:
        """Let the run go on with the sites that take part, once all of them hold the last closed round."""
        winner, members, reports, elastic = self._winner, self._taking_part(), self._reports, self._elastic
        behind = [each for each in members if reports[each].position != winner.position]
        if elastic and behind:
            self._repeat(winner, members, behind)
            return None
        if not elastic and (len(members) < len(self._live()) or len({each.run for each in reports.values()}) > 1):
            return Outcome("the sites do not take part in the same run")
        slots = [each.slot for each in members]
        step = winner.position.step + 1
        announcements: list[Any] = [Continue(self._run.membership.life, winner.position)]
        announcements += [Drop(slot, step, _AWAY) for slot in range(len(self._run.names)) if slot not in slots]
        announcements += [Join(each.slot, step) for each in members if reports[each].listens]
        for session in members:
            session.waits, session.ready = False, True
            for announcement in announcements:
                session.send(pack_control(announcement, 0))
        names = ", ".join(each.name for each in members)
        self._journal.write(
            f"the run that began before the restart goes on after step {winner.position.step} with {names}"
        )
        return Outcome("", winner.position.step, _requirements(winner) if elastic else None, slots)


def _requirements(report: Report) -> Requirements:
    return Requirements(report.min_sites, report.timeout_ms, report.skips, report.patience_percent)
