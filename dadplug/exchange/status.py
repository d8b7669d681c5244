"""Status requests between processes: whether a site is alive, in which exchange it is, and why it exits.

The names of the sites of a group are here, too, and errors that name the site at fault, with the reason why it exits.

Every process answers on a port of its own, in a thread that sleeps between requests. So a site whose wait times out can
distinguish a killed process (connection refused), a suspended one (no answer) and one that is busy, without the help of
site 0, which may be the one that is lost.

Two processes begin a session when they open a transport together. A process that has reported an exit reason may begin
the next session before a slow one has noticed the end of the last. So a report stays readable for those that are still
in its session, and has no effect on those that have begun a later one.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from ..errors import MismatchError, SiteError, escaped
from . import codec
from .calls import DIFFERENT, BegunExchanges, Wait, explain, own_place
from .handshake import Deadline, close_in_children, listen

_STATUS_SECONDS = 1.0  # for answers to a status request
_REPORT_SECONDS = 0.4  # for receipts of a report
_GRACE_SECONDS = 1.5  # for reports of other sites to arrive if no site seems to be lost
_SESSIONS = 8  # that a history covers


@codec.register
class ExitReport(NamedTuple):
    """Exit report of one process to another.

    Attributes:
        sender: token of the sender.
        number: number among the sender's reports.
        session: number of the session of the two processes in which it was made.
        reason: the exit reason; empty if the sender exits because of another process, None if it has withdrawn the
            reports of earlier sessions.
        lost: token of the process that the sender has lost; empty if unknown.
    """

    sender: bytes
    number: int
    session: int
    reason: str | None
    lost: bytes = b""


class ReportHistory:
    """Reports of one process to another, of the last sessions, of which it holds the last report each."""

    def __init__(self) -> None:
        self._reports: tuple[ExitReport, ...] = ()  # by session; replaced as a whole, since several threads read it

    def add(self, report: ExitReport) -> None:
        """Add a report, unless the history holds a later one of the same session."""
        reports = {each.session: each for each in self._reports}
        if report.session not in reports or reports[report.session].number < report.number:
            reports[report.session] = report
            self._reports = tuple(reports[session] for session in sorted(reports)[-_SESSIONS:])

    def find(self, session: int) -> ExitReport | None:
        """Return the report of a session, or else of the next session that has one."""
        return next((each for each in self._reports if each.session >= session and each.reason is not None), None)

    @property
    def last(self) -> ExitReport | None:
        """Last report, or the withdrawal of it."""
        return self._reports[-1] if self._reports else None


_REQUEST = struct.Struct("<16scI")  # token of the process that is asked, kind of request, bytes that follow
_REPLY = struct.Struct("<I")
_ASK, _TELL = b"?", b"!"
_MAX_BYTES = 1 << 14  # of a request or a reply
_MAX_REASON = 1000  # characters of an exit reason
_REQUEST_SECONDS = 2.0  # that a client has for its request
_MAX_CLIENTS = 256


@codec.register
class Member(NamedTuple):
    """Process of a group, and the address at which it answers status requests.

    Attributes:
        name: its name for messages.
        host: its address.
        port: its port; 0 where it cannot be asked.
        token: secret of the group with which requests to it must begin.
    """

    name: str
    host: str
    port: int
    token: bytes


@codec.register
class Question(NamedTuple):
    """Request for the state of a process.

    Attributes:
        sender: token of the process that asks.
        session: number of its last session with the process that it asks.
        wait: what it waits for; None if it has not waited for long.
    """

    sender: bytes
    session: int
    wait: Wait | None = None


@codec.register
class Status(NamedTuple):
    """State of a process.

    Attributes:
        exchanging: whether it waits in an exchange.
        place: the exchange that it is in, or was in last, and the step.
        report: its exit report of the session asked about or of a later one, else its last report or withdrawal.
        lacks: whether it has not begun what the one that asks waits for.
        wait: what it waits for itself; None if it has not waited for long.
    """

    exchanging: bool
    place: str
    report: ExitReport | None
    lacks: bool = False
    wait: Wait | None = None


class Silence(Enum):
    """Reasons for a request without an answer."""

    REFUSED = "the port is closed"
    UNANSWERED = "nothing came in time"


class StatusServer:
    """Server that answers status requests for this process.

    Attributes:
        loop: the event loop, of a thread of its own, which works while the interpreter ends, too.
        member: this process, as the others know it.
        sessions: by token, the number of sessions that this process has begun with another one.
        has_reported: whether this process has reported an exit reason since its last session began.
    """

    def __init__(self, name: str, addresses: Sequence[str] = ()) -> None:
        self._listener = listen(addresses)
        host, port = ("", 0) if self._listener is None else self._listener.getsockname()[:2]
        self.member = Member(name, host, port, secrets.token_bytes(16))
        self.sessions: Counter[bytes] = Counter()
        self.has_reported = False
        self._reports: defaultdict[bytes, ReportHistory] = defaultdict(ReportHistory)  # by their senders
        self._own_reports: defaultdict[bytes, ReportHistory] = defaultdict(ReportHistory)  # by their recipients
        self._number = 0
        self._lock = threading.Lock()
        self._clients: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self.loop = asyncio.SelectorEventLoop()
        if self._listener is not None:
            self.loop.create_task(asyncio.start_server(self._serve, sock=self._listener, limit=_MAX_BYTES))
        threading.Thread(target=self.loop.run_forever, name="dadplug-status", daemon=True).start()
        close_in_children(self)

    def begin_session(self, tokens: Iterable[bytes]) -> dict[bytes, ExitReport]:
        """Begin a session with other processes, which do the same.

        Returns:
            Withdrawals of the reports that this process has sent to them, by token.
        """
        tokens = list(tokens)
        self.sessions.update(tokens)
        with self._lock:
            last = {token: self._own_reports[token].last for token in tokens}
        informed = [token for token, report in last.items() if report is not None and report.reason is not None]
        withdrawals = self.make_reports(informed, None)
        self.has_reported = False
        return withdrawals

    def make_reports(self, tokens: Iterable[bytes], reason: str | None, lost: bytes = b"") -> dict[bytes, ExitReport]:
        """Make this process's reports to others, and return them by token.

        Args:
            tokens: tokens of the recipients.
            reason: see `ExitReport`.
            lost: see `ExitReport`.
        """
        self._number += 1
        self.has_reported = True
        reason = reason and reason[:_MAX_REASON]
        own, number = self.member.token, self._number
        reports = {token: ExitReport(own, number, self.sessions[token], reason, lost) for token in tokens}
        with self._lock:
            for token, report in reports.items():
                self._own_reports[token].add(report)
        return reports

    def take_report(self, report: ExitReport) -> None:
        """Store another process's report."""
        with self._lock:
            self._reports[report.sender].add(report._replace(reason=report.reason and escaped(report.reason)))

    def report_of(self, token: bytes, earlier: bool = False) -> ExitReport | None:
        """Return the report of another process in the current session with it.

        Args:
            token: its token.
            earlier: return its report of an earlier session if there is none, unless it has withdrawn that.
        """
        with self._lock:
            history = self._reports[token]
        if (report := history.find(self.sessions[token])) is None and earlier:
            report = history.last
        return report if report is not None and report.reason is not None else None

    def close_descriptors(self) -> None:
        """Close the port in a forked child, which has a server of its own."""
        global _server
        _server = None
        if self._listener is not None:
            self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients[writer] = None
        if len(self._clients) > _MAX_CLIENTS:
            next(iter(self._clients)).transport.abort()
        with suppress(OSError, EOFError, ValueError, asyncio.TimeoutError):
            await asyncio.wait_for(self._answer(reader, writer), _REQUEST_SECONDS)
        del self._clients[writer]
        writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a request, and answer it if it begins with this process's token; return once the client has closed."""
        token, kind, length = _REQUEST.unpack(await reader.readexactly(_REQUEST.size))
        if secrets.compare_digest(token, self.member.token) and length <= _MAX_BYTES:
            reply = self._reply(kind, await reader.readexactly(length))
            writer.write(_REPLY.pack(len(reply)) + reply)
            await reader.read()

    def _reply(self, kind: bytes, content: bytes) -> bytes:
        message, report, lacks = codec.decode(content), None, False
        if kind == _TELL and isinstance(message, ExitReport):
            self.take_report(message)
        elif kind == _ASK and isinstance(message, Question):
            with self._lock:
                reports = self._own_reports[message.sender]
            report, lacks = reports.find(message.session) or reports.last, own_place.lacks(message.wait)
        return codec.encode(Status(bool(own_place.waiting), str(own_place), report, lacks, own_place.wait))


