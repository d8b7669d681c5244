"""Sessions of the hub by channel and site, and how they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import FrameError
from .actions import Drop, Refuse
from .check_channel import CheckHandler
from .early_messages import EarlyMessages
from .frames import Head, pack_control
from .hub_streams import HubStreams
from .journal import Journal
from .peer_stream import HUB_SLOT
from .session import Session

_ALIVE_SECONDS = 0.5  # after a second process has dialled in; what the first one has sent before may arrive until then


class SessionTable:
    """Sessions of all sites.

    Args:
        names: names of the sites by slot.
        journal: log of who comes and goes.

    Attributes:
        names: names of the sites of this run by slot, the first ones of the roster.
        roster: names of all sites by slot; those that were added during a run take part in the next one.
        journal: log of who comes and goes.
        sessions: sessions by channel and slot.
        leaving: sessions that have ended, whose last frames are still to be sent.
        streams: streams of sites to the hub itself, which the hub sets.
    """

    def __init__(self, names: Sequence[str], journal: Journal) -> None:
        self.names = self.roster = tuple(names)
        self.journal = journal
        self.sessions: dict[tuple[str, int], Session] = {}
        self.leaving: list[Session] = []
        self.streams: HubStreams | None = None
        self._early = EarlyMessages()
        self._checks: dict[int, CheckHandler] = {}  # by slot
        self._gone: dict[tuple[str, int], tuple[int, str]] = {}  # last instance that may not dial again, and why

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

    def _training(self) -> list[Session]:
        """Return the sessions of the sites of this run."""
        return [each for (channel, _), each in self.sessions.items() if channel == "training" and not each.waits]

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
            for other in [each for (channel, _), each in self.sessions.items() if channel == "parameters"]:
                other.send(pack_control(Drop(session.slot, step, reason), 0))
        elif session.channel == "check":
            self._checks.pop(session.slot, None)
