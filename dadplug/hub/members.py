"""Sites of a hub by name, with the reasons that the hub gives for those that are lost."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SiteError
from ..exchange.exit_reasons import watch_exit
from ..exchange.sites import Sites
from .link import HubLink


class HubSites(Sites):
    """Sites at the other ends of a hub.

    Args:
        link: the link.
    """

    def __init__(self, link: HubLink) -> None:
        super().__init__(link.rank, link.names)
        self._link = link
        watch_exit(self)

    def of(self, ranks: Sequence[int]) -> Sites:
        raise ValueError("the sites of a hub form one group: there are no subgroups of them")

    def found_lost(self) -> SiteError | None:
        return self._link.first_lost()

    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError:
        return error if isinstance(error, SiteError) else self._link.first_lost() or SiteError(str(error))