def ask(members: Mapping[int, Member], seconds: float) -> dict[int, Status | Silence]:
    """Ask processes for their states, all at the same time.

    Args:
        members: the processes, by any number.
        seconds: time for all answers.
    """
    server = status_server()
    questions = {
        rank: codec.encode(Question(server.member.token, server.sessions[member.token], own_place.wait))
        for rank, member in members.items()
    }
    return _send({rank: (member, _ASK, questions[rank]) for rank, member in members.items()}, seconds)


def tell(members: Iterable[Member], reports: Mapping[bytes, ExitReport], seconds: float = _REPORT_SECONDS) -> None:
    """Send reports to processes, all at the same time, and wait for their receipts.

    Args:
        members: the processes; those without an address, or without a report, get none.
        reports: the reports, by token of the recipient.
        seconds: time for all receipts.
    """
    informed = [member for member in members if member.port and member.token in reports]
    requests = [(member, _TELL, codec.encode(reports[member.token])) for member in informed]
    _send(dict(enumerate(requests)), seconds)


def _send(requests: Mapping[int, tuple[Member, bytes, bytes]], seconds: float) -> dict[int, Status | Silence]:
    """Send requests to processes, all at the same time, and return the answers.

    Args:
        requests: recipient, kind and content of each, by any number.
        seconds: time for all answers.
    """

    async def answers() -> list[Status | Silence]:
        return await asyncio.gather(*(_request(*each, seconds) for each in requests.values()))

    every = asyncio.run_coroutine_threadsafe(answers(), status_server().loop).result()
    return dict(zip(requests, every, strict=True))


