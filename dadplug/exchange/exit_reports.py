"""Exit reports of processes, and their history by session.

Two processes begin a session when they open a transport together. A process that has reported an exit reason may begin
the next session before a slow one has noticed the end of the last. So a report stays readable for those that are still
in its session, and has no effect on those that have begun a later one.
"""

from __future__ import annotations

from typing import NamedTuple

from . import codec

_SESSIONS = 8  # that a history covers


@codec.register
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
