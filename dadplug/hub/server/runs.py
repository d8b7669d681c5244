"""Runs of the hub: which one goes on, or starts next, which sites it has, and which ones wait for the next.

**Runs.** Where all sites are required, the first one that leaves ends the run. Sites that connect for the next run wait
until the other sites of the last one have left. A hub therefore serves any number of runs, one after the other.

**Elastic runs.** The sites may require less, once a run has started; it then ends with the last site that leaves. Sites
that connect meanwhile wait until a site has ended a round that admits others, and join in this round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...errors import RefusedError
from ..wire.messages import Accept, Grow, Hello, Pause, pack_control
from .journal import Journal
from .run import Recovery, Run
from .session import HubStreams, Session, Sessions, check_release, check_start

_COPY = "copy the newest roster.json into"


class Runs:
    """The run that goes on, or starts next, of the first sites of the roster.

    Args:
        names: names of the sites by slot.
        site_timeout: seconds of silence after which a site counts as lost.
        life: random number, different for every process of the hub.
        now: the time, in seconds.
        sessions: all sessions.
        journal: log of who comes and goes.
        streams: streams of sites to the hub, whose service takes the names of the sites of each run.
        end: ends a session, for a reason, at a time.

    Attributes:
        roster: names of all sites by slot; those that were added during a run take part in the next one.
        run: the run.
        recovery: recovery of the run, where it began before the restart of the hub; else None.
    """

    def __init__(
        self,
        names: Sequence[str],
        site_timeout: float,
        life: int,
        now: float,
        sessions: Sessions,
        journal: Journal,
        streams: HubStreams,
        end: Callable[[Session, str, float], None],
    ) -> None:
        self.roster = tuple(names)
        self.run = Run(names, site_timeout, life, now, journal)
        self.recovery: Recovery | None = None
        self._site_timeout, self._sessions, self._journal = site_timeout, sessions, journal
        self._streams, self._end = streams, end
        # The last run that sites have completed: its rounds, and instances of the sites that were absent, by slot.
        self._ended_after = 0
        self._ended: Mapping[int, int] = {}

    @property
    def _missed(self) -> str:
        """Reason why a site that was absent at the end of the last run does not go on."""
        what = f"other sites have completed the run while this site was away, with {self._ended_after} rounds"
        return f"{what}: its weights are not the result; take those of another site"

    def check_missed(self, slot: int, hello: Hello) -> None:
        """Raise RefusedError if a process that connects was absent at the end of the last run."""
        process = hello.channel == "training" and self._ended.get(slot) == hello.instance
        if process and hello.position.step < self._ended_after:
            raise RefusedError(self._missed)

    def fit(self, session: Session, now: float) -> None:
        """Find out in which run a new session of training takes part, and whether it waits for it.

        Raises:
            RefusedError: if it can take part in none.
        """
        self._fit_roster(session, now)
        membership = self.run.membership
        if session.recovers and (self.run.ending or (membership.started and not self.run.elastic)):
            raise RefusedError("the other sites have begun another run")
        if session.recovers and not membership.started and self.recovery is None:
            self._replace(len(self.run.names), now)
            self.recovery = Recovery(self.run, self._sessions, self._journal, now)
        later = session.sites != len(self.run.names)
        session.waits = later or self.recovery is not None or membership.started
        self._fit_start(session)
        # Sites that start together compare their versions themselves.
        if session.waits and not session.recovers and not self.run.ending:
            check_release(session, self._sessions.training)

    def _is_later(self, session: Session) -> bool:
        """Return whether a session of training waits for the next run."""
        return session.waits and (self.run.ending or session.sites != len(self.run.names))

    def _fit_start(self, session: Session) -> None:
        """Take when a new session lets its run start; raise RefusedError if other sites of the run state otherwise."""
        later = self._is_later(session)
        peers = [each for each in self._sessions.of("training") if self._is_later(each) == later]
        check_start(session, peers)
        if not (later or peers or self.run.membership.started):
            self.run.membership.start = session.start

    def announce_wait(self, session: Session) -> None:
        """Tell a site that it is to join, or to wait for the next run; it knows that by itself during a recovery."""
        self._extend_session(session)
        later = session.sites != len(self.run.names)
        if self.recovery is not None and not later:
            return
        if not self.run.ending and not later:
            self._journal.write(f"{session.name} is connected; it joins at the next step")
            session.send(pack_control(Accept(session.slot, None, True), 0))
            return
        others = tuple(sorted(each.slot for each in self._sessions.training))
        names = ", ".join(self.run.names[slot] for slot in others)
        self._journal.write(f"{session.name} is connected for the next run: waiting for {names} to leave the last one")
        session.send(pack_control(Pause(others, f"waiting for {names} to leave the last run"), 0))

    def begin_next(self, now: float) -> None:
        """Begin the next run, of the sites that have waited for the end of the last one."""
        for slot, contribution in sorted(self.run.contributions.items()):
            self._journal.write(f"{self.roster[slot]} has contributed {contribution}")
        if self.run.completed:
            self._ended_after, self._ended = self.run.completed, self.run.absent
        for session in self._sessions.of("training"):
            if self._ended.get(session.slot) == session.instance:  # it has waited to join the run that is over
                self._end(session, self._missed, now)
        waiting = [each.sites for each in self._sessions.of("training")]
        self._replace(max(waiting, default=len(self.run.names)), now)

    def _replace(self, size: int, now: float) -> None:
        """Make the next run one of the first sites of the roster, and end the sessions of sites that lack some."""
        before, names = len(self.run.names), self.roster[:size]
        if size != before:
            new = ", ".join(names[before:])
            for session in self._sessions.of("training"):
                if session.sites < size:
                    reason = f"the project has new sites, {new}: {_COPY} this site's kit, and start it again"
                    self._end(session, reason, now)
                session.waits |= session.sites > size
            self._streams.service.begin(names)
        self.run = Run(names, self._site_timeout, self.run.membership.life + 1, now, self._journal)

    def extend(self, names: Sequence[str]) -> None:
        """Take a roster with further sites. A run that has begun goes on without them, and they take part in the next.

        Args:
            names: names of all sites by slot; those that are known keep theirs.
        """
        self.roster = tuple(names)
        for session in self._sessions.values():
            session.world_size = len(names)

    def _grow(self, size: int) -> None:
        """Add further sites of the roster to the run, and send `Grow` to all sites that take part or wait to."""
        new = ", ".join(self.roster[len(self.run.names) : size])
        self.run.grow(self.roster[:size])
        self._journal.write(f"the run grows: it is one of {size} sites now, with {new}")
        for session in self._sessions.of("training"):
            self._extend_session(session)

    def _extend_session(self, session: Session) -> None:
        """Announce all sites of the run to one that knows fewer."""
        names = self.run.names
        if session.sites < len(names) and self.run.may_grow:
            session.sites = len(names)
            session.send(pack_control(Grow(self.run.membership.open_step, names), 0))

    def grow_for_waiting(self) -> None:
        """Let sites that are new in the roster join, which have connected before the run was known to be elastic."""
        waiting = [each for each in self._sessions.values() if each.waits and each.sites > len(self.run.names)]
        if waiting and self.run.may_grow:
            self._grow(max(each.sites for each in waiting))
            for session in waiting:
                self.announce_wait(session)

    def _fit_roster(self, session: Session, now: float) -> None:
        """Fit the next run to the roster of a site that connects.

        The newest roster counts for a run that has not started. One that has started keeps its sites, unless it goes
        on without some of them: it then grows.

        Raises:
            RefusedError: if the site cannot take part.
        """
        size, run = len(self.run.names), self.run
        session.sites = session.sites or size
        if session.sites > len(self.roster):
            raise RefusedError(
                f"this site's roster has {session.sites} sites, and the hub's {len(self.roster)}: {_COPY} the hub's kit"
            )
        if session.sites <= session.slot:
            raise RefusedError(f"this site's roster has {session.sites} sites, and it is itself site {session.slot}")
        free = not run.membership.started and self.recovery is None
        if free and (session.sites > size or not self._sessions.of("training") or session.recovers):
            if session.sites != size:
                self._replace(session.sites, now)
        elif session.recovers and self.recovery is not None and session.sites != size:
            raise RefusedError(
                f"it knows {session.sites} sites, and those that go on with the run {size}: start it again"
            )
        elif run.may_grow:
            if session.sites > size:
                self._grow(session.sites)
        elif session.sites < size:
            new = ", ".join(run.names[session.sites :])
            raise RefusedError(f"the roster of this site's kit lacks {new}: {_COPY} this site's kit")