async def _request(member: Member, kind: bytes, content: bytes, seconds: float) -> Status | Silence:
    request = _REQUEST.pack(member.token, kind, len(content)) + content
    try:
        return await asyncio.wait_for(_receive_reply(member, request), seconds)
    except (ConnectionError, EOFError, ValueError):  # at its end: another process has the port, without the token
        return Silence.REFUSED
    except (OSError, asyncio.TimeoutError):  # no route, or no answer
        return Silence.UNANSWERED


async def _receive_reply(member: Member, request: bytes) -> Status:
    reader, writer = await asyncio.open_connection(member.host, member.port, limit=_MAX_BYTES)
    with closing(writer):
        writer.write(request)
        (length,) = _REPLY.unpack(await reader.readexactly(_REPLY.size))
        status = codec.decode(await reader.readexactly(length)) if length <= _MAX_BYTES else None
    if not isinstance(status, Status):
        raise ValueError(f"a damaged reply of {length} bytes")
    return status


_server: StatusServer | None = None


def status_server(name: str = "", addresses: Sequence[str] = ()) -> StatusServer:
    """Return this process's server, started when first asked for.

    Args:
        name: name of this process for messages.
        addresses: addresses of this machine at one of which it is to answer; by default those that others reach.
    """
    global _server
    if _server is None:
        _server = StatusServer(name, addresses)
    return _server


Announcer = Callable[[str, bool], None]
"""Function that sends other processes the exit reason; takes it, and whether one that was sent before stays."""


class ClosesTransports(Protocol):
    """Object with transports to be closed at exit."""

    def close_transports(self) -> None:
        """Close the transports that are still open."""


# Of a process without an error.
ENDED = "it exited first. Unequal numbers of batches? Use reduction.join(), or join() of the model that is wrapped"

_announcers: dict[Announcer, None] = {}
_watched: weakref.WeakSet[ClosesTransports] = weakref.WeakSet()


def add_announcer(announcer: Announcer) -> None:
    """Have a function called with this process's exit reason, from now on."""
    _announcers[announcer] = None


def remove_announcer(announcer: Announcer) -> None:
    """Have a function called no longer."""
    _announcers.pop(announcer, None)


