"""Relay of the hub: passes frames on between the sessions of sites, and carries out what the membership decides.

Without sockets. Frames go into the queues of sessions, which `dadplug.hub.server.hub` sends.

**Runs.** Where all sites are required, the first one that leaves ends the run. Sites that dial in for the next run wait
until the other sites of the last one have left. A hub therefore serves any number of runs, one after the other.

**Elastic runs.** The sites may require less, once a run has started; it then ends with the last site that leaves. Sites
that dial in meanwhile wait until a site has ended a round that admits others, and join in this round.

A site that is dropped is told so by a `Drop` of its own slot, the last frame that it gets. When the hub ends, all sites
are told in this way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import FrameError
from ...exchange.transport import Requirements
from ..check import CheckHandler
from ..wire.frames import Head, Kind
from ..wire.messages import (
    FRESH,
    VERSION,
    Accept,
    Action,
    Close,
    Drop,
    Grow,
    Hello,
    Joined,
    Leave,
    Pause,
    Position,
    Refuse,
    Replay,
    Report,
    Resume,
    Rules,
    Start,
    Welcome,
    pack_control,
    read_control,
)
from ..wire.streams import HUB_SLOT, SendQueue
from .elastic_run import ElasticRun, MissedSteps, Recovery
from .journal import Journal
from .membership import Membership
from .session import FULL_BYTES, Received, Session, check_hello
from .store import Store
from .streams import HubStreams
from .sums import Sums

GRACE = 5.0  # seconds
_OTHER = Position(0, 1)  # of no history of the hub, so that the site is sent a state
_COPY = "copy the newest roster.json into"
_STEPS_AHEAD = 1000  # that a site may have ended while others have not ended the open one


class EarlyMessages:
    """Messages that are kept until their receivers open the channel."""

    def __init__(self) -> None:
        self._queues: dict[int, SendQueue] = {}  # by slot
        self._closed: set[int] = set()  # slots of sites that have opened and closed it

    def pass_on(
        self, session: Session, head: Head, body: memoryview, sessions: Mapping[tuple[str, int], Session]
    ) -> None:
        """Pass a message on to one site, or keep it until the site opens the channel; that of a site that left is lost.

        Args:
            session: the sender.
            head: head of the message.
            body: its body.
            sessions: all sessions, by channel and slot.

        Raises:
            FrameError: if too much is kept.
        """
        frame = b"".join((head._replace(slot=session.slot).pack(), body))
        receiver = sessions.get((session.channel, head.slot))
        if receiver is not None:
            receiver.send(frame)
        elif (training := sessions.get(("training", head.slot))) and head.slot not in self._closed:
            queue = self._queues.setdefault(head.slot, SendQueue())
            queue.append(frame)
            if queue.nbytes > FULL_BYTES:
                raise FrameError(f"{training.name} has not opened the channel that {queue.nbytes} bytes wait for")

    def hand_over(self, session: Session) -> None:
        """Hand a site's frames over to its session, which has been opened."""
        self._closed.discard(session.slot)
        session.queue = self._queues.pop(session.slot, session.queue)

    def close(self, slot: int) -> None:
        """Record that a site has closed the channel."""
        self._closed.add(slot)

    def clear(self) -> None:
        """Forget everything: the sites begin a new run."""
        self._queues.clear()
        self._closed.clear()


_ALIVE_SECONDS = 0.5  # after a second process has dialled in; what the first one has sent before may arrive until then


