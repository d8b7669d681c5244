"""The hub: one thread that accepts the connections of sites and passes their frames on.

Members come first: in a turn of the loop, every member that has sent something is read once, everything that can be
sent is sent, and only then a few handshakes continue. So many unknown connections cost members hardly
anything. A fault while one session is served ends that session, with the traceback in the journal.

Memory is bounded: a connection holds one incomplete frame, and a site is no longer read while a queue that its frames
go to is full (`session.FULL_BYTES`). Nothing is allocated by a size that the wire announces.
"""

from __future__ import annotations

import math
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable

from ...errors import FrameError, KitError, RefusedError, TryAgainError
from ...exchange.framing import WakePipe
from ...support.logs import get_logger
from ..pki.kits import Kit, KitWatch, renewal_warning
from ..pki.project import HUB
from ..pki.proxies import target
from ..secure import tls
from ..secure.secure_socket import TokenBucket, dial_back
from ..wire.messages import Hello
from ..wire.streams import Stream
from .acceptor import Acceptor, ClosingConnection, PendingConnection
from .journal import Journal
from .relay import GRACE, Relay
from .session import HubStream, HubStreams, NoService, Session, StreamService, watch

_log = get_logger(__name__)
_TICK, _SHORT_TICK = 0.1, 0.02  # seconds; the second while a connection is lost, for which others may wait
_REPORT_SECONDS = 0.5
_DAY_SECONDS = 86400.0
_LEAVE_SECONDS = 2.0  # for the last frames of a session
_READ_SECONDS = 0.2  # for sites to read why the hub ends: what they send meanwhile would reset their connections
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Hub:
    """The hub of a project. It listens from its construction on; `run` serves the sites.

    Args:
        kit: the hub's kit.
        site_timeout: seconds of silence after which a site counts as lost.
        listen: host and port to listen at; None for those of the kit's roster, if its host is one of this machine.
        journal: log of who comes and goes; None to write to the standard error stream.
        grace: seconds for which a site whose connection is lost may connect again.
        encrypt_local: whether messages to sites in the same machine are encrypted, too.
        rate_limit: megabits per second that are sent to each site at most; None without a limit.
        report: called twice a second, and at the end.
        service: service at the hub that sites open streams to, such as the sequencers of parameter servers.

    Attributes:
        kit: the hub's kit.
        journal: log of who comes and goes.
        address: host and port that it listens at.
        relay: sessions of the sites, and the membership.
        acceptor: connections that do not belong to a session.
        kit_problems: why parts of the changed kit are not used.
        begun: time of its construction, on the clock of `time.monotonic`.

    Raises:
        KitError: if the kit is not that of a hub, is not valid now, or the address cannot be listened at.
        ValueError: if the timeout is out of range.
    """

    def __init__(
        self,
        kit: Kit,
        site_timeout: float = 10.0,
        *,
        listen: tuple[str, int] | None = None,
        journal: Journal | None = None,
        grace: float = GRACE,
        encrypt_local: bool = False,
        rate_limit: float | None = None,
        report: Callable[[Hub], None] = lambda hub: None,
        service: StreamService | None = None,
    ) -> None:
        if not kit.is_hub:
            raise KitError(f"{kit.folder} is the kit of the site {kit.name}: a hub needs the folder 'hub' of the kits")
        kit.check_dates()
        self.kit = kit
        self.journal = journal or Journal(lambda line: print(line, file=sys.stderr, flush=True))
        self._selector = selectors.DefaultSelector()
        self._service = service or NoService()
        self._streams = HubStreams(self._selector, self._service)
        life = secrets.randbits(62) + 1
        roster, now = kit.roster, time.monotonic()
        self.relay = Relay(roster.sites, site_timeout, life, now, self.journal, self._streams, grace, roster.sealed)
        self.acceptor = Acceptor(kit, listen, self._selector, self.journal, self._greet)
        self.address = self.acceptor.address
        self._watch = KitWatch(kit)
        self._report = report
        self._encrypt_local, self._rate_limit = encrypt_local, rate_limit
        self._limits = {} if rate_limit is None else {0: TokenBucket(rate_limit)}  # by slot
        self._pipe = WakePipe()
        self._selector.register(self._pipe, _READ)
        self.kit_problems: list[str] = []
        self.begun = time.monotonic()
        self._masks: dict[Session, int] = {}  # of registered sessions
        self._again: set[Session] = set()  # sessions with bytes that have arrived
        self._stopped: str | None = None
        self._may_return = False
        self._next_tick = self._next_report = self._next_warning = 0.0
        self._tick_seconds = _TICK

    def run(self) -> None:
        """Serve the sites until `stop` is called; then tell them, and close all connections."""
        self.journal.write(f"the hub of {self.kit.roster.project} listens at {target(*self.address)}")
        try:
            while self._stopped is None:
                self._turn()
            returns = self._may_return and self.relay.part(f"the hub has ended: {self._stopped}")
            if not returns:
                self.relay.close(f"the hub ends: {self._stopped}", time.monotonic())
            self.acceptor.stop_listening()
            now = time.monotonic()
            least, until = now + _READ_SECONDS * returns, now + _LEAVE_SECONDS
            while (
                self.acceptor.closing
                or any(each.ended is not None or each.waiting for each in self._masks)
                or time.monotonic() < least
            ) and time.monotonic() < until:
                self._turn()
            self.journal.write(f"the hub ends: {self._stopped}" + "; sites wait for another one" * returns)
            self._report(self)
        finally:
            self._close()

    def stop(self, reason: str = "it was stopped", may_return: bool = False) -> None:
        """Make `run` return; may be called from any thread and from a signal handler.

        Args:
            reason: the reason that sites are told.
            may_return: whether sites that train with `min_sites` wait for another hub, and do not end.
        """
        self._stopped = self._stopped or reason
        self._may_return = may_return
        self._pipe.wake()

    def _turn(self) -> None:
        """Wait for something to do, and do it."""
        ready = bool(self._again) and any(self._reads(session) for session in self._again)
        held = self._end_holds()
        events = self._selector.select(0 if ready else min(self._tick_seconds, held))
        now = time.monotonic()
        streams: dict[HubStream, int] = {}
        accepts = False
        for key, mask in events:
            match key.data:
                case Session() as session:
                    if mask & _READ:
                        self._again.add(session)
                    if mask & _WRITE:
                        session.blocked = False
                case HubStream() as stream:
                    streams[stream] = mask
                case ClosingConnection() as connection:
                    if connection.drain():
                        self.acceptor.end_closing(connection)
                case Acceptor():
                    accepts = True
                case _:
                    self._pipe.clear()
        if self._again:
            self._receive(now)
        self._streams.serve(streams, lambda session, error: self.relay.fail(session, error, now))
        self._send(now)
        if accepts:
            self.acceptor.serve(now, self.relay.trains)
        if now >= self._next_tick:
            self._tick(now)
            awaits = any(each.stream is None for each in self.relay.sessions.values())
            self._tick_seconds = _SHORT_TICK if awaits else _TICK
            self._next_tick = now + self._tick_seconds
        self._update_masks()

    def _end_holds(self) -> float:
        """Let sessions send that the cap of the rate has held up; return the seconds until the next may."""
        waits = math.inf
        for session in self._masks if self._limits else ():
            if session.stream is not None and session.stream.connection.held:
                session.blocked = False
                waits = min(waits, session.stream.connection.held)
        return waits

    # Members.

    def _reads(self, session: Session) -> bool:
        return session in self._masks and session.ended is None and self.relay.readable(session)

    def _receive(self, now: float) -> None:
        """Read each session that has sent something, once."""
        for session in [*self._again]:
            if not self._reads(session):
                continue
            more = False
            try:
                frames, more = session.receive(now)
                for frame in frames:
                    if session.ended is None:
                        self.relay.take(session, frame, now)
            except FrameError as error:
                self.relay.drop(session, str(error), now)
            except OSError as error:
                self._lose(session, tls.explain(error), now)
            except Exception as error:
                self.relay.fail(session, error, now)
            if not more:
                self._again.discard(session)

    def _send(self, now: float) -> None:
        """Send what connections take."""
        for session in [each for each in self._masks if each.waiting or each.ended is not None]:
            if not session.blocked and session.waiting:
                try:
                    session.flush()
                except OSError as error:
                    self._lose(session, tls.explain(error), now)
                    continue
                except Exception as error:
                    self._lose(session, f"{type(error).__name__}: {error}", now)  # what it holds cannot be sent
                    self.relay.fail(session, error, now)
                    continue
            if session.ended is not None and not session.waiting:
                self._forget(session)
                if (stream := session.lose("", now)) is not None:
                    self.acceptor.close_gracefully(socket.socket(fileno=stream.connection.detach()), now)
        self.relay.update_full()

    def _lose(self, session: Session, reason: str, now: float) -> None:
        """Record that a connection is lost; the site may connect again."""
        self._forget(session)
        self._next_tick = 0.0  # others may wait for it
        stream = session.lose(reason, now)
        if stream is not None:
            stream.connection.close()
        if session.ended is None:
            self.journal.write(f"connection to {session.name} ({session.channel}) lost: {reason}")

    def _forget(self, session: Session) -> None:
        """Forget the connection of a session, before it is closed or replaced."""
        self._again.discard(session)
        if self._masks.pop(session, 0):
            assert session.stream is not None
            self._selector.unregister(session.stream.connection)

    def _update_masks(self) -> None:
        """Register what each connection waits for."""
        self._streams.update()
        for session, mask in self._masks.items():
            assert session.stream is not None
            wanted = _WRITE if session.blocked and not session.stream.connection.held else 0
            if session.ended is None and self.relay.readable(session):
                wanted |= _READ
            if wanted != mask:
                watch(self._selector, session.stream.connection, mask, wanted, session)
                self._masks[session] = wanted

    def _greet(self, pending: PendingConnection, hello: Hello, now: float) -> None:
        """Attach a site's connection to its session.

        Raises:
            RefusedError: if the site is refused.
            TryAgainError: if it is refused, and may be accepted later.
        """
        try:
            self._attach(pending, hello, now)
        except (RefusedError, TryAgainError):
            raise
        except Exception as error:
            self.journal.fault(f"{pending.name} ({hello.channel}) cannot be accepted", error)
            for session in list(self.relay.sessions.values()):
                if (session.channel, session.name) == (hello.channel, pending.name):
                    self.relay.fail(session, error, now)
            attached = [each.stream.connection for each in self._masks if each.stream is not None]
            if pending.connection.fileno() >= 0 and pending.connection not in attached:
                self.acceptor.close_gracefully(pending.detach(), now)

    def _attach(self, pending: PendingConnection, hello: Hello, now: float) -> None:
        if pending.serial in self.kit.revoked:  # since its handshake
            raise RefusedError("its certificate has been revoked")
        session, welcome = self.relay.greet(pending.name, hello, pending.serial, now)
        if session.stream is not None:
            self._lose(session, "the site has reconnected", now)
        connection = pending.connection
        if not self._encrypt_local and (local := dial_back(connection, hello)) is not None:
            connection.continue_over(local)
        if self._rate_limit is not None:
            connection.limit = self._limits.setdefault(session.slot, TokenBucket(self._rate_limit))
        session.attach(Stream(connection), welcome, now)
        session.expires = pending.expires
        self._masks[session] = _READ
        self._selector.register(connection, _READ, session)
        self._again.add(session)
        if welcome.resumed:
            self.journal.write(f"{pending.name} ({session.channel}) has reconnected from {pending.address}")
        elif session.channel == "training":
            self._warn(renewal_warning(session.name, session.expires))

    # Time.

    def _tick(self, now: float) -> None:
        if self._stopped is None:
            self.relay.tick(now, self.acceptor.dials)
            self._service.hold(self.relay.outage.awaits_all(now))
            for session in self.relay.outage.silent(self.relay.run.rules.site_timeout, now):
                self._lose(session, f"nothing has arrived for {now - session.heard:.0f} s", now)
        self.acceptor.tick(now, self.relay.trains)
        for event in self._service.events():
            self.journal.write(event)
        for session in [each for each in self._masks if each.ended is not None and now >= each.ended + _LEAVE_SECONDS]:
            self._lose(session, "it has not read its last frames", now)
        self._again.update(session for session in self._masks if session.partial)  # without an event until its end
        self.journal.end_period(now)
        if now >= self._next_report:
            self._next_report = now + _REPORT_SECONDS
            self._reload_kit(now)
            if now >= self._next_warning:
                self._warn_of_ends(now)
            self._report(self)

    def _warn(self, text: str) -> None:
        """Write a warning to the journal and the log; nothing if it is empty."""
        if text:
            self.journal.write(text)
            _log.warning("%s", text)

    def _warn_of_ends(self, now: float) -> None:
        """Warn once a day of certificates that end soon."""
        self._next_warning = now + _DAY_SECONDS
        self._warn(renewal_warning(HUB, self.kit.certificate.not_valid_after_utc))
        for session in self.relay.sessions.values():
            if session.channel == "training" and session.expires is not None:
                self._warn(renewal_warning(session.name, session.expires))

    def _reload_kit(self, now: float) -> None:
        """Use the kit's files if they have changed, and end the sessions of revoked certificates."""
        change = self._watch.changed()
        if change is None:
            return
        kit, self.kit_problems = change
        try:
            self.acceptor.use(kit)
        except OSError as error:  # also an ssl.SSLError
            self.kit_problems.append(f"{kit.folder}: {tls.explain(error)}")
        self.kit, self._next_warning = kit, 0.0
        self.relay.sealed = kit.roster.sealed
        self.journal.write("the kit has been read again")
        for problem in self.kit_problems:
            self._warn(f"the kit has changed, and a part of it is not used before it changes again: {problem}")
        if new := kit.roster.sites[len(self.relay.runs.roster) :]:
            self.relay.runs.extend(kit.roster.sites)
            self.journal.write(f"the roster has new sites: {', '.join(new)}")
        for session in list(self.relay.sessions.values()):
            if session.serial in kit.revoked:
                self.relay.drop(session, "its certificate has been revoked", now)

    def _close(self) -> None:
        for session in self._masks:
            if (stream := session.lose("", 0.0)) is not None:
                stream.connection.close()
        self._streams.close()
        self._service.close()
        self.acceptor.close()
        self._selector.close()
        self._pipe.close()