def announce(reason: str, unless_announced: bool = False) -> None:
    """Report this process's exit reason to all sites of its groups.

    Args:
        reason: the reason.
        unless_announced: keep a reason that has been reported before.
    """
    # A SiteError says less than the report of the lost site, which has been made before.
    keep = unless_announced or reason.startswith(SiteError.__name__)
    for announcer in list(_announcers):
        announcer(reason, keep)


def watch_exit(sites: ClosesTransports) -> None:
    """Register the report at exit: an uncaught exception, or the end of the program."""
    if not _watched:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
    _watched.add(sites)


def _at_exit() -> None:
    error = getattr(sys, "last_value", None)  # the uncaught exception, if any
    if error is not None:
        announce(describe(error))
    announce(ENDED, unless_announced=True)
    for sites in list(_watched):
        sites.close_transports()
    if dist.is_initialized():
        dist.destroy_process_group()


def describe(error: BaseException) -> str:
    """Return the type and text of an exception, as in the last line of a traceback."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class PeerNames(ABC):
    """Sites of a group by name.

    Args:
        rank: this site.
        names: names of the sites for messages, by rank.

    Attributes:
        rank: this site.
    """

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self.rank = rank
        self._names = list(names)
        self._transports: weakref.WeakSet[Any] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._names)

    def name(self, rank: int) -> str:
        """Return the name of a site, without its number."""
        return self._names[rank]

    def __getitem__(self, rank: int) -> str:
        return f"site {rank} ({self._names[rank]})"

    def announce(self, reason: str) -> None:
        """Report this site's exit reason to all other sites."""
        announce(reason)

    def watch(self, transport: Any) -> None:
        """Close a transport when the process ends: its threads abort an interpreter that ends before them."""
        self._transports.add(transport)

    def close_transports(self) -> None:
        """Close the transports that are still open."""
        for transport in list(self._transports):
            transport.close()

    def found_lost(self) -> SiteError | None:
        """Return an error if it is known that another site is lost; send nothing."""
        return None

    def check_calls(self, wait: Wait) -> None:  # noqa: B027  (some networks see it by themselves)
        """Raise MismatchError if another site waits, too, and neither has begun what the other waits for.

        Args:
            wait: what this site waits for.
        """

    def check_awaited(self, awaited: Collection[int]) -> None:  # noqa: B027
        """Raise MismatchError if an awaited site waits itself for an exchange that this one has not begun.

        Args:
            awaited: ranks of sites that this one waits for, outside of an exchange.
        """

    def mismatch(self) -> MismatchError:
        """Return the error of sites that do not make the same calls, with their exchanges as far as they are known."""
        return MismatchError(explain({self.rank: str(own_place)}, self))

    @abstractmethod
    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError | MismatchError:
        """Convert a transport's error into one that names the site that is lost, with its exit reason if known.

        Args:
            error: what the transport raised.
            timeout: seconds after which a silent site counts as lost.
            peer: rank of the site at the other end of the connection, if known.
        """


def own_name() -> str:
    """Return the name of this process for other sites: host and process id."""
    return f"{socket.gethostname()}, pid {os.getpid()}"


def own_member(addresses: Sequence[str] = ()) -> Member:
    """Return this process as a member; it answers status requests from now on.

    Args:
        addresses: see `status_server`.
    """
    return status_server(own_name(), addresses).member


