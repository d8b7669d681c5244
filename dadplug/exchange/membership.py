"""Sites of a process group, and connection errors that name the site at fault."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from ..errors import SiteError
from .exit_reasons import add_announcer, watch_exit
from .exit_reports import Report
from .objects import gather_objects
from .sites import Sites
from .status import Member, Silence, Status, ask, status_server, tell

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


class ProcessSites(Sites):
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

    def of(self, ranks: Sequence[int]) -> ProcessSites:
        return ProcessSites(ranks.index(self.rank), [self.members[rank] for rank in ranks])

    def begin_session(self) -> None:
        """Begin a session, as all sites do together: reports of earlier sessions no longer count in it."""
        members = [self.members[other] for other in self._others if self.members[other].token]
        _tell(members, status_server().begin_session(member.token for member in members))

    def report(self, reason: str) -> None:
        """Report a reason to all processes that this one knows, whether or not this one exits."""
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
                    else "another site has lost the connection to it, or has waited for it in vain",
                )
        return None

    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError:
        in_time = not is_timeout(error)
        deadline = time.monotonic() + _GRACE_SECONDS
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
            if time.monotonic() > deadline:  # all are alive, and none has lost anybody
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


_watched: weakref.WeakSet[ProcessSites] = weakref.WeakSet()
_of_default_group: tuple[object, ProcessSites] | None = None


def _announce(reason: str, keep: bool) -> None:
    if _watched and not (keep and status_server().has_reported):
        _report_to_all(reason)


def _report_to_all(reason: str, lost: bytes = b"") -> None:
    """Make a report to all sites that this process knows, and send it to all but a lost one."""
    own = status_server().member.token
    members = {member.token: member for sites in list(_watched) for member in sites.members if member.token != own}
    reports = status_server().make_reports(members, reason, lost)
    _tell([member for token, member in members.items() if token != lost], reports)


def _tell(members: Sequence[Member], reports: Mapping[bytes, Report]) -> None:
    informed = [member for member in members if member.port and member.token in reports]
    tell(dict(enumerate(informed)), reports, _REPORT_SECONDS)


def _watch_exit(sites: ProcessSites) -> None:
    _watched.add(sites)
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
            sites = sites.of(dist.get_process_group_ranks(group))
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
