"""Status requests between processes: whether a site is alive, what it executes, and why it exits.

Every process answers on a port of its own, in a thread that sleeps between requests. So a site whose wait times out can
distinguish a killed process (connection refused), a suspended one (no answer) and one that executes something else,
without the help of site 0, which may be the one that is lost.

Two processes begin a session when they open a transport together. A process that has reported an exit reason may begin
the next session before a slow one has noticed the end of the last. So a report stays readable for those that are still
in its session, and has no effect on those that have begun a later one.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from . import codec
from .deadline import Deadline
from .handshake import close_in_children, listen

_SESSIONS = 8  # that a history covers


class Report(NamedTuple):
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


codec.register(Report, "dadplug.exchange.exit_reports.Report")  # as other versions call it


class ReportHistory:
    """Reports of one process to another, of the last sessions, of which it holds the last report each."""

    def __init__(self) -> None:
        self._reports: tuple[Report, ...] = ()  # by session; replaced as a whole, since several threads read it

    def add(self, report: Report) -> None:
        """Add a report, unless the history holds a later one of the same session."""
        reports = {each.session: each for each in self._reports}
        if report.session not in reports or reports[report.session].number < report.number:
            reports[report.session] = report
            self._reports = tuple(reports[session] for session in sorted(reports)[-_SESSIONS:])

    def find(self, session: int) -> Report | None:
        """Return the report of a session, or else of the next session that has one."""
        return next((each for each in self._reports if each.session >= session and each.reason is not None), None)

    @property
    def last(self) -> Report | None:
        """Last report, or the withdrawal of it."""
        return self._reports[-1] if self._reports else None


_REQUEST = struct.Struct("<16scI")  # token of the process that is asked, kind of request, bytes that follow
_REPLY = struct.Struct("<I")
_ASK, _TELL = b"?", b"!"
_MAX_BYTES = 1 << 14  # of a request or a reply
_MAX_REASON = 1000  # characters of an exit reason
_REQUEST_SECONDS = 2.0  # that a client has for its request
_MAX_CLIENTS = 256
_CLOSED = (errno.ECONNREFUSED, errno.ECONNRESET)
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_WAITING_IN = tuple(_PACKAGE + name + os.sep for name in ("exchange", "adapm", "parameter_server", "hub"))
_TRAINING_IN = (_PACKAGE + os.path.join("parameter_server", "experiment.py"),)  # it calls the program's functions
_LOADING_IN = ("__iter__", "__next__")  # of loaders: below them are waits of their own, or the program's data set


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
    """

    sender: bytes
    session: int


@codec.register
class Status(NamedTuple):
    """State of a process.

    Attributes:
        exchanging: whether its main thread takes part in an exchange.
        place: file, line and function that its main thread executes.
        report: its exit report of the session asked about or of a later one, else its last report or withdrawal.
    """

    exchanging: bool
    place: str
    report: Report | None


class Silence(Enum):
    """Reasons for a request without an answer."""

    REFUSED = "the port is closed"
    UNANSWERED = "nothing came in time"


class StatusServer:
    """Server that answers status requests for this process.

    Attributes:
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
        close_in_children(self)
        if self._listener is not None:
            threading.Thread(target=self._serve, args=(self._listener,), name="dadplug-status", daemon=True).start()

    def begin_session(self, tokens: Iterable[bytes]) -> dict[bytes, Report]:
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

    def make_reports(self, tokens: Iterable[bytes], reason: str | None, lost: bytes = b"") -> dict[bytes, Report]:
        """Make this process's reports to others, and return them by token.

        Args:
            tokens: tokens of the recipients.
            reason: see `Report`.
            lost: see `Report`.
        """
        self._number += 1
        self.has_reported = True
        reason = reason and reason[:_MAX_REASON]
        own, number = self.member.token, self._number
        reports = {token: Report(own, number, self.sessions[token], reason, lost) for token in tokens}
        with self._lock:
            for token, report in reports.items():
                self._own_reports[token].add(report)
        return reports

    def take_report(self, report: Report) -> None:
        """Store another process's report."""
        with self._lock:
            self._reports[report.sender].add(report)

    def report_of(self, token: bytes, earlier: bool = False) -> Report | None:
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

    def _serve(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        selector = selectors.DefaultSelector()
        selector.register(listener, selectors.EVENT_READ)
        clients: dict[socket.socket, tuple[float, bytearray]] = {}
        while True:
            ready = selector.select(0.5 if clients else None)
            for key, _ in ready:
                if key.fileobj is listener:
                    with suppress(OSError):
                        client, _ = listener.accept()
                        client.setblocking(False)
                        selector.register(client, selectors.EVENT_READ)
                        clients[client] = time.monotonic() + _REQUEST_SECONDS, bytearray()
                    continue
                answered: Any = key.fileobj
                if self._read(answered, clients[answered][1]):
                    clients[answered] = 0.0, bytearray()
            late = [each for each, (deadline, _) in clients.items() if deadline < time.monotonic()]
            for client in late or list(clients)[: max(0, len(clients) - _MAX_CLIENTS)]:
                selector.unregister(client)
                client.close()
                del clients[client]

    def _read(self, client: socket.socket, request: bytearray) -> bool:
        """Read from a client, and answer once the request is complete; return whether that is over."""
        try:
            received = client.recv(_MAX_BYTES)
            request += received
            if len(request) < _REQUEST.size:
                return not received
            token, kind, length = _REQUEST.unpack_from(request)
            if not secrets.compare_digest(token, self.member.token) or length > _MAX_BYTES:
                return True
            if len(request) < _REQUEST.size + length:
                return not received
            reply = self._reply(kind, bytes(request[_REQUEST.size : _REQUEST.size + length]))
            client.send(_REPLY.pack(len(reply)) + reply)
        except BlockingIOError:
            return False
        except (OSError, ValueError):
            pass
        return True

    def _reply(self, kind: bytes, content: bytes) -> bytes:
        message, report = codec.decode(content), None
        if kind == _TELL and isinstance(message, Report):
            self.take_report(message)
        elif kind == _ASK and isinstance(message, Question):
            with self._lock:
                reports = self._own_reports[message.sender]
            report = reports.find(message.session) or reports.last
        return codec.encode(Status(*_occupation(), report))


def _occupation() -> tuple[bool, str]:
    """Return whether the main thread takes part in an exchange, and the line that it executes."""
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_WAITING_IN) and file not in _TRAINING_IN and frame.f_code.co_name not in _LOADING_IN:
            return True, place
        frame = frame.f_back
    return False, place