class ProcessSites(PeerNames):
    """Processes of a process group as sites, with their exit reasons.

    A closed connection shows neither which site is at fault (another may have exited because of it) nor why. So a site
    that exits reports the reason to all others, and a site whose connection is closed, or whose wait times out, asks
    all others for their status.

    Args:
        rank: this site.
        members: the sites, by rank.
    """

    def __init__(self, rank: int, members: Sequence[Member]) -> None:
        super().__init__(rank, [member.name for member in members])
        self.members = list(members)
        self._others = [other for other in range(len(members)) if other != rank]
        self._rank_of = {member.token: other for other, member in enumerate(members) if member.token}
        self._reached: set[int] = set()
        if self._others:
            self.begun = BegunExchanges(f"set-up of {members[0].token.hex()}")
            _watch_exit(self)
            answers = self._ask()
            self._reached = {other for other in self._others if isinstance(answers[other], Status)}

    def begin_session(self) -> None:
        """Begin a session, as all sites do together: reports of earlier sessions no longer count in it."""
        own_place.wait = None
        members = [self.members[other] for other in self._others if self.members[other].token]
        tell(members, status_server().begin_session(member.token for member in members))

    def report(self, reason: str) -> None:
        """Report a reason to all processes of this one's groups, whether or not this one exits."""
        _report_to_all(reason)

    def found_lost(self) -> SiteError | None:
        for report in self._reports().values():
            culprit = self._rank_of.get(report.lost, self.rank)
            if culprit != self.rank:
                reason = self._reports().get(culprit)
                return self._blame(
                    [culprit],
                    reason.reason
                    if reason is not None and reason.reason
                    else "another site has lost the connection to it, or its wait for it has timed out",
                )
        return None

    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError | MismatchError:
        in_time = not any(words in str(error).lower() for words in ("timed out", "timeout"))
        deadline = Deadline(_GRACE_SECONDS)
        while True:
            if (found := self._from_reports(peer)) is not None:
                return found
            answers = self._ask()
            missing = {other: answer for other, answer in answers.items() if isinstance(answer, Silence)}
            # A site may have failed before it began this session; that counts unless another site's process has ended.
            late = missing if Silence.REFUSED in missing.values() else self._others
            if (found := self._from_reports(peer, late)) is not None:
                return found
            if missing:
                return self._blame_missing(missing, timeout, peer, in_time)
            if not in_time:
                return self._blame_alive(answers, timeout, peer)
            if deadline.over:  # all are alive, and none has reported another one lost
                suspects = [peer] if peer is not None else self._others
                return self._blame(suspects, "the connection has closed, but the process is alive: a fault of the link")
            time.sleep(0.05)

    def check_calls(self, wait: Wait) -> None:
        own_place.wait = wait
        answers = [answer for answer in self._ask().values() if isinstance(answer, Status)]
        if any(answer.lacks and own_place.lacks(answer.wait) for answer in answers):
            raise self.mismatch()
        if isinstance(found := self._from_reports(None), MismatchError):
            raise found

    def check_awaited(self, awaited: Collection[int]) -> None:
        answers = self._ask()
        if any(isinstance(each := answers.get(site), Status) and own_place.lacks(each.wait) for site in awaited):
            raise self.mismatch()

    def mismatch(self) -> MismatchError:
        places = {self.rank: str(own_place)}
        for other, answer in self._ask().items():
            report = self._reports().get(other)
            places[other] = answer.place if isinstance(answer, Status) else f"{report.reason}" if report else ""
        error = MismatchError(explain(places, self))
        self.report(describe(error))  # others may see no more than that this site is gone
        return error

    def _reports(self, late: Collection[int] = ()) -> dict[int, ExitReport]:
        """Return the reports of the current session.

        Args:
            late: ranks of sites whose reports of an earlier session count if they have not begun another one since.
        """
        server = status_server()
        known = {other: server.report_of(self.members[other].token, other in late) for other in self._others}
        return {other: report for other, report in known.items() if report is not None}

    def _from_reports(self, peer: int | None, late: Collection[int] = ()) -> SiteError | MismatchError | None:
        """Return an error that names a site with an exit reason, or one that others have reported lost."""
        reasons = {other: report.reason for other, report in self._reports(late).items() if report.reason}
        for other in sorted(reasons, key=lambda other: other != peer):
            _, differ, calls = reasons[other].partition(DIFFERENT)
            return MismatchError(f"{DIFFERENT}{calls}") if differ else self._blame([other], reasons[other])
        return self.found_lost()

    def _ask(self) -> dict[int, Status | Silence]:
        """Ask all other sites for their status, and store the reports that come with it."""
        asked = {other: self.members[other] for other in self._others if self.members[other].port}
        answers = dict.fromkeys(self._others, Silence.UNANSWERED) | ask(asked, _STATUS_SECONDS)
        for answer in answers.values():
            if isinstance(answer, Status) and answer.report is not None:
                status_server().take_report(answer.report)
        return answers

    def _blame_missing(self, missing: dict[int, Silence], timeout: float, peer: int | None, in_time: bool) -> SiteError:
        """Return an error that names the sites without an answer: ended ones first, then silent ones."""
        left = self._reports(missing)  # because of others
        known = [other for other in missing if other in self._reached and other not in left]
        ended = [other for other in known if missing[other] is Silence.REFUSED]
        if ended:
            return self._blame(ended, "its process has ended without a reason: it was killed, or its machine went down")
        suspects = known or [other for other in missing if other not in left] or self._others
        if peer in suspects and not known:  # it could never be asked
            suspects = [peer]
        why = "a status request has no answer either: its process is stopped, or its machine or link is down"
        return self._blame(suspects, why) if in_time else self._blame(suspects, why, timeout)

    def _blame_alive(self, answers: Mapping[int, Any], timeout: float, peer: int | None) -> SiteError:
        """Return an error that names the sites that were busy while this one waited; all have answered."""
        busy = [other for other in self._others if not answers[other].exchanging]
        suspects = [peer] if peer is not None and (peer in busy or not busy) else busy or self._others
        where = "; ".join(
            f"site {other} is {'busy after' if other in busy else 'in'} {answers[other].place}" for other in suspects
        )
        advice = "A site that may be this slow needs a larger timeout="
        return self._blame(suspects, f"it is running ({where}; this site is in {own_place}). {advice}", timeout)

    def _blame(self, suspects: Sequence[int], reason: str, timeout: float | None = None) -> SiteError:
        """Make the error, and report the lost site to the others."""
        lost = self.members[suspects[0]].token if len(suspects) == 1 else b""
        if not status_server().has_reported:
            _report_to_all("", lost)
        names = ", ".join(self[other] for other in suspects)
        several = len(suspects) > 1
        if timeout is not None:
            who = f"one of {names}" if several else names
            return SiteError(f"{who} has not answered for {timeout:g} s: {reason}")
        return SiteError(f"{names} {'are' if several else 'is'} gone: {reason}")


