"""Names of the sites of a group, and errors that name the site at fault, with the reason why it exits."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from ..errors import SiteError
from .codec import gather_objects
from .deadline import Deadline
from .status import Member, Report, Silence, Status, ask, status_server, tell

Announcer = Callable[[str, bool], None]
"""Function that sends other processes the exit reason; takes it, and whether one that was sent before stays."""


class ClosesTransports(Protocol):
    """Object with transports to be closed at exit."""

    def close_transports(self) -> None:
        """Close the transports that are still open."""


# Of a process without an error.
ENDED = "it exited first. Unequal numbers of batches? Use reduction.join(), or join() of the model that is wrapped"

_announcers: list[Announcer] = []
_watched: weakref.WeakSet[ClosesTransports] = weakref.WeakSet()


def add_announcer(announcer: Announcer) -> None:
    """Have a function called with this process's exit reason, from now on."""
    if announcer not in _announcers:
        _announcers.append(announcer)


def remove_announcer(announcer: Announcer) -> None:
    """Have a function called no longer."""
    if announcer in _announcers:
        _announcers.remove(announcer)


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

    @abstractmethod
    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError:
        """Convert a transport's error into one that names the site that is lost, with its exit reason if known.

        Args:
            error: what the transport raised.
            timeout: seconds after which a silent site counts as lost.
            peer: rank of the site at the other end of the connection, if known.
        """


_STATUS_SECONDS = 1.0  # for answers to a status request
_REPORT_SECONDS = 0.4  # for receipts of a report
_GRACE_SECONDS = 1.5  # for reports of other sites to arrive if no site seems to be lost


def own_name() -> str:
    """Return the name of this process for other sites: host and process id."""
    return f"{socket.gethostname()}, pid {os.getpid()}"


def own_member(addresses: Sequence[str] = ()) -> Member:
    """Return this process as a member; it answers status requests from now on.

    Args:
        addresses: see `status_server`.
    """
    return status_server(own_name(), addresses).member


def is_timeout(error: BaseException) -> bool:
    """Return whether a transport's error is a timeout."""
    return any(words in str(error).lower() for words in ("timed out", "timeout"))


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
            _watch_exit(self)
            answers = self._ask()
            self._reached = {other for other in self._others if isinstance(answers[other], Status)}

    def begin_session(self) -> None:
        """Begin a session, as all sites do together: reports of earlier sessions no longer count in it."""
        members = [self.members[other] for other in self._others if self.members[other].token]
        _tell(members, status_server().begin_session(member.token for member in members))

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

    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError:
        in_time = not is_timeout(error)
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

    def _reports(self, late: Collection[int] = ()) -> dict[int, Report]:
        """Return the reports of the current session.

        Args:
            late: ranks of sites whose reports of an earlier session count if they have not begun another one since.
        """
        server = status_server()
        known = {other: server.report_of(self.members[other].token, other in late) for other in self._others}
        return {other: report for other, report in known.items() if report is not None}

    def _from_reports(self, peer: int | None, late: Collection[int] = ()) -> SiteError | None:
        """Return an error that names a site with an exit reason, or one that others have reported lost."""
        reasons = {other: report.reason for other, report in self._reports(late).items() if report.reason}
        for other in sorted(reasons, key=lambda other: other != peer):
            return self._blame([other], reasons[other])
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

    def _blame_alive(self, answers: dict[int, Status | Silence], timeout: float, peer: int | None) -> SiteError:
        """Return an error that names the sites that execute something else while this one waited."""
        places = {other: answer.place for other, answer in answers.items() if isinstance(answer, Status)}
        idle = [other for other, answer in answers.items() if isinstance(answer, Status) and not answer.exchanging]
        suspects = [peer] if peer is not None and (peer in idle or not idle) else idle or self._others
        where = "; ".join(f"site {other} is at {places[other]}" for other in suspects if places.get(other))
        stuck = f"it is running ({where}). A site that may be this slow needs a larger timeout="
        return self._blame(suspects, stuck, timeout)

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
    _tell([member for token, member in members.items() if token != lost], reports)


def _tell(members: Sequence[Member], reports: Mapping[bytes, Report]) -> None:
    informed = [member for member in members if member.port and member.token in reports]
    tell(dict(enumerate(informed)), reports, _REPORT_SECONDS)


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
        members = gather_objects(own_member(), group, lambda work: work.wait(timedelta(seconds=timeout)))
    except RuntimeError as error:
        raise ProcessSites(rank, unknown).lost(error, timeout) from error
    sites = ProcessSites(rank, members)
    sites.begin_session()
    if group is dist.group.WORLD:
        introduce_default(sites)
    return sites
