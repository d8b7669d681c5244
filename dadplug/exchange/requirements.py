"""Requirements of training for the number of sites, where sites may leave and come."""

from __future__ import annotations

from typing import NamedTuple


class Requirements(NamedTuple):
    """Requirements, the same at all sites.

    Attributes:
        min_sites: number of sites below which training pauses.
        timeout_ms: milliseconds of silence after which a site counts as lost.
    """

    min_sites: int
    timeout_ms: int

    @classmethod
    def of(cls, min_sites: int | None, site_timeout: float) -> Requirements | None:
        """Return the requirements that options state.

        Args:
            min_sites: number of sites below which training pauses; None where all must stay.
            site_timeout: seconds of silence after which a site counts as lost.
        """
        return None if min_sites is None else cls(min_sites, round(1e3 * site_timeout))
