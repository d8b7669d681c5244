"""Gathering: for how long a contribution waits for those of other sites, so that they make one commit.

Sites of equal speed contribute at nearly the same times. If each contribution were a commit of its own, every site
would make a step of the optimizer for each of them. So a contribution waits for another site that is expected soon: one
interval after its last contribution, where the interval is the median of its latest ones. The wait lasts at most a part
of the interval of the site that waits, and ends when a site has two contributions pending. Nobody stops computing
meanwhile, unless `staleness` is 1.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping

_INTERVALS = 5  # of which the median is taken
_OVERDUE = 0.5  # part of its interval after which an expected contribution is not waited for any more


class Arrivals:
    """Times at which contributions of sites have arrived.

    Args:
        part: the largest part of its site's interval for which a contribution waits.

    Attributes:
        now: the present time in seconds; only differences matter.
    """

    def __init__(self, part: float) -> None:
        self.now = 0.0
        self._part = part
        self._last: dict[int, float] = {}  # when a site has contributed, or resumed
        self._resumed: set[int] = set()  # sites whose time to the next contribution is no interval
        self._intervals: dict[int, deque[float]] = {}

    def record(self, site: int) -> None:
        """Record that a contribution of a site has arrived."""
        if site in self._last and site not in self._resumed:
            self._intervals.setdefault(site, deque(maxlen=_INTERVALS)).append(self.now - self._last[site])
        self._last[site] = self.now
        self._resumed.discard(site)

    def resume(self, site: int) -> None:
        """Record that a site begins to compute, after a pause that does not count."""
        self._last[site] = self.now
        self._resumed.add(site)

    def forget(self, site: int) -> None:
        """Forget the intervals of a site: a process that takes its place may have another speed."""
        self._intervals.pop(site, None)
        self.resume(site)

    def due(self, pending: Mapping[int, int], computing: Iterable[int]) -> float | None:
        """Return the time until which a commit waits for further contributions; None if it does not.

        Args:
            pending: number of contributions that a commit would have, by site.
            computing: sites without any, from which one is to come.
        """
        if not pending or max(pending.values()) > 1:
            return None
        latest = min(self._last[site] + self._part * self._interval(site) for site in pending)
        given_up = [
            self._last[site] + (1 + _OVERDUE) * self._interval(site)
            for site in computing
            if site in self._intervals and self._last[site] + self._interval(site) <= latest
        ]
        due = min(latest, max(given_up, default=self.now))
        return due if due > self.now else None

    def _interval(self, site: int) -> float:
        return statistics.median(self._intervals[site]) if site in self._intervals else 0.0
