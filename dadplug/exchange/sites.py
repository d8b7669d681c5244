"""Interface between a transport and what is known of its sites: their names, and why one is lost."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..errors import SiteError
from .exit_reasons import announce


class Sites(ABC):
    """Sites of a group by name.

    Args:
        rank: this site.
        names: names of the sites for messages, by rank.

    Attributes:
        rank: this site.
    """

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self.rank = rank
        self._names = list(names)
        self._transports: weakref.WeakSet[Any] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._names)

    def name(self, rank: int) -> str:
        """Return the name of a site, without its number."""
        return self._names[rank]

    def __getitem__(self, rank: int) -> str:
        return f"site {rank} ({self._names[rank]})"

    def announce(self, reason: str) -> None:
        """Report this site's exit reason to all other sites."""
        announce(reason)

    def watch(self, transport: Any) -> None:
        """Close a transport when the process ends: its threads abort an interpreter that ends before them."""
        self._transports.add(transport)

    def close_transports(self) -> None:
        """Close the transports that are still open."""
        for transport in list(self._transports):
            transport.close()

    @abstractmethod
    def of(self, ranks: Sequence[int]) -> Sites:
        """Return the sites of a subgroup.

        Args:
            ranks: their ranks in this group.
        """

    @abstractmethod
    def found_lost(self) -> SiteError | None:
        """Return an error if it is known that another site is lost; send nothing."""

    @abstractmethod
    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError:
        """Convert a transport's error into one that names the site that is lost, with its exit reason if known.

        Args:
            error: what the transport raised.
            timeout: seconds after which a silent site counts as lost.
            peer: rank of the site at the other end of the connection, if known.
        """
