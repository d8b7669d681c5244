"""Processes of all sites by name, where sites have several, and why one is lost."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SiteError
from ..exchange.failure_reports import PeerNames, watch_exit
from ..exchange.topology import Nodes
from .local_site import LocalProcesses
from .members import HubSites


class SiteMembers(PeerNames):
    """Processes of all sites.

    Args:
        names: names of the sites, by slot.
        nodes: ranks of the processes of each site.
        hub: the sites as the connection to the hub knows them; None at a process that is not its site's leader.
        local: processes of this site; None if it has one.
    """

    def __init__(self, names: Sequence[str], nodes: Nodes, hub: HubSites | None, local: LocalProcesses | None) -> None:
        super().__init__(
            nodes.own[nodes.index],
            [
                f"{name}, process {index}"
                for name, ranks in zip(names, nodes.members, strict=True)
                for index in range(len(ranks))
            ],
        )
        self._sites = list(names)
        self._nodes = nodes
        self._hub = hub
        self._local = local
        watch_exit(self)

    def __getitem__(self, rank: int) -> str:
        slot = next(slot for slot, ranks in enumerate(self._nodes.members) if rank in ranks)
        site = f"site {slot} ({self._sites[slot]})"
        ranks = self._nodes.members[slot]
        return site if len(ranks) == 1 else f"process {ranks.index(rank)} of {site}"

    def of(self, ranks: Sequence[int]) -> PeerNames:
        raise ValueError("the sites of a hub form one group: there are no subgroups of them")

    def found_lost(self) -> SiteError | None:
        # A site that has left may have sent all that is waited for: the wait for the hub itself finds what is missing.
        return None if self._local is None else self._local.found_lost()

    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError:
        if isinstance(error, SiteError):
            return error
        own = self._nodes.own
        if self._local is not None and (peer is None or peer in own):
            return self._local.lost(error, timeout, None if peer is None else own.index(peer))
        if self._hub is not None:
            return self._hub.lost(error, timeout)
        assert self._local is not None
        return self._local.lost(error, timeout, 0)  # what comes from other sites comes by way of the leader
