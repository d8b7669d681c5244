"""Recovery of a run at a hub that has been restarted, by what its sites report.

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
from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import FrameError
from ..exchange.transport import Requirements
from .actions import Close, Drop, Join, Position
from .frames import Head, Kind, pack_control
from .journal import Journal
from .membership import Membership
from .restart_messages import Continue, Repeat, Report
from .session import Session
from .stream import PackedFrame

WAIT_SECONDS = 30.0  # for all sites, where all have to stay
_AWAY = "it has not dialled again since the hub was restarted"


class Host(Protocol):
    """The part of `dadplug.hub.relay.Relay` that a recovery needs."""

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
        self._host.journal.write("a run of before the restart goes on once its sites are here")
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
            return  # nobody waits for it any more
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
            f"the run of before the restart goes on after step {winner.position.step} with {names}"
        )
        for session in others:
            self._host.tell_to_wait(session)

    def _give_up(self, reason: str, now: float) -> None:
        self._end()
        self._host.journal.write(f"the run of before the restart ends: {reason}")
        for session in self._live():
            if session.recovers:
                self._host.drop(session, f"the hub has been restarted, and {reason}", now)
        self._host.begin_run(now)

    def _end(self) -> None:
        self.active, self._host.pause = False, ""
        self._reports, self._behind, self._sending, self._repeated = {}, [], set(), None