_introduced: weakref.WeakSet[ProcessSites] = weakref.WeakSet()
_of_default_group: tuple[object, ProcessSites] | None = None


def _announce(reason: str, keep: bool) -> None:
    if _introduced and not (keep and status_server().has_reported):
        _report_to_all(reason)


def _report_to_all(reason: str, lost: bytes = b"") -> None:
    """Make a report to all sites of this process's groups, and send it to all but a lost one."""
    own = status_server().member.token
    members = {member.token: member for sites in list(_introduced) for member in sites.members if member.token != own}
    reports = status_server().make_reports(members, reason, lost)
    tell([member for token, member in members.items() if token != lost], reports)


def _watch_exit(sites: ProcessSites) -> None:
    _introduced.add(sites)
    add_announcer(_announce)
    watch_exit(sites)


def introduce_default(sites: ProcessSites) -> None:
    """Store the sites of the default group, for `introduce`."""
    global _of_default_group
    _of_default_group = dist.group.WORLD, sites


def introduce(group: dist.ProcessGroup, timeout: float) -> ProcessSites:
    """Return the sites of a process group; all of them must call it together.

    Args:
        group: the process group.
        timeout: seconds after which a silent site counts as lost.

    Raises:
        SiteError: if a site ends or does not answer.
    """
    if _of_default_group is not None and _of_default_group[0] is dist.group.WORLD:
        sites = _of_default_group[1]
        if group is not dist.group.WORLD:
            members = [sites.members[rank] for rank in dist.get_process_group_ranks(group)]
            sites = ProcessSites(dist.get_rank(group), members)
        sites.begin_session()
        return sites
    rank = dist.get_rank(group)
    unknown = [
        Member(f"rank {other} of the process group", "", 0, b"") for other in dist.get_process_group_ranks(group)
    ]
    try:
        members = codec.gather_objects(own_member(), group, lambda work: work.wait(timedelta(seconds=timeout)))
    except RuntimeError as error:
        raise ProcessSites(rank, unknown).lost(error, timeout) from error
    sites = ProcessSites(rank, members)
    sites.begin_session()
    if group is dist.group.WORLD:
        introduce_default(sites)
    return sites
