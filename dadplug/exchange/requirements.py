"""Requirements of training for the number of sites, where sites may leave and come."""

from __future__ import annotations

from typing import NamedTuple


class Requirements(NamedTuple):
    """Requirements, the same at all sites.

    Attributes:
        min_sites: number of sites below which training pauses.
        timeout_ms: milliseconds of silence after which a site counts as lost.
        skips: whether a late site misses a step, and is not waited for.
        patience_percent: time after which a site is late, in hundredths of the median step.
    """

    min_sites: int
    timeout_ms: int
    skips: bool = False
    patience_percent: int = 300

    @classmethod
    def of(
        cls, min_sites: int | None, site_timeout: float, late: str = "wait", patience: float = 3.0
    ) -> Requirements | None:
        """Return the requirements that options state.

        Args:
            min_sites: number of sites below which training pauses; None where all must stay.
            site_timeout: seconds of silence after which a site counts as lost.
            late: "wait" for late sites, or "skip" them.
            patience: time after which a site is late, in median steps.
        """
        if min_sites is None:
            return None
        return cls(min_sites, round(1e3 * site_timeout), late == "skip", round(100 * patience))
