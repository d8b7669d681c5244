"""Calls of trainers: those that a parameter server answers without doing anything, checks, and gathers over the log."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..errors import MismatchError, SiteError
from ..exchange import Transport
from ..exchange.codec import decode_objects, encode_object
from .frames import Kind
from .log import Commit, Log

_GATHERED = b"G"  # first byte of what a site sends for a gather; that of buffers is another one


class TrainerCalls:
    """Calls that trainers make around a backward pass; `step` sends the gradients later."""

    _log: Log
    _transport: Transport
    _in_trainer: bool
    _detached: bool
    _trains = False  # whether this site has made a step in the phase
    _started = False  # whether it has made any

    def _apply_arrived(self) -> Commit | None:
        raise NotImplementedError

    def require_all(self) -> None:
        """Check that no site has left: trainers exchange metrics at the end of an epoch, for which they need all.

        Raises:
            SiteError: if one has left, with its name and the reason.
        """
        for site, reason in list(self._log.left.items()):
            raise SiteError(f"{self._transport.sites[site]} is gone, and epochs of a trainer need all sites: {reason}")

    # Gathers over the log, between phases

    @property
    def gathers(self) -> bool:
        """Whether `gather_present` can be called: in a trainer, from the first step on."""
        return self._started and not self._detached

    def _begin_training(self) -> None:
        """Let sites return from now on until the end of the phase."""
        if self._in_trainer and not self._trains:
            self._trains = self._started = True
            self._log.send(Kind.TRAINS)

    def gather_present(self, item: Any) -> dict[int, Any]:
        """Gather an object from each site that has not left; all of them must call it at one place between phases.

        Args:
            item: what `dadplug.exchange.codec.encode` takes.

        Returns:
            The objects by rank, in ascending order; the same at all sites.

        Raises:
            TypeError: at all sites, if the object of one cannot be sent.
            MismatchError: if another site is at another place.
            SiteError: if the sequencer's site is gone, or another one does not call it within the timeout.
        """
        own, refusal = encode_object(item)
        self._log.finish(_GATHERED + own)
        while (end := self._apply_arrived()) is None:
            self._log.wait()
        for rank, body in end.ended.items():
            if not bytes(body[:1]) == _GATHERED:
                raise MismatchError(f"{self._transport.sites[rank]} is at another place: it has ended a phase of steps")
        bodies = [memoryview(body)[1:] for body in end.ended.values()]
        return dict(zip(end.ended, decode_objects(bodies, refusal), strict=True))

    # What needs nothing

    @property
    def syncing(self) -> bool:
        """Always False: `synchronize` is not due after a backward pass."""
        return False

    def synchronize(self) -> None:
        """Do nothing: `step` sends the gradients. For trainers that call it after each backward pass."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return an empty context: gradients accumulate until `step` in any case."""
        return nullcontext()
