"""Pace at which sites connect again while the hub is away, and how long a hub waits for them therefore.

A site whose hub is away tries again after pauses that grow with the outage, so that many sites do not all connect at
once, and a hub that is away for hours costs nothing. Every site has tried within `return_seconds` after the end of an
outage. A hub that gave sites up sooner would lose those that come last.
"""

from __future__ import annotations

import random

DIAL_SECONDS = 5.0
"""Seconds for each part of the start of a connection."""
LONGEST_PAUSE = 30.0
"""Seconds between two attempts to connect, at most."""
HUB_TIMEOUT = 30.0
"""Seconds after which a hub that is away is given up, where all sites have to stay."""
ELASTIC_HUB_TIMEOUT = 24 * 3600.0
"""The same where training goes on without a site that leaves."""
_FIRST_PAUSE, _SHARE = 0.05, 0.1  # seconds; share of the outage


def longest_pause(outage: float) -> float:
    """Return the longest pause of a site between two attempts to connect.

    Args:
        outage: seconds since the hub was lost.
    """
    return min(LONGEST_PAUSE, max(_FIRST_PAUSE, _SHARE * outage))


def next_pause(outage: float) -> float:
    """Return the seconds until the next attempt to connect, at random, so that sites do not come all at once."""
    return longest_pause(outage) * random.uniform(0.5, 1.0)


def return_seconds(outage: float) -> float:
    """Return the seconds within which every site that can has connected again after an outage.

    Args:
        outage: its length in seconds.
    """
    # An attempt that has begun before the end may first have to fail.
    return longest_pause(outage) + min(2 * DIAL_SECONDS, max(_FIRST_PAUSE, outage))
