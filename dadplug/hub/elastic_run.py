"""Requirements of a run for the sites that have to stay, and the frames of its open round."""

from __future__ import annotations

from dataclasses import replace

from ..exchange.requirements import Requirements
from .actions import Rules
from .frames import FrameError
from .membership import Membership
from .open_round import OpenRound

SHORT_GRACE = 0.3  # seconds for which a site may dial again where others wait for it


class ElasticRun:
    """Rules of a run, which the sites may replace once it has started.

    Args:
        rules: rules of the hub.

    Attributes:
        rules: the rules that hold.
        round: frames of the open round; kept only while the run is elastic.
        admits: whether sites may join in the open round.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = self._first = rules
        self.round = OpenRound()
        self.admits = False
        self._required: Requirements | None = None

    @property
    def elastic(self) -> bool:
        """Whether the run goes on without a site that leaves."""
        return self._required is not None

    def require(self, requirements: Requirements, membership: Membership) -> None:
        """Take what the sites require.

        Args:
            requirements: the requirements.
            membership: the membership, which gets rules that fit.

        Raises:
            FrameError: if other sites have required something else, or it cannot be met.
        """
        if self._required not in (None, requirements):
            raise FrameError(f"it requires {requirements}, and another site {self._required}")
        timeout = requirements.timeout_ms / 1e3
        try:
            rules = replace(self.rules, min_sites=requirements.min_sites, site_timeout=timeout)
            membership.replace_rules(rules)
        except ValueError as error:
            raise FrameError(str(error)) from error
        self._required, self.rules = requirements, rules

    def grace(self, seconds: float) -> float:
        """Return for how long a lost connection is awaited: shortly, where others wait for it.

        Args:
            seconds: the time where all sites must stay.
        """
        return min(seconds, SHORT_GRACE) if self.elastic else seconds

    def begin_round(self) -> None:
        """Begin a round."""
        self.round.clear()
        self.admits = False

    def reset(self) -> None:
        """Begin a run by the rules of the hub."""
        self.rules, self._required = self._first, None
        self.begin_round()
