"""Outage in which a hub can hear no site, whose own connection may be lost therefore."""

from __future__ import annotations

from collections.abc import Sequence

from ...logs import span
from ..wire.redialing import return_seconds
from .session import Session

_UNHEARD_SECONDS = 3.0  # without a byte, after which a site cannot be heard; sites send one every second


class Outage:
    """Outage in which no site can be heard.

    Attributes:
        since: time at which a site was heard last; None while one can be heard.
    """

    def __init__(self) -> None:
        self.since: float | None = None

    def state(self, now: float) -> str:
        """Return for how long no site has been heard, in words; empty while one can be heard."""
        if self.since is None:
            return ""
        return f"no site has been heard for {span(now - self.since)}: the connection of this hub may be lost"

    def observe(self, sessions: Sequence[Session], site_timeout: float, now: float) -> tuple[str, float]:
        """Find out whether an outage begins or ends.

        Args:
            sessions: all sessions.
            site_timeout: seconds of silence after which a site counts as lost.
            now: the time, in seconds.

        Returns:
            Text for the journal, empty if nothing has changed; and the seconds that sites have to come back at the end
            of an outage, else 0.
        """
        silence = min(_UNHEARD_SECONDS, site_timeout)
        heard = any(each.stream is not None and now < each.heard + silence for each in sessions)
        if heard or not sessions:
            since, self.since = self.since, None
            if since is None or not heard:
                return "", 0.0
            wait = return_seconds(now - since)
            return (
                f"sites can be heard again, after {span(now - since)}: the others have {span(wait)} to come back",
                wait,
            )
        if self.since is not None:
            return "", 0.0
        self.since = max(each.heard for each in sessions)
        return "no site can be heard: the connection of this hub may be lost; it waits for all sites", 0.0