class Relay:
    """Sessions of all sites, and the membership.

    Args:
        names: names of the sites by slot.
        rules: rules of the membership.
        life: random number, different for every process of the hub.
        now: the time, in seconds.
        journal: log of who comes and goes.
        grace: seconds for which a site whose connection is lost may dial again.

    Attributes:
        names: names of the sites of this run by slot, the first ones of the roster.
        roster: names of all sites by slot; those that were added during a run take part in the next one.
        journal: log of who comes and goes.
        sessions: sessions by channel and slot.
        leaving: sessions that have ended, whose last frames are still to be sent.
        streams: streams of sites to the hub itself, which the hub sets.
        membership: the membership.
        pause: for whom training waits; empty while it goes on.
        run: rules of the run, and the steps that late sites have missed.
        crowded: whether some frames may not be read, since queues are full.
    """

    def __init__(
        self, names: Sequence[str], rules: Rules, life: int, now: float, journal: Journal, grace: float = GRACE
    ) -> None:
        self.names = self.roster = tuple(names)
        self.journal = journal
        self.sessions: dict[tuple[str, int], Session] = {}
        self.leaving: list[Session] = []
        self.streams: HubStreams | None = None
        self._early = EarlyMessages()
        self._checks: dict[int, CheckHandler] = {}  # by slot
        self._gone: dict[tuple[str, int], tuple[int, str]] = {}  # last instance that may not dial again, and why
        self.membership = Membership(self.names, rules, life, now)
        self.pause = ""
        self.run = ElasticRun(rules, MissedSteps(self.names, journal))
        self._grace = grace
        self._store = Store()
        self._ending = False  # the run; whoever dials in waits for the next one
        self._expelled: Session | None = None  # that is being ended, and may not dial again
        self._sums = Sums(len(self.names))
        self._ahead: list[deque[int]] = [deque() for _ in self.names]  # ENDs of later steps than the open one
        self._recovery = Recovery(self)
        self.crowded = False

    # Connections.

    def greet(self, name: str, hello: Hello, serial: int, now: float) -> tuple[Session | None, Welcome | Refuse]:
        """Take a site's first message on a connection.

        Args:
            name: name of the site, which has been verified.
            hello: the message.
            serial: serial number of the site's certificate.
            now: the time, in seconds.

        Returns:
            The session to attach the connection to, and the answer.
        """
        if reason := check_hello(hello, VERSION):
            return None, Refuse(name, reason, False)
        slot = self.roster.index(name)
        key = hello.channel, slot
        session = self.sessions.get(key)
        if session is not None and session.instance == hello.instance:
            try:
                session.queue.resume(hello.received)
            except FrameError as error:
                self.drop(session, str(error), now)
                return None, Refuse(name, str(error), False)
            session.serial = serial
            return session, self._welcome(True, session.received)
        if session is not None:
            if session.stream is not None:
                return None, self._refuse_second(session, hello.instance, self.run.rules.site_timeout, now)
            self.drop(session, "another process has dialled in as this site", now)
        gone = self._gone.get(key)
        if gone is not None and gone[0] == hello.instance:
            return None, Refuse(name, f"the hub has given this site up: {gone[1]}", False)
        session = Session(slot, name, hello, serial, len(self.roster), now)
        if hello.channel == "training" and (reason := self._fit(session, now)):
            return None, Refuse(name, reason, False)
        later = hello.channel == "training" and session.sites != len(self.names)
        if session.recovers and (self._ending or (self.membership.started and not self.run.elastic)):
            return None, Refuse(name, "the other sites have begun another run", False)
        if session.recovers and not self.membership.started and not self._recovery.active:
            self.membership = Membership(self.names, self.run.rules, self.membership.life + 1, now)
            self._recovery.begin(now)
        session.waits = hello.channel == "training" and (
            later or self._ending or self._recovery.active or (self.run.elastic and self.membership.started)
        )
        if not self._ending and (reason := self._other_release(session)):
            return None, Refuse(name, reason, False)
        actions: list[Action] = []
        if hello.channel == "training" and not session.waits:
            actions = self.membership.dial(name, hello.instance, hello.position, now)
            if refused := [action for action in actions if isinstance(action, Refuse)]:
                return None, refused[0]
        self.sessions[key] = session
        if hello.channel == "parameters":
            self._early.hand_over(session)
        if session.waits:
            self.tell_to_wait(session)
        elif hello.channel == "training":
            self.journal.write(f"{name} has joined")
        self._act(actions, now)
        return session, self._welcome(False, 0)

    def tell_to_wait(self, session: Session) -> None:
        """Tell a site that it is to join, or to wait for the next run; it knows that by itself during a recovery."""
        self._extend_session(session)
        later = session.sites != len(self.names)
        if self._recovery.active and not later:
            return
        if not self._ending and not later:
            self.journal.write(f"{session.name} is connected; it joins at the next step")
            session.send(pack_control(Accept(session.slot, None, True, 0), 0))
            return
        others = tuple(each.slot for each in self._training())
        names = ", ".join(self.names[slot] for slot in others)
        self.journal.write(f"{session.name} has dialled in for the next run: waiting for {names} to leave the last one")
        session.send(pack_control(Pause(others, f"waiting for {names} to leave the last run"), 0))

    def _welcome(self, resumed: bool, received: int) -> Welcome:
        rules = self.run.rules
        return Welcome(resumed, received, rules.min_sites, round(rules.site_timeout * 1000), round(self._grace * 1000))

    def drop(self, session: Session, reason: str, now: float) -> None:
        """End a session, and the site's part in training if the session is that of training.

        Args:
            session: the session.
            reason: the reason; empty where the site's training is complete.
            now: the time, in seconds.
        """
        self._expelled = session
        self._lose(session, reason, now)
        self._expelled = None

    def fail(self, session: Session, error: Exception, now: float) -> None:
        """End a session that cannot be served by a fault of the hub, so that all others go on.

        Args:
            session: the session.
            error: the error.
            now: the time, in seconds.
        """
        self.journal.fault(f"{session.name} ({session.channel}) cannot be served", error)
        reason = f"the hub has failed to serve this site: {type(error).__name__}: {error}"
        if self.sessions.get((session.channel, session.slot)) is not session:
            return  # it has ended
        try:
            self.drop(session, reason, now)
        except Exception as again:
            self._expelled = None
            self.journal.fault(f"{session.name} ({session.channel}) cannot be dropped", again)
        if self.sessions.get((session.channel, session.slot)) is session:
            self._end(session, reason)

    def _lose(self, session: Session, reason: str, now: float) -> None:
        """End a session; where the run is elastic, its site may join again."""
        if session.channel == "training" and not session.waits:
            self._act(self.membership.close(session.slot, reason, now), now)
        else:
            self._end(session, reason)

    def tick(self, now: float, dials: bool = False) -> None:
        """Let time pass, while a connection is in its handshake (`dials`) or none is."""
        for session in list(self.sessions.values()):
            try:
                self._tick_session(session, now, dials)
            except Exception as error:
                self.fail(session, error, now)
        for slot, reason in self.run.given_up(self.membership):
            self.drop(self.sessions["training", slot], reason, now)
        if self._recovery.active:
            self._recovery.advance(now)
        self._act(self.membership.tick(now), now)

    def _tick_session(self, session: Session, now: float, dials: bool) -> None:
        training = session.channel == "training" and not session.waits
        if session.stream is None:
            since, reason = session.lost
            grace = self.run.grace(self._grace, dials)
            if now >= since + grace:
                text = f"its connection was lost ({reason}), and it has not dialled again within {grace:g} s"
                self._lose(session, text, now)
            elif training:
                self.membership.heard(session.slot, now)  # the grace counts
        elif not self.readable(session):
            session.heard = now
            if training:
                self.membership.heard(session.slot, now)
        elif not training and now >= session.heard + self.run.rules.site_timeout:
            self.drop(session, f"silent for {self.run.rules.site_timeout:g} s", now)
        session.tick(now)

    def readable(self, session: Session) -> bool:
        """Return whether frames of a site may be read: there is room in all queues that they go to."""
        if not self.crowded:
            return True
        if session.channel in ("store", "check"):
            return not session.full
        if session.channel == "training" and not session.waits and self._sums.is_ahead(session.slot):
            return False
        return not any(
            other.full and not (channel == "training" and not other.waits and self.membership.behind(other.slot))
            for (channel, _), other in self.sessions.items()
            if channel == session.channel and other is not session
        )

    def update_full(self) -> None:
        """Compute which queues are full; to be called after frames have been taken or sent."""
        crowded = self._sums.full
        for session in self.sessions.values():  # those without a connection, too
            session.update_full()
            crowded |= session.full
        self.crowded = crowded

    # Sessions.

    def close(self, reason: str) -> None:
        """End all sessions: the hub ends.

        Args:
            reason: the reason.
        """
        for session in list(self.sessions.values()):
            self._end(session, reason)

    @property
    def awaits(self) -> bool:
        """Whether a connection is lost whose site may dial again."""
        return any(each.stream is None for each in self.sessions.values())

    def _of(self, channel: str) -> list[Session]:
        """Return the sessions of a channel."""
        return [each for each in self.sessions.values() if each.channel == channel]

    def _training(self) -> list[Session]:
        """Return the sessions of the sites of this run."""
        return [each for each in self._of("training") if not each.waits]

    def _pass_on(self, session: Session, head: Head, body: memoryview) -> None:
        """Pass a message of the channel for parameters on to its receiver, which may be the hub."""
        if head.slot != HUB_SLOT:
            self._early.pass_on(session, head, body, self.sessions)
        elif self.streams is None:
            raise FrameError("this hub takes no streams")
        else:
            self.streams.take(session, head, body)

    def _other_release(self, session: Session) -> str:
        """Return why a site cannot join the sites of this run; empty if it can, or takes part in it anyway.

        Sites that start together compare their versions themselves.
        """
        others = [each for each in self._training() if each.release != session.release]
        if not others or not session.waits or session.recovers:
            return ""
        return (
            f"this site has dadplug {session.release}, and {others[0].name}, which trains already, "
            f"{others[0].release}: all sites need the same version"
        )

    def _announce(self, message: Any, soon: bool = False) -> None:
        """Send a message to the sites of this run; see `Session.send`."""
        frame = pack_control(message, 0)
        for session in self._training():
            session.send(frame, soon)

    def _refuse_second(self, session: Session, instance: int, timeout: float, now: float) -> Refuse:
        """Return the refusal of a second process of a site; for good once the first one has shown that it is alive.

        Args:
            session: the session of the first process.
            instance: random number of the second process, which dials again until it is accepted, or refused for good.
            timeout: seconds of silence after which the first process counts as lost.
            now: the time, in seconds.
        """
        if session.rival[0] != instance:
            session.rival = instance, now
        reason = f"another process is connected as site {session.name!r}"
        if session.heard > session.rival[1] + _ALIVE_SECONDS:
            return Refuse(session.name, reason, False)
        left = max(0.0, session.heard + timeout - now)
        return Refuse(session.name, f"{reason}; if it is dead, this one takes its place in {left:.1f} s", True)

    def _end(self, session: Session, reason: str, step: int = 0, may_return: bool = False) -> None:
        """End a session.

        Args:
            session: the session.
            reason: the reason; empty where the site's training is complete.
            step: the open step, of which the site has been dropped; 0 where it has not.
            may_return: whether the same process may dial again.
        """
        key = session.channel, session.slot
        del self.sessions[key]
        if session.channel == "parameters":
            self._early.close(session.slot)
            if self.streams is not None:
                self.streams.end(session)
        if not may_return:
            self._gone[key] = session.instance, reason or "it has left"
        if session.channel == "training":
            self.journal.write(f"{session.name} has left: {reason or 'its training is complete'}")
        if session.stream is not None:
            session.send(pack_control(Drop(session.slot, step, reason), 0))
            self.leaving.append(session)
        if session.channel == "parameters":  # the streams of the other sites with this one have ended
            for other in self._of("parameters"):
                other.send(pack_control(Drop(session.slot, step, reason), 0))
        elif session.channel == "check":
            self._checks.pop(session.slot, None)

    # Frames.

    def take(self, session: Session, frame: Received, now: float) -> None:
        """Take a frame of a site.

        Raises:
            FrameError: if the site does not keep to the protocol.
        """
        head, body, _ = frame
        if self.sessions.get((session.channel, session.slot)) is not session:
            return  # it has ended
        if head.kind is Kind.CONTROL:
            self._take_control(session, bytes(body), now)
        elif session.channel == "store":
            self._serve(session, bytes(body))
        elif session.channel == "check":
            check = self._checks.setdefault(session.slot, CheckHandler(session.slot))
            for answer in check.handle(head, body):
                session.send(answer)
        elif head.kind is Kind.MESSAGE:
            self._pass_on(session, head, body)
        else:
            self._take_training(session, frame, now)

    def _take_training(self, session: Session, frame: Received, now: float) -> None:
        head, body, packed = frame
        if self._recovery.active:
            self._recovery.take(session, head, packed, now)
            return
        closed = head.step < self.membership.open_step
        if session.waits or not self.membership.started or (closed and not self.run.elastic):
            raise FrameError(f"a {head.kind.name} frame of step {head.step}, which is not open")
        if closed and self.run.rules.late == "wait":
            return  # it was sent again for a site that has left since
        self.membership.heard(session.slot, now, progress=True)
        session.record(head, now)
        if head.kind is Kind.END:
            self._take_end(session.slot, head, now)
        elif closed:  # the site is late, and does not know it yet
            return
        elif head.kind is Kind.STATE:
            self._pass_state(session, head, body, now)
        elif head.kind is Kind.PAYLOAD:
            if self.run.elastic:
                self.run.round.append(session.slot, packed)
            for other in self._training():
                if other is not session:
                    other.send(packed)
        elif head.kind is Kind.SUMMAND:
            total = self._sums.add(head, body, self.membership.participants, self.membership.attempt)
            if total is not None:
                for other in self._training():
                    other.send(total)
        else:
            raise FrameError(f"{head.kind.name} frames are not expected")

    def _take_end(self, slot: int, head: Head, now: float) -> None:
        """Take a site's END. It may be ahead of others by steps in which nothing was to be received from them."""
        ahead, step = self._ahead[slot], head.step
        idle = self.run.begin_ending(head, self.membership)
        self._admit(now)
        if ahead or step > self.membership.open_step:
            if len(ahead) >= _STEPS_AHEAD:
                raise FrameError(f"it has ended step {step} while step {self.membership.open_step} is open")
            ahead.append(step)
        else:
            self._act(self.membership.end(slot, step, now, idle), now)

    def _admit(self, now: float) -> None:
        """Let the sites that wait join in the open round."""
        waiting = [
            each for each in self.sessions.values() if each.waits and each.ready and each.sites == len(self.names)
        ]
        if not waiting or not self.run.admits or not self.run.round.complete:
            return
        for session in waiting:
            session.waits = False
            self.journal.write(f"{session.name} joins")
            self._act(self.membership.dial(session.name, session.instance, _OTHER, now), now)
        self._act(self.membership.admit(now), now)

    def _pass_state(self, session: Session, head: Head, body: memoryview, now: float) -> None:
        """Pass a part of a site's state on to one that joins."""
        receiver = self.sessions.get(("training", head.slot))
        if receiver is not None and not receiver.waits:
            self.membership.heard(head.slot, now, progress=True)
            receiver.send(b"".join((head._replace(slot=session.slot).pack(), body)))

    def _take_control(self, session: Session, body: bytes, now: float) -> None:
        message = read_control(body, len(self.roster))
        if isinstance(message, Leave):
            self.drop(session, message.reason, now)
        elif isinstance(message, Report) and session.channel == "training":
            if self._recovery.active:
                self._recovery.report(session, message, now)
        elif isinstance(message, Requirements) and session.channel == "training":
            session.ready = True
            if self.membership.started:
                self.run.require(message, self.membership)
                self._grow_for_waiting()
                self._admit(now)
            else:
                self._recovery.require(session, message)
        elif isinstance(message, Joined) and session.channel == "training" and not session.waits:
            self._act(self.membership.joined(session.slot, message.position, now), now)
        else:
            raise FrameError(f"a control message {type(message).__name__} is not expected")

    def _serve(self, session: Session, request: bytes) -> None:
        for slot, reply in self._store.handle(session.slot, request):
            receiver = self.sessions.get(("store", slot))
            if receiver is not None:
                receiver.send(Head(Kind.MESSAGE, slot, length=len(reply)).pack() + reply)

    # Actions of the membership.

    def _act(self, actions: Sequence[Action], now: float) -> None:
        for action in actions:
            self.run.take(action)
            if isinstance(action, Accept):
                for message in (action, *self.run.earlier(action, len(self.names), self.membership)):
                    self.sessions["training", action.slot].send(pack_control(message, 0))
                continue
            if isinstance(action, Replay):  # no others are kept
                for frame in self.run.round.frames():
                    self.sessions["training", action.slot].send(frame)
                continue
            if isinstance(action, Drop):
                self._end_training(action)
            # Where all sites have to stay, none waits for the end of a step.
            self._announce(action, soon=isinstance(action, Close) and not self.run.elastic)
            if isinstance(action, Start):
                self.journal.write(f"training starts after step {action.position.step}")
            elif isinstance(action, Pause):
                self.pause = action.reason
                self.journal.write(f"{'paused' if self.membership.started else 'idle'}: {action.reason}")
            elif isinstance(action, Resume):
                self.pause = ""
                self.journal.write("training goes on")
        if any(isinstance(action, Close) for action in actions):
            self._end_ahead(now)
        if self._ending and not self._training():
            self.begin_run(now)

    def go_on(self, last: Position, requirements: Requirements | None, slots: Sequence[int], now: float) -> None:
        """Go on with a run that began before the restart of the hub.

        Args:
            last: the last closed round.
            requirements: requirements of the run; None where all sites have to stay.
            slots: slots of the sites that take part.
            now: the time, in seconds.
        """
        closed = last._replace(life=self.membership.life + 1)
        self.membership = Membership(self.names, self.run.rules, closed.life, now, closed)
        if requirements is not None:
            self.run.require(requirements, self.membership)
        self._act(self.membership.go_on({slot: self.sessions["training", slot].instance for slot in slots}, now), now)

    def begin_run(self, now: float) -> None:
        """Begin a run, with the sites that have waited for the end of the last one."""
        self._ending = False
        waiting = [each.sites for each in self._of("training")]
        self._resize(max(waiting, default=len(self.names)))
        self.run.reset()
        self._sums.clear()
        self._early.clear()
        self._store.reset()
        self.membership = Membership(self.names, self.run.rules, self.membership.life + 1, now)
        for session in self._of("training"):
            session.waits = False
            self.journal.write(f"{session.name} has joined")
            self._act(self.membership.dial(session.name, session.instance, FRESH, now), now)

    def extend(self, names: Sequence[str]) -> None:
        """Take a roster with further sites. A run that has begun goes on without them, and they take part in the next.

        Args:
            names: names of all sites by slot; those that are known keep theirs.
        """
        self.roster = tuple(names)
        for session in self.sessions.values():
            session.world_size = len(names)

    @property
    def _may_grow(self) -> bool:
        """Whether sites that are new in the roster can join in the run, which goes on without some sites."""
        return self.run.elastic and self.membership.started and not self._ending

    def _grow(self, size: int) -> None:
        """Make the run one of more sites of the roster. Those that take part, or wait to, are told; see `Grow`."""
        before, self.names = len(self.names), self.roster[:size]
        self.membership.append(self.names[before:])
        self.run.grow(self.names, before)
        self._sums.extend(size)
        self._ahead += [deque() for _ in self.names[before:]]
        self.journal.write(f"the run grows: it is one of {size} sites now, with {', '.join(self.names[before:])}")
        for (channel, _), session in self.sessions.items():
            if channel == "training":
                self._extend_session(session)

    def _extend_session(self, session: Session) -> None:
        """Announce all sites of the run to one that knows fewer."""
        if session.sites < len(self.names) and self._may_grow:
            session.sites = len(self.names)
            session.send(pack_control(Grow(self.membership.open_step, self.names), 0))

    def _grow_for_waiting(self) -> None:
        """Let sites that are new in the roster join, which have dialled in before the run was known to be elastic."""
        waiting = [each for each in self.sessions.values() if each.waits and each.sites > len(self.names)]
        if waiting and self._may_grow:
            self._grow(max(each.sites for each in waiting))
            for session in waiting:
                self.tell_to_wait(session)

    def _fit(self, session: Session, now: float) -> str:
        """Fit the next run to the roster of a site that connects; if the site cannot take part, return the reason.

        The newest roster counts for a run that has not started. One that has started keeps its sites, unless it goes
        on without some of them: it then grows.
        """
        session.sites = session.sites or len(self.names)
        size, training = (
            len(self.names),
            self._of("training"),
        )
        if session.sites > len(self.roster):
            return (
                f"this site's roster has {session.sites} sites, and the hub's {len(self.roster)}: {_COPY} the hub's kit"
            )
        free = not (self.membership.started or self._ending or self._recovery.active)
        if free and (session.sites > size or not training or session.recovers):
            self._resize(session.sites)
            if session.sites != size:
                self.membership = Membership(self.names, self.run.rules, self.membership.life + 1, now)
        elif session.recovers and self._recovery.active and session.sites != size:
            return f"it knows {session.sites} sites, and those that go on with the run {size}: start it again"
        elif self._may_grow:
            if session.sites > size:
                self._grow(session.sites)
        elif session.sites < size:
            new = ", ".join(self.names[session.sites :])
            return f"the roster of this site's kit lacks {new}: {_COPY} this site's kit"
        return ""

    def _resize(self, size: int) -> None:
        """Make the next run one of the first sites of the roster, and end the sessions of sites that lack some."""
        if size == len(self.names):
            return
        before, self.names = len(self.names), self.roster[:size]
        new = ", ".join(self.names[before:])
        for session in self._of("training"):
            if session.sites < size:
                self._end(session, f"the project has new sites, {new}: {_COPY} this site's kit, and start it again")
            session.waits |= session.sites > size
        self.run.resize(self.names, before)
        self._sums = Sums(size)
        self._ahead = [deque() for _ in self.names]
        if self.streams is not None:
            self.streams.begin(self.names)

    def _end_ahead(self, now: float) -> None:
        """Take the ENDs of the step that has been opened, from sites that have sent theirs before."""
        for slot, ahead in enumerate(self._ahead):
            if ahead and ahead[0] == self.membership.open_step:
                self._act(self.membership.end(slot, ahead.popleft(), now), now)

    def _end_training(self, action: Drop) -> None:
        self._ahead[action.slot].clear()
        self.run.round.forget(action.slot)
        last = len(self._training()) == 1
        self._ending |= self.membership.started and (last or not self.run.elastic)
        session = self.sessions["training", action.slot]
        may_return = self.run.elastic and session is not self._expelled
        self._end(session, action.reason, action.step, may_return)
