"""Relay of the hub: passes frames on between the sessions of sites, and carries out what the membership decides.

Without sockets. Frames go into the queues of sessions, which `dadplug.hub.server` sends.

**Runs.** Where all sites are required, the first one that leaves ends the run. Sites that dial in for the next run wait
until the other sites of the last one have left. A hub therefore serves any number of runs, one after the other.

**Elastic runs.** The sites may require less, once a run has started; it then ends with the last site that leaves. Sites
that dial in meanwhile wait until a site has ended a round that admits others, and join in this round.

A site that is dropped is told so by a `Drop` of its own slot, the last frame that it gets. When the hub ends, all sites
are told in this way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ..exchange.requirements import Requirements
from .actions import Accept, Action, Close, Drop, Pause, Refuse, Replay, Resume, Rules, Start
from .check_channel import CheckHandler
from .early_messages import EarlyMessages
from .elastic_run import ElasticRun
from .frames import VERSION, Frame, FrameError, Head, Hello, Joined, Kind, Leave, Welcome, pack_control, read_control
from .journal import Journal
from .membership import Membership
from .missed_steps import MissedSteps
from .session import PING_SECONDS, Received, Session, check_hello
from .store import Store
from .sums import Sums

GRACE = 5.0  # seconds
_ALIVE_SECONDS = 3 * PING_SECONDS
_STEPS_AHEAD = 1000  # that a site may have ended while others have not ended the open one


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
        names: names of the sites by slot.
        membership: the membership.
        sessions: sessions by channel and slot.
        leaving: sessions that have ended, whose last frames are still to be sent.
        pause: for whom training waits; empty while it goes on.
        run: rules of the run, and the steps that late sites have missed.
    """

    def __init__(
        self, names: Sequence[str], rules: Rules, life: int, now: float, journal: Journal, grace: float = GRACE
    ) -> None:
        self.names = tuple(names)
        self.membership = Membership(self.names, rules, life, now)
        self.sessions: dict[tuple[str, int], Session] = {}
        self.leaving: list[Session] = []
        self.pause = ""
        self.run = ElasticRun(rules, MissedSteps(self.names, journal))
        self._grace = grace
        self._journal = journal
        self._store = Store()
        self._ending = False  # the run; whoever dials in waits for the next one
        self._checks: dict[int, CheckHandler] = {}  # by slot
        self._gone: dict[tuple[str, int], tuple[int, str]] = {}  # last instance that was given up, and why
        self._early = EarlyMessages()
        self._sums = Sums(len(self.names))
        self._ahead: list[deque[int]] = [deque() for _ in self.names]  # ENDs of later steps than the open one

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
        slot = self.names.index(name)
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
                return None, self._used_twice(session, now)
            self.drop(session, "another process has dialled in as this site", now)
        gone = self._gone.get(key)
        if gone is not None and gone[0] == hello.instance:
            return None, Refuse(name, f"the hub has given this site up: {gone[1]}", False)
        session = Session(slot, name, hello, serial, len(self.names), now)
        session.waits = hello.channel == "training" and (self._ending or (self.run.elastic and self.membership.started))
        actions: list[Action] = []
        if hello.channel == "training" and not session.waits:
            actions = self.membership.dial(name, hello.instance, hello.position, now)
            if refused := [action for action in actions if isinstance(action, Refuse)]:
                return None, refused[0]
        self.sessions[key] = session
        if hello.channel == "parameters":
            self._early.hand_over(session)
        if session.waits:
            self._tell_to_wait(session)
        elif hello.channel == "training":
            self._journal.write(f"{name} has joined")
        self._act(actions, now)
        return session, self._welcome(False, 0)

    def _tell_to_wait(self, session: Session) -> None:
        if not self._ending:
            self._journal.write(f"{session.name} has dialled in, and joins in the next step")
            session.send(pack_control(Accept(session.slot, None, True, 0), 0))
            return
        others = tuple(each.slot for each in self._training())
        names = ", ".join(self.names[slot] for slot in others)
        self._journal.write(
            f"{session.name} has dialled in for the next run: waiting for {names} to leave the last one"
        )
        session.send(pack_control(Pause(others, f"waiting for {names} to leave the last run"), 0))

    def _welcome(self, resumed: bool, received: int) -> Welcome:
        rules = self.run.rules
        return Welcome(resumed, received, rules.min_sites, round(rules.site_timeout * 1000), round(self._grace * 1000))

    def _used_twice(self, session: Session, now: float) -> Refuse:
        """Return the refusal of a second process of a site; for good if the first one is certainly alive."""
        alive = now < session.heard + _ALIVE_SECONDS
        advice = "" if alive else f"; should it be dead, try again in {self.run.rules.site_timeout:g} s"
        return Refuse(session.name, f"another process is connected as site {session.name!r}{advice}", not alive)

    def drop(self, session: Session, reason: str, now: float) -> None:
        """End a session, and the site's part in training if the session is that of training.

        Args:
            session: the session.
            reason: the reason; empty where the site's training is complete.
            now: the time, in seconds.
        """
        if session.channel == "training" and not session.waits:
            self._act(self.membership.close(session.slot, reason, now), now)
        else:
            self._end(session, reason)

    def tick(self, now: float) -> None:
        """Let time pass."""
        for session in list(self.sessions.values()):
            training = session.channel == "training" and not session.waits
            if session.stream is None:
                since, reason = session.lost
                grace = self.run.grace(self._grace)
                if now >= since + grace:
                    text = f"its connection was lost ({reason}), and it has not dialled again within {grace:g} s"
                    self.drop(session, text, now)
                elif training:
                    self.membership.heard(session.slot, now)  # the grace counts
            elif not self.readable(session):
                session.heard = now
                if training:
                    self.membership.heard(session.slot, now)
            elif not training and now >= session.heard + self.run.rules.site_timeout:
                self.drop(session, f"silent for {self.run.rules.site_timeout:g} s", now)
            session.ping_if_due(now)
        for slot, reason in self.run.given_up(self.membership):
            self.drop(self.sessions["training", slot], reason, now)
        self._act(self.membership.tick(now), now)

    def readable(self, session: Session) -> bool:
        """Return whether frames of a site may be read: there is room in all queues that they go to."""
        if session.channel in ("store", "check"):
            return not session.full
        if session.channel == "training" and self._sums.is_ahead(session.slot):
            return False
        return not any(
            other.full and not (channel == "training" and self.membership.behind(other.slot))
            for (channel, _), other in self.sessions.items()
            if channel == session.channel and other is not session
        )

    def close(self, reason: str) -> None:
        """End all sessions: the hub ends.

        Args:
            reason: the reason.
        """
        for session in list(self.sessions.values()):
            self._end(session, reason)

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
            for answer in check.handle(Frame(head, bytes(body))):
                session.send(answer)
        elif head.kind is Kind.MESSAGE:
            self._pass_on(session, head, body)
        else:
            self._take_training(session, frame, now)

    def _pass_on(self, session: Session, head: Head, body: memoryview) -> None:
        """Pass a message on to one site, or keep it until the site opens the channel; that of a site that left is lost.

        Raises:
            FrameError: if too much is kept.
        """
        frame = b"".join((head._replace(slot=session.slot).pack(), body))
        receiver = self.sessions.get((session.channel, head.slot))
        if receiver is not None:
            receiver.send(frame)
        elif ("training", head.slot) in self.sessions:
            self._early.keep(head.slot, frame, self.names[head.slot])

    def _take_training(self, session: Session, frame: Received, now: float) -> None:
        head, body, packed = frame
        closed = head.step < self.membership.open_step
        if session.waits or not self.membership.started or (closed and self.run.rules.late == "wait"):
            raise FrameError(f"a {head.kind.name} frame of step {head.step}, which is not open")
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
        waiting = [each for each in self.sessions.values() if each.waits and each.ready]
        if not waiting or not self.run.admits or not self.run.round.complete:
            return
        for session in waiting:
            session.waits = False
            self._journal.write(f"{session.name} joins")
            self._act(self.membership.dial(session.name, session.instance, session.position, now), now)
        self._act(self.membership.admit(now), now)

    def _pass_state(self, session: Session, head: Head, body: memoryview, now: float) -> None:
        """Pass a part of a site's state on to one that joins."""
        receiver = self.sessions.get(("training", head.slot))
        if receiver is not None and not receiver.waits:
            self.membership.heard(head.slot, now, progress=True)
            receiver.send(b"".join((head._replace(slot=session.slot).pack(), body)))

    def _take_control(self, session: Session, body: bytes, now: float) -> None:
        message = read_control(body, len(self.names))
        if isinstance(message, Leave):
            self.drop(session, message.reason, now)
        elif isinstance(message, Requirements) and session.channel == "training" and self.membership.started:
            session.ready = True
            self.run.require(message, self.membership)
            self._admit(now)
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

    def _training(self) -> list[Session]:
        """Return the sessions of the sites of this run."""
        return [each for (channel, _), each in self.sessions.items() if channel == "training" and not each.waits]

    def _act(self, actions: Sequence[Action], now: float) -> None:
        for action in actions:
            self.run.take(action)
            if isinstance(action, Accept):
                self.sessions["training", action.slot].send(pack_control(action, 0))
                continue
            if isinstance(action, Replay):  # no others are kept
                for frame in self.run.round.frames():
                    self.sessions["training", action.slot].send(frame)
                continue
            if isinstance(action, Drop):
                self._end_training(action)
            self._announce(action)
            if isinstance(action, Start):
                self._journal.write(f"training starts after step {action.position.step}")
            elif isinstance(action, Pause):
                self.pause = action.reason
                self._journal.write(f"paused: {action.reason}")
            elif isinstance(action, Resume):
                self.pause = ""
                self._journal.write("training goes on")
        if any(isinstance(action, Close) for action in actions):
            self._end_ahead(now)
        if self._ending and not self._training():
            self._begin_run(now)

    def _begin_run(self, now: float) -> None:
        """Begin a run, with the sites that have waited for the end of the last one."""
        self._ending = False
        self.run.reset()
        self._sums.clear()
        self._early.clear()
        self._store.reset()
        self.membership = Membership(self.names, self.run.rules, self.membership.life + 1, now)
        for session in [each for (channel, _), each in self.sessions.items() if channel == "training"]:
            session.waits = False
            self._journal.write(f"{session.name} has joined")
            self._act(self.membership.dial(session.name, session.instance, session.position, now), now)

    def _announce(self, message: Any) -> None:
        frame = pack_control(message, 0)
        for session in self._training():
            session.send(frame)

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
        self._end(session, action.reason, action.step)

    def _end(self, session: Session, reason: str, step: int = 0) -> None:
        key = session.channel, session.slot
        del self.sessions[key]
        if session.channel == "parameters":
            self._early.close(session.slot)
        self._gone[key] = session.instance, reason or "it has left"
        if session.channel == "training":
            self._journal.write(f"{session.name} has left: {reason or 'its training is complete'}")
        if session.stream is not None:
            session.send(pack_control(Drop(session.slot, step, reason), 0))
            self.leaving.append(session)
        if session.channel == "parameters":  # the streams of the other sites with this one have ended
            for other in [each for (channel, _), each in self.sessions.items() if channel == "parameters"]:
                other.send(pack_control(Drop(session.slot, step, reason), 0))
        elif session.channel == "check":
            self._checks.pop(session.slot, None)
