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
