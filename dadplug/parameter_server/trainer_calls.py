"""Calls of trainers: those that a parameter server answers without doing anything, and a check."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from ..errors import SiteError
from ..exchange import Transport
from .log import Log


class TrainerCalls:
    """Calls that trainers make around a backward pass; `step` sends the gradients later."""

    _log: Log
    _transport: Transport

    def require_all(self) -> None:
        """Check that no site has left: trainers exchange metrics at the end of an epoch, for which they need all.

        Raises:
            SiteError: if one has left, with its name and the reason.
        """
        for site, reason in list(self._log.left.items()):
            raise SiteError(f"{self._transport.sites[site]} is gone, and epochs of a trainer need all sites: {reason}")

    @property
    def syncing(self) -> bool:
        """Always False: `synchronize` is not due after a backward pass."""
        return False

    def synchronize(self) -> None:
        """Do nothing: `step` sends the gradients. For trainers that call it after each backward pass."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return an empty context: gradients accumulate until `step` in any case."""
        return nullcontext()