def ask(members: Mapping[int, Member], seconds: float) -> dict[int, Status | Silence]:
    """Ask processes for their states, all at the same time.

    Args:
        members: the processes, by any number.
        seconds: time for all answers.
    """
    server = status_server()
    questions = {
        rank: codec.encode(Question(server.member.token, server.sessions[member.token]))
        for rank, member in members.items()
    }
    return _send({rank: (member, _ASK, questions[rank]) for rank, member in members.items()}, seconds)


def tell(members: Mapping[int, Member], reports: Mapping[bytes, Report], seconds: float) -> None:
    """Send reports to processes, all at the same time, and wait for their receipts.

    Args:
        members: the processes, by any number.
        reports: the reports, by token of the recipient.
        seconds: time for all receipts.
    """
    _send({rank: (member, _TELL, codec.encode(reports[member.token])) for rank, member in members.items()}, seconds)


def _send(requests: Mapping[int, tuple[Member, bytes, bytes]], seconds: float) -> dict[int, Status | Silence]:
    deadline = Deadline(seconds)
    answers: dict[int, Status | Silence] = dict.fromkeys(requests, Silence.UNANSWERED)
    with selectors.DefaultSelector() as selector, ExitStack() as opened:
        for rank, (member, kind, content) in requests.items():
            with suppress(OSError):
                connected = opened.enter_context(socket.socket(socket.AF_INET))
                connected.setblocking(False)
                error = connected.connect_ex((member.host, member.port))
                request = _request(connected, error, _REQUEST.pack(member.token, kind, len(content)) + content)
                selector.register(connected, next(request), (rank, request))
        while selector.get_map() and not deadline.over:
            for key, _ in selector.select(deadline.left):
                rank, request = key.data
                try:
                    selector.modify(key.fileobj, next(request), key.data)
                except StopIteration as end:
                    answers[rank] = end.value
                    selector.unregister(key.fileobj)
    return answers


def _request(connected: socket.socket, error: int, content: bytes) -> Generator[int, None, Status | Silence]:
    """Send a request, and receive the reply.

    Args:
        connected: the socket, which does not block.
        error: what `connect_ex` has returned.
        content: the request.

    Yields:
        The event of the socket that has to come next.

    Returns:
        The answer.
    """
    reply, length = bytearray(), 0
    yield selectors.EVENT_WRITE
    try:
        error = connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or error
        if error not in (0, errno.EINPROGRESS):
            return Silence.REFUSED if error in _CLOSED else Silence.UNANSWERED
        connected.send(content)
        while len(reply) < _REPLY.size + length:
            yield selectors.EVENT_READ
            with suppress(BlockingIOError):
                received = connected.recv(_MAX_BYTES)
                if not received:  # another process has the port now, and does not know the token
                    return Silence.REFUSED
                reply += received
            if len(reply) >= _REPLY.size:
                (length,) = _REPLY.unpack_from(reply)
            if length > _MAX_BYTES:
                return Silence.REFUSED
        status = codec.decode(reply[_REPLY.size : _REPLY.size + length])
    except (ConnectionError, ValueError):
        return Silence.REFUSED
    except OSError:  # no route
        return Silence.UNANSWERED
    return status if isinstance(status, Status) else Silence.REFUSED


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
