"""Requirements of a run for the sites that have to stay, and the frames of its open round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import FrameError
from ..exchange.transport import Requirements
from .actions import IDLE, Accept, Action, Close, Drop, Join, Round, Rules
from .frames import Head
from .membership import Membership
from .missed_steps import LIMIT, MissedSteps
from .open_round import OpenRound
from .sites import Phase

SHORT_GRACE = 0.2  # seconds for which a site may dial again where others wait for it
_ABSENT = "it was absent when this site joined"
_HANDSHAKE = 2  # times as long where a connection is in its handshake, which may be that of the site


class ElasticRun:
    """Rules of a run, which the sites may replace once it has started.

    Args:
        rules: rules of the hub.
        missed: counts the steps that late sites miss.

    Attributes:
        rules: the rules that hold.
        round: frames of the open round; kept only while the run is elastic.
        missed: training steps that late sites have missed.
        joined: announcements of the sites that have joined in the open round, by slot. A site that joins after them in
            the same round has to be told.
    """

    def __init__(self, rules: Rules, missed: MissedSteps) -> None:
        self.rules = self._first = rules
        self.round = OpenRound()
        self.missed = missed
        self.joined: dict[int, Join] = {}
        self._kind = Round.COLLECTIVE  # of the open round, once a site has ended it
        self._required: Requirements | None = None

    @property
    def elastic(self) -> bool:
        """Whether the run goes on without a site that leaves."""
        return self._required is not None

    @property
    def admits(self) -> bool:
        """Whether sites may join in the open round."""
        return self._kind is Round.FIRST

    def require(self, requirements: Requirements, membership: Membership) -> None:
        """Take what the sites require.

        Args:
            requirements: the requirements.
            membership: the membership, which gets rules that fit.

        Raises:
            FrameError: if other sites have required something else, or it cannot be met.
        """
        if self._required is None:
            self.joined.clear()  # at the start
        elif self._required != requirements:
            raise FrameError(f"it requires {requirements}, and another site {self._required}")
        timeout = requirements.timeout_ms / 1e3
        try:
            rules = replace(
                self.rules,
                min_sites=requirements.min_sites,
                site_timeout=timeout,
                late="skip" if requirements.skips else "wait",
                patience=requirements.patience_percent / 100,
            )
            membership.replace_rules(rules)
        except ValueError as error:
            raise FrameError(str(error)) from error
        self._required, self.rules = requirements, rules

    def given_up(self, membership: Membership) -> list[tuple[int, str]]:
        """Return the sites that cannot go on, and why.

        Args:
            membership: the membership.
        """
        if not self.elastic:
            return []
        late = [(slot, f"late: more than {LIMIT >> 20} MB wait for it") for slot in self.missed.overdue()]
        return late + [(slot, "no site is left that holds the state of the training") for slot in orphans(membership)]

    def begin_ending(self, head: Head, membership: Membership) -> bool:
        """Take note of what the first site that ends the open round says of it.

        Args:
            head: head of the site's END.
            membership: the membership.

        Returns:
            Whether the site contributes nothing.

        Raises:
            FrameError: if it says something unknown.
        """
        if self.elastic and head.step == membership.open_step:
            try:
                membership.round = self._kind = Round(head.exchange & ~IDLE)
            except ValueError as error:
                raise FrameError(f"it ends a round of an unknown kind, number {head.exchange}") from error
        return bool(head.exchange & IDLE)

    def grace(self, seconds: float, dials: bool) -> float:
        """Return for how long a lost connection is awaited: shortly, where others wait for it.

        Args:
            seconds: the time where all sites must stay.
            dials: whether a connection is in its handshake.
        """
        return min(seconds, SHORT_GRACE * (_HANDSHAKE if dials else 1)) if self.elastic else seconds

    def take(self, action: Action) -> None:
        """Take an action of the membership."""
        self.missed.take(action, self._kind, self.round.nbytes)
        if isinstance(action, Close):
            self.begin_round()
        elif isinstance(action, Join):
            self.joined[action.slot] = action
        elif isinstance(action, Drop):
            self.joined.pop(action.slot, None)

    def earlier(self, accept: Accept, world_size: int, membership: Membership) -> list[Action]:
        """Return the announcements that a site which joins has missed: who is absent, and who joins as well."""
        if not accept.needs_state:
            return []
        others = set(range(world_size)) - {accept.slot, *membership.participants}
        gone: list[Action] = [Drop(slot, membership.open_step, _ABSENT) for slot in sorted(others)]
        return [*gone, *self.joined.values()]

    def begin_round(self) -> None:
        """Begin a round."""
        self.round.clear()
        self.joined.clear()
        self._kind = Round.COLLECTIVE

    def resize(self, names: Sequence[str], before: int) -> None:
        """Begin a run of other sites than before.

        Args:
            names: names of the sites.
            before: number of sites before.
        """
        self._require_sites(len(names), before)
        self.reset()
        self.missed.reset(names)

    def grow(self, names: Sequence[str], before: int) -> None:
        """Go on with further sites; arguments are those of `resize`. What the sites require of this run stays."""
        self._require_sites(len(names), before)
        self.missed.extend(names)

    def _require_sites(self, count: int, before: int) -> None:
        """Adapt the rule of the runs that follow to another number of sites."""
        every = self._first.min_sites == before
        self._first = replace(self._first, min_sites=count if every else min(self._first.min_sites, count))

    def reset(self) -> None:
        """Begin a run by the rules of the hub."""
        self.rules, self._required = self._first, None
        self.missed.reset()
        self.begin_round()


def orphans(membership: Membership) -> list[int]:
    """Return the slots of the sites that wait for a state which no member is left to send."""
    participants = membership.participants
    members = any(membership.phase(slot) is Phase.MEMBER for slot in participants)
    return [] if members or not membership.started else participants
