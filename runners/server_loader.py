"""Loader of the batches that a site is dealt by a parameter server, inside of a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..parameter_server import ParameterServer
from ..parameter_server.dealing import count_batches
from .delegating_loader import DelegatingLoader

NO_ACCUMULATION = "deal='shared' cannot accumulate gradients: a site does not know how many batches it will have"


class ServerLoader(DelegatingLoader):
    """Loader of the batches that this site is dealt of a data set that all sites have.

    Its length is the number of batches of an epoch, of all sites together: each site takes part in so many steps of a
    trainer, and makes those for which it has a batch.

    Args:
        loader: the DataLoader.
        server: returns the server; called once a pass begins.
        pads: whether the loader goes on up to its length with batches that are not to be trained on.
        first: returns the number of steps that a pass leaves out, at a site that returns; called once a pass begins.

    Attributes:
        deals: whether the last batch that was taken is to be trained on.
        running: whether a pass has begun and batches are left in it.

    Raises:
        TypeError: if it is no DataLoader.
        ValueError: if its batches cannot be dealt.
    """

    _OWN = (*DelegatingLoader._OWN, "_server", "_dealt", "_pads", "_first", "_batches", "deals", "running")

    def __init__(
        self, loader: Any, server: Callable[[], ParameterServer], pads: bool, first: Callable[[], int] = int
    ) -> None:
        super().__init__(loader)
        self._batches = count_batches(loader)
        self._server, self._pads, self._first = server, pads, first
        self._dealt: Any = None
        self.deals = self.running = False

    @property
    def unused(self) -> bool:
        """Whether no pass has begun so far."""
        return self._dealt is None

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        if self._dealt is None:
            self._dealt = self._server().loader(self._loader)
        sites = len(self._server().present_sites)
        if self._pads and self._batches < sites:  # metrics of an epoch are those of sites with batches
            raise ValueError(
                f"deal='shared' needs a batch for each of the {sites} sites, and there are {self._batches}"
            )
        batch: Any = ()
        count, self.deals, self.running = self._first(), True, True
        for batch in self._dealt:
            count += 1
            yield batch
        self.deals = self.running = False
        for _ in range(self._batches - count if self._pads else 0):
            yield batch
