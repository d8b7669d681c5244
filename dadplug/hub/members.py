"""Sites of a hub by name, with the reasons that the hub gives for those that are lost."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SiteError
from ..exchange.failure_reports import PeerNames, watch_exit
from .link import HubLink
from .tunnels import check_tunnel

_GRACE_SECONDS = 1.5  # for the hub's announcement of what a lost stream of the parameter manager is due to


class HubSites(PeerNames):
    """Sites at the other ends of a hub.

    Args:
        link: the link.
    """

    def __init__(self, link: HubLink) -> None:
        super().__init__(link.rank, link.names)
        self._link = link
        self._names = link.names  # to which those of further sites are appended
        watch_exit(self)

    def of(self, ranks: Sequence[int]) -> PeerNames:
        raise ValueError("the sites of a hub form one group: there are no subgroups of them")

    def found_lost(self) -> SiteError | None:
        return self._link.first_lost()

    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError:
        if isinstance(error, SiteError):
            return error
        try:
            found = self._link.await_loss(_GRACE_SECONDS)
            check_tunnel(self._link)
        except SiteError as failure:  # of the connection to the hub
            return failure
        if found is not None:
            return found
        who = "one of the other sites" if peer is None else self[peer]
        if isinstance(error, TimeoutError):
            return SiteError(
                f"{who} has not answered for {timeout:g} s, though the hub is connected to it: it is stopped or busy. "
                "A site that may be this slow needs a larger timeout="
            )
        return SiteError(f"{who} is gone: {error}")
