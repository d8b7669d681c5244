"""Place that has the sequencer: the hub, or a site; what its loss means to a site."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..errors import SiteError
from ..exchange.failure_reports import PeerNames

HUB = -1  # in place of a rank: the hub


class Holder(NamedTuple):
    """Place that has the sequencer.

    Attributes:
        rank: rank of the site; `HUB` for the hub.
        name: its name.
        lost: converts the error of the connection to it into one that says what was lost.
    """

    rank: int
    name: str
    lost: Callable[[Exception], SiteError]


def at_site(sites: PeerNames, rank: int, timeout: float) -> Holder:
    """Return the holder that is a site.

    Args:
        sites: the sites by name.
        rank: the site.
        timeout: seconds that a wait may take.
    """

    def lost(error: Exception) -> SiteError:
        found = sites.lost(error, timeout, rank)
        return SiteError(f"{found} (it has the sequencer, without which training cannot go on)")

    return Holder(rank, sites[rank], lost)


def at_hub(name: str, check: Callable[[], None]) -> Holder:
    """Return the holder that is the hub.

    Args:
        name: name of the hub.
        check: raises the error with which the connection to the hub has failed, if it has.
    """

    def lost(error: Exception) -> SiteError:
        try:
            check()
            found = f"{name} has ended the connection to its sequencer: {error}"
        except SiteError as failure:
            found = str(failure)
        return SiteError(
            f"{found} (the hub has the log of this training; if the hub was restarted, the log is lost: start all "
            "sites again from their last checkpoint)"
        )

    return Holder(HUB, name, lost)
