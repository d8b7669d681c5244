"""Relay of the hub: passes frames on between the sessions of sites, and carries out what the membership decides.

Without sockets. Frames go into the queues of sessions, which `dadplug.hub.server.hub` sends. In which run a site takes
part, `Runs` decides.

**Outages.** Where no site at all can be heard, the fault may be the hub's own connection, and no site is given up. Once
one is heard again, the others have the time to come back that sites need after such an outage, see `Outage`.

A site that is dropped is told so by a `Drop` of its own slot, the last frame that it gets. When the hub ends, all sites
are told in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import FrameError, RefusedError
from ...exchange.rounds import Contribution, Outsized, Requirements, Spent
from ..secure.epochs import answers
from ..wire.messages import (
    Accept,
    Action,
    Arrived,
    Close,
    Drop,
    Exclude,
    Head,
    Hello,
    Join,
    Joined,
    KeyMessage,
    Kind,
    Leave,
    Pause,
    Receiving,
    Resume,
    RunReport,
    SendState,
    Skip,
    Start,
    Welcome,
    pack_control,
    read_control,
)
from ..wire.streams import HUB_SLOT, SendQueue
from .journal import Journal
from .membership import Phase
from .run import Outage, Run
from .runs import Runs
from .session import (
    FULL_BYTES,
    HubStreams,
    Received,
    Session,
    Sessions,
    check_hello,
    pass_payload,
    refuse_second,
)
from .store import Store

GRACE = 5.0  # seconds
_SMALL_BYTES = 1024  # bytes of a frame that costs its head more than its body
_STEPS_AHEAD = 1000  # that a site may have ended while others have not ended the open one
_APART_SECONDS = 1.5  # between the last bytes of two sites whose links were cut together, at most


class Relay:
    """Sessions of all sites, and the membership.

    Args:
        names: names of the sites by slot.
        site_timeout: seconds of silence after which a site counts as lost.
        life: random number, different for every process of the hub.
        now: the time, in seconds.
        journal: log of who comes and goes.
        streams: streams of sites to the hub itself.
        grace: seconds for which a site whose connection is lost may connect again.
        sealed: whether the project's messages are sealed, so that members may refuse a site that joins.

    Attributes:
        sealed: see above.
        journal: log of who comes and goes.
        sessions: sessions by channel and slot.
        runs: the runs, and the roster.
        crowded: whether some frames may not be read, since queues are full.
        outage: outage in which no site can be heard.
        status: the hub's status as of its last report, which sites may ask for.
        spent: what training has cost the records of sites, by slot, as they have last said.
    """

    def __init__(
        self,
        names: Sequence[str],
        site_timeout: float,
        life: int,
        now: float,
        journal: Journal,
        streams: HubStreams,
        grace: float = GRACE,
        sealed: bool = False,
    ) -> None:
        self.sealed = sealed
        self.journal = journal
        self.sessions = Sessions()
        self.runs = Runs(names, site_timeout, life, now, self.sessions, journal, streams, self._end)
        self.crowded = False
        self.outage = Outage(self.sessions)
        self.status: dict[str, Any] = {}
        self.spent: dict[int, Spent] = {}
        self._grace, self._streams = grace, streams
        # Messages to sites that have not opened the channel "parameters", by slot; None for those that have closed it.
        self._early: dict[int, SendQueue | None] = {}
        self._gone: dict[tuple[str, int], tuple[int, str]] = {}  # last instance that may not connect again, and why
        self._store = Store()

    @property
    def run(self) -> Run:
        """The run that goes on, or starts next, of the first sites of the roster."""
        return self.runs.run

    # Connections.

    def greet(self, name: str, hello: Hello, serial: int, now: float) -> tuple[Session, Welcome]:
        """Take a site's first message on a connection.

        Args:
            name: name of the site, which has been verified.
            hello: the message.
            serial: serial number of the site's certificate.
            now: the time, in seconds.

        Returns:
            The session to attach the connection to, and the answer.

        Raises:
            RefusedError: if the site is refused.
            TryAgainError: if it is refused, and may be accepted later.
        """
        check_hello(hello)
        slot = self.runs.roster.index(name)
        key = hello.channel, slot
        session = self.sessions.get(key)
        if session is not None and session.instance == hello.instance:
            try:
                session.queue.resume(hello.received)
            except FrameError as error:
                self.drop(session, str(error), now)
                raise RefusedError(str(error)) from error
            session.serial = serial
            return session, self._welcome(True, session.received)
        if session is not None:
            if session.stream is not None:
                refuse_second(session, hello.instance, self.run.rules.site_timeout, now)
            self.drop(session, "another process has connected as this site", now)
        gone = self._gone.get(key)
        if gone is not None and gone[0] == hello.instance:
            raise RefusedError(f"the hub has given this site up: {gone[1]}")
        self.runs.check_missed(slot, hello)
        session = Session(slot, name, hello, serial, len(self.runs.roster), now)
        if hello.channel == "training":
            self.runs.fit(session, now)
        self.sessions[key] = session
        if hello.channel == "parameters" and (kept := self._early.pop(slot, None)) is not None:
            session.queue = kept
        if session.waits:
            self.runs.announce_wait(session)
        elif hello.channel == "training":
            self.journal.write(f"{name} has joined")
            self._act(self.run.membership.dial(slot, now), now)
        return session, self._welcome(False, 0)

    def _welcome(self, resumed: bool, received: int) -> Welcome:
        rules = self.run.rules
        return Welcome(resumed, received, rules.min_sites, round(rules.site_timeout * 1000), round(self._grace * 1000))

    def drop(self, session: Session, reason: str, now: float) -> None:
        """End a session for good, and the site's part in training if the session is that of training.

        Args:
            session: the session.
            reason: the reason; empty where the site's training is complete.
            now: the time, in seconds.
        """
        self._gone[session.channel, session.slot] = session.instance, reason or "it has left"
        self._lose(session, reason, now)

    def fail(self, session: Session, error: Exception, now: float) -> None:
        """End a session that cannot be served by a fault of the hub, so that all others go on.

        Args:
            session: the session.
            error: the error.
            now: the time, in seconds.
        """
        self.journal.fault(f"{session.name} ({session.channel}) cannot be served", error)
        reason = f"the hub has failed to serve this site: {type(error).__name__}: {error}"
        if session.ended is not None:
            return
        try:
            self.drop(session, reason, now)
        except Exception as again:
            self.journal.fault(f"{session.name} ({session.channel}) cannot be dropped", again)
        if session.ended is None:
            self._end(session, reason, now)

    def _lose(self, session: Session, reason: str, now: float, may_return: bool = False) -> None:
        """End a session; where the run is elastic, its site may join again, and one that only waits always may."""
        if session.channel == "training" and not session.waits:
            self._act(self.run.membership.close(session.slot, reason, now), now)
        else:
            self._end(session, reason, now, may_return=may_return)

    def tick(self, now: float, dials: bool = False) -> None:
        """Let time pass, while a connection is in its handshake (`dials`) or none is."""
        self._observe_outage(now)
        for session in list(self.sessions.values()):
            try:
                self._tick_session(session, now, dials)
            except Exception as error:
                self.fail(session, error, now)
        for slot, reason in self.run.given_up():
            self.drop(self.sessions["training", slot], reason, now)
        self._recover(now)
        if not self.outage.awaits_all(now):  # else no site is late
            self._act(self.run.membership.tick(now), now)

    def _observe_outage(self, now: float) -> None:
        sessions = self.outage.sessions
        for session in sessions:
            if session.stream is not None and not self.readable(session):
                session.heard = now
        text, wait = self.outage.observe(self.run.rules.site_timeout, now)
        if text:
            self.journal.write(text, "warning")
        for session in sessions if wait else ():
            session.excused = now + wait
        for slot in self.run.membership.participants if wait else ():
            self.run.membership.sites[slot].progressed = now

    @property
    def trains(self) -> bool:
        """Whether members train and none has lost its connection, so that no site waits for a handshake."""
        return self.run.membership.started and all(each.stream is not None for each in self.sessions.values())

    def _tick_session(self, session: Session, now: float, dials: bool) -> None:
        if session.queue.acknowledged != session.reached:
            if session.channel == "training" and not session.waits and session.reached < session.state_end:
                self.run.membership.sites[session.slot].receive(now)
            session.reached = session.queue.acknowledged
        if self.outage.since is not None or now < session.excused:
            session.tick(now)
            return
        if session.stream is None:
            since, reason = session.lost
            grace = self.run.grace(self._grace, dials)
            if now >= since + grace:
                text = f"its connection was lost ({reason}), and it has not reconnected within {grace:g} s"
                self._lose(session, text, now, session.waits)
        elif self.readable(session) and self._is_silent(session, now):
            self._lose(session, f"silent for {self.run.rules.site_timeout:g} s", now, session.waits)
        session.tick(now)

    def _is_silent(self, session: Session, now: float) -> bool:
        """Return whether nothing has arrived from a site for too long, while another one could be heard."""
        timeout = self.run.rules.site_timeout
        since = session.heard + min(_APART_SECONDS, timeout / 2)
        return now >= session.heard + timeout and any(each.heard >= since for each in self.sessions.values())

    def readable(self, session: Session) -> bool:
        """Return whether frames of a site may be read: there is room in all queues that they go to."""
        if session.floods or not self.crowded:
            return not session.floods
        if session.channel in ("store", "check"):
            return not session.full
        if session.channel == "training" and not session.waits and self.run.sums.is_ahead(session.slot):
            return False
        sites, step = self.run.membership.sites, self.run.membership.step
        return not any(
            each.full and (each.channel != "training" or each.waits or not sites[each.slot].lags(step))
            for each in self.sessions.of(session.channel)
            if each is not session
        )

    def update_full(self) -> None:
        """Compute which queues are full; to be called after frames have been taken or sent."""
        crowded = self.run.sums.full
        for session in self.sessions.values():  # those without a connection, too
            session.update_full()
            crowded |= session.full
        self.crowded = crowded

    # Sessions.

    def close(self, reason: str, now: float) -> None:
        """End all sessions: the hub ends.

        Args:
            reason: the reason.
            now: the time, in seconds.
        """
        for session in list(self.sessions.values()):
            self._end(session, reason, now)

    def part(self, reason: str) -> bool:
        """Tell sites that they wait for another hub, if their run goes on without a site that leaves.

        Args:
            reason: the reason.

        Returns:
            Whether they do.
        """
        if not (self.run.may_grow or (self.runs.recovery is not None and self.runs.recovery.may_be_elastic)):
            return False
        pause = pack_control(Pause((), f"{reason}; waiting for it to be started again"), 0)
        for session in self.sessions.of("training"):
            session.send(pause)
        return True

    def _pass_on(self, session: Session, head: Head, body: memoryview) -> None:
        """Pass a message on to the hub itself or to one site; that for a site that has left is lost.

        Raises:
            FrameError: if too much waits for a site that has not opened the channel.
        """
        if head.slot == HUB_SLOT:
            self._streams.take(session, head, body)
            return
        frame = b"".join((head._replace(slot=session.slot).pack(), body))
        receiver = self.sessions.get(("parameters", head.slot))
        if receiver is not None:
            receiver.send(frame)
        elif ("training", head.slot) in self.sessions:
            kept = self._early.setdefault(head.slot, SendQueue())
            if kept is not None:
                kept.append(frame)
                if kept.nbytes > FULL_BYTES:
                    name = self.runs.roster[head.slot]
                    raise FrameError(f"{name} has not opened the channel that {kept.nbytes} bytes wait for")

    def _end(self, session: Session, reason: str, now: float, step: int = 0, may_return: bool = False) -> None:
        """End a session.

        Args:
            session: the session.
            reason: the reason; empty where the site's training is complete.
            now: the time, in seconds.
            step: the open step, of which the site has been dropped; 0 where it has not.
            may_return: whether the same process may connect again, unless it was dropped for good.
        """
        key = session.channel, session.slot
        del self.sessions[key]
        session.ended = now
        if not may_return:
            self._gone[key] = session.instance, reason or "it has left"
        notice = pack_control(Drop(session.slot, step, reason), 0)
        if session.stream is not None and not (session.waits and may_return):  # else it connects again by itself
            session.send(notice)
        if session.channel == "training":
            self.journal.write(f"{session.name} has left: {reason or 'its training is complete'}")
        elif session.channel == "parameters":
            self._early[session.slot] = None
            self._streams.end(session)
            for other in self.sessions.of("parameters"):  # their streams with this site have ended
                other.send(notice)

    # Frames.

    def take(self, session: Session, frame: Received, now: float) -> None:
        """Take a frame of a site.

        Raises:
            FrameError: if the site does not keep to the protocol.
        """
        head, body, _ = frame
        if head.kind is Kind.CONTROL or (session.channel in ("store", "check") and len(body) < _SMALL_BYTES):
            session.spare -= 1
        if head.kind is Kind.CONTROL:
            self._take_control(session, bytes(body), now)
        elif session.channel == "store":
            self._serve(session, bytes(body))
        elif session.channel == "check":
            for answer in session.check.handle(head, body, self.status):
                session.send(answer)
        elif head.kind is Kind.MESSAGE:
            self._pass_on(session, head, body)
        else:
            self._take_training(session, frame, now)

    def _take_training(self, session: Session, frame: Received, now: float) -> None:
        head, body, packed = frame
        run = self.run
        if self.runs.recovery is not None:
            self.runs.recovery.take(session, head, packed)
            self._recover(now)
            return
        site, closed = run.membership.sites[session.slot], head.step < run.membership.open_step
        if session.waits or not run.membership.started or (closed and not run.elastic):
            raise FrameError(f"a {head.kind.name} frame of step {head.step}, which is not open")
        if head.kind is Kind.STATE:  # of an earlier step: training goes on meanwhile
            site.progressed = now
            receiver = self.sessions.get(("training", head.slot))
            if receiver is not None and receiver.take_state(session.slot, head, body):
                run.membership.sites[head.slot].progressed = now
            return
        if closed and len(body) < _SMALL_BYTES:
            session.spare -= 1
        if closed and run.rules.late == "wait" and not site.behind(run.membership.step):
            return  # it was sent again for a site that has left since
        site.progressed = now
        session.record(head, now)
        if head.kind is Kind.END:
            self._take_end(session.slot, head, now)
        elif closed:  # the site is late, and does not know it yet
            return
        elif site.phase is Phase.JOINING:
            raise FrameError(f"a {head.kind.name} frame before it has received its state")
        elif head.kind is Kind.PAYLOAD:
            others = pass_payload(session, head, packed, self.sessions.training)
            if run.elastic:
                run.round.append(session.slot, others)
        elif head.kind is Kind.SUMMAND:
            total = run.sums.add(head, body, run.membership.participants)
            if total is not None:
                for other in self.sessions.training:
                    other.send(total)
        else:
            raise FrameError(f"{head.kind.name} frames are not expected")

    def _take_end(self, slot: int, head: Head, now: float) -> None:
        """Take a site's END. It may be ahead of others by steps in which nothing was to be received from them."""
        run, step = self.run, head.step
        ahead, idle = run.ahead[slot], run.begin_ending(head)
        self._admit(now)
        if ahead or step > run.membership.open_step:
            if len(ahead) >= _STEPS_AHEAD:
                raise FrameError(f"it has ended step {step} while step {run.membership.open_step} is open")
            ahead.append(step)
        else:
            self._act(run.membership.end(slot, step, now, idle), now)

    def _admit(self, now: float) -> None:
        """Let the sites that wait join in the open round, if it admits them."""
        size = len(self.run.names)
        waiting = [each for each in self.sessions.values() if each.waits and each.ready and each.sites == size]
        for session in waiting if self.run.admits else ():
            session.waits = False
            self.journal.write(f"{session.name} joins")
            session.awaits = {each.slot for each in self.sessions.training} - {session.slot}
            if session.offer:
                self.sessions.announce(KeyMessage(session.slot, session.offer))
            self._act(self.run.membership.dial(session.slot, now), now)

    def _take_control(self, session: Session, body: bytes, now: float) -> None:
        message = read_control(body, len(self.runs.roster))
        trains = session.channel == "training"
        match message:
            case Leave():
                self.drop(session, message.reason, now)
            case Spent() if trains:
                self.spent[session.slot] = message
            case Contribution() if trains:
                self.run.contributions[session.slot] = message
            case Outsized() if trains:
                self.run.outsized[message.slot] = message
                self.journal.write(f"{self.runs.roster[message.slot]}: {message}")
            case RunReport() if trains:
                if self.runs.recovery is not None:
                    self.runs.recovery.report(session, message)
                    self._recover(now)
            case Requirements(provisional=False) if trains:
                session.ready = True
                if self.run.membership.started:
                    self.run.require(message)
                    self.runs.grow_for_waiting()
                    self._admit(now)
                elif self.runs.recovery is not None:
                    self.runs.recovery.require(session, message)
            case KeyMessage() if trains:
                self._pass_key(session, message)
            case Exclude() if trains:
                self._exclude(session, message, now)
            case Receiving() if trains:
                session.receiving = message
                if message.received == message.nbytes and not session.waits:
                    self.run.membership.sites[session.slot].receive(now, complete=True)
            case Arrived() if trains and not session.waits:
                donor = self.sessions.get(("training", message.slot))
                if donor is not None and not donor.waits and message.number in session.requests:
                    session.report_part()
                    donor.send(pack_control(Arrived(session.slot, message.number, message.part), 0))
            case Joined() if trains and not session.waits:
                self._act(self.run.membership.joined(session.slot, message.position, now), now)
            case _:
                raise FrameError(f"a control message {type(message).__name__} is not expected")

    def _pass_key(self, session: Session, message: KeyMessage) -> None:
        """Keep the offer of a site that waits to join, or pass a welcome on to the site whose last offer it answers."""
        if message.slot == session.slot:
            session.offer = message.content
            return
        receiver = self.sessions.get(("training", message.slot))
        if receiver is not None and not receiver.waits and answers(message.content, receiver.offer):
            receiver.awaits.discard(session.slot)
            receiver.send(pack_control(KeyMessage(session.slot, message.content), 0))

    def _exclude(self, session: Session, message: Exclude, now: float) -> None:
        """End a site that joins, if a member refuses it before it has welcomed it.

        Members cannot end each other: a site that takes part is dropped if most of the others ask for it, and two of
        them do; it may join again.

        Raises:
            FrameError: if the run needs all sites, and the project is not sealed.
        """
        if not (self.sealed or self.run.elastic):
            raise FrameError("it refuses another site, which is for projects with sealed messages and for elastic runs")
        excluded = self.sessions.get(("training", message.slot))
        if excluded is None or session.waits or session.instance in excluded.refused_by:
            return
        excluded.refused_by.add(session.instance)
        if self.sealed and session.slot in excluded.awaits:
            self.drop(excluded, f"{session.name} refuses it: {message.reason}", now)
            return
        self.journal.write(f"{session.name} refuses {excluded.name}, which takes part already: {message.reason}")
        here = self.sessions.training
        votes = sum(each.instance in excluded.refused_by for each in here if each is not excluded)
        if self.run.elastic and votes >= 2 and 2 * votes > len(here) - 1:
            self._lose(excluded, f"{votes} sites refuse it: {message.reason}", now)

    def _serve(self, session: Session, request: bytes) -> None:
        for slot, reply in self._store.handle(session.slot, request):
            receiver = self.sessions.get(("store", slot))
            if receiver is not None:
                receiver.send(Head(Kind.MESSAGE, slot, length=len(reply)).pack() + reply)

    # Actions of the membership.

    def _act(self, actions: Sequence[Action], now: float) -> None:
        run = self.run
        for action in actions:
            run.take(action)
            match action:
                case Accept():
                    for message in (action, *run.earlier(action)):
                        self.sessions["training", action.slot].send(pack_control(message, 0))
                    continue
                case SendState():
                    joiner, donor = self.sessions["training", action.joiner], self.runs.roster[action.donor]
                    joiner.requests.add(action.number)
                    self.journal.write(f"{donor} is asked for its state, for {joiner.name}")
                case Skip():
                    continue
                case Drop():
                    self._end_training(action, now)
            # Where all sites have to stay, none waits for the end of a step.
            self.sessions.announce(action, soon=isinstance(action, Close) and not run.elastic)
            match action:
                case Join():
                    for _, frame in run.round.frames:
                        self.sessions["training", action.slot].send(frame)
                case Start():
                    absent = ", ".join(run.names[slot] for slot in action.absent)
                    without = f" without {absent}" if absent else ""
                    self.journal.write(f"training starts after step {action.position.step}{without}")
                case Pause():
                    self.journal.write(f"{'paused' if run.membership.started else 'idle'}: {action.reason}")
                case Resume():
                    self.journal.write("training goes on")
        if any(isinstance(action, Close) for action in actions):
            for slot, ahead in list(self.run.ahead.items()):  # of sites that have ended the new step before
                if ahead and ahead[0] == self.run.membership.open_step:
                    self._act(self.run.membership.end(slot, ahead.popleft(), now), now)
        if self.run.ending and not self.sessions.training:
            self._begin_run(now)

    def _end_training(self, action: Drop, now: float) -> None:
        """End the session of a site that takes no part any more; where the run is elastic, it may join again."""
        run = self.run
        run.ending |= run.membership.started and (len(self.sessions.training) == 1 or not run.elastic)
        if action.reason:
            run.absent[action.slot] = self.sessions["training", action.slot].instance
        else:
            run.completed = run.membership.step
        self._end(self.sessions["training", action.slot], action.reason, now, action.step, run.elastic)

    def _recover(self, now: float) -> None:
        """Get on with the recovery of a run that began before the restart of the hub, and act on its end."""
        outcome = self.runs.recovery.advance(now) if self.runs.recovery is not None else None
        if outcome is None:
            return
        self.runs.recovery, self.run.pause = None, ""
        if outcome.failure:
            self.journal.write(f"the run that began before the restart ends: {outcome.failure}")
            for session in self.sessions.of("training"):
                if session.recovers:
                    self.drop(session, f"the hub has been restarted, and {outcome.failure}", now)
            self._begin_run(now)
            return
        if outcome.requirements is not None:
            self.run.require(outcome.requirements)
        for slot in outcome.joined:  # a site that joins later in the round gets the announcement, too
            self.run.take(Join(slot, outcome.step + 1))
        for slot in outcome.slots:
            self.sessions["training", slot].heard = now  # the time until they count as silent begins
        self._act(self.run.membership.go_on(outcome.step, outcome.slots, now), now)
        for session in self.sessions.of("training"):
            if session.waits:
                self.runs.announce_wait(session)

    # Runs.

    def _begin_run(self, now: float) -> None:
        """Begin a run, with the sites that have waited for the end of the last one."""
        self.runs.begin_next(now)
        self._early.clear()
        self._store = Store()
        for number, session in enumerate(self.sessions.of("training")):
            session.waits = False
            start = self.run.membership.start = self.run.membership.start if number else session.start
            if session.start != start:  # it waited to join the last run, and others wait for this one
                self._end(session, f"it states {session.start}, and other sites {start}", now)
                continue
            self.journal.write(f"{session.name} has joined")
            self._act(self.run.membership.dial(session.slot, now), now)
