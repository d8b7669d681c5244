"""Who takes part, and why somebody left: errors between sites that name the site."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from dadplug.errors import SiteError

_GRACE = 1.5  # seconds that a site waits for the others' last words before it says who is gone
_LOST = "lost:"


class Sites:
    """The sites of a process group, by name, with a board on the group's store for their last words.

    A connection that closes tells neither which site is at fault (another may have left because of it) nor why. So a
    site that ends writes why before its connections close, and a site that finds a connection closed reads it.

    Args:
        rank: this site.
        names: one name a site, by rank.
        store: the store of the process group; None keeps no board.
        timeout: seconds after which a silent site counts as lost.

    Attributes:
        at_exit: what to call when the process ends.
    """

    def __init__(self, rank: int, names: Sequence[str], store: dist.Store | None, timeout: float) -> None:
        self.rank = rank
        self.names = list(names)
        self.timeout = timeout
        self._store = store
        self._announced = False
        self.at_exit: list[Callable[[], None]] = []
        if store is not None:
            _watch_exit(self)

    @staticmethod
    def own_name() -> str:
        """Names this process for the other sites: host and process id."""
        return f"{socket.gethostname()}, pid {os.getpid()}"

    def __getitem__(self, rank: int) -> str:
        return f"site {rank} ({self.names[rank]})"

    def announce(self, words: str) -> None:
        """Writes this site's last words; the first ones stand."""
        if self._store is None or self._announced:
            return
        self._announced = True
        try:
            self._store.set(str(self.rank), words)
        except Exception:
            pass

    def close(self) -> None:
        """Ends the watch: what happens to this process from now on concerns no other site."""
        self._announced = True

    def lost(self, error: BaseException, peer: int | None = None) -> SiteError:
        """Turns a transport's error into one that names the site that is gone, and says why if it said so.

        Args:
            error: what the transport raised.
            peer: the site on the other end of the connection, where it is known.
        """
        others = [rank for rank in range(len(self.names)) if rank != self.rank]
        if "imed out" in str(error):
            self.announce(f"{_LOST}{-1 if peer is None else peer}")
            who = self[peer] if peer is not None else self[others[0]] if len(others) == 1 else "one of the other sites"
            return SiteError(
                f"{who} has not answered for {self.timeout:g} s. Is it stuck, or is the network between the sites down? "
                "A site that may be this slow needs a larger timeout=."
            )
        words = self._last_words(others, peer)
        for rank, reason in words.items():
            if not reason.startswith(_LOST):
                return self._blame(rank, reason)
        for reason in words.values():  # what another survivor found out
            culprit = int(reason.removeprefix(_LOST))
            if culprit not in (-1, self.rank):
                return self._blame(culprit, None)
        silent = [rank for rank in others if rank not in words]
        culprit = peer if peer in silent else silent[0] if len(silent) == 1 else None
        self.announce(f"{_LOST}{-1 if culprit is None else culprit}")
        if culprit is None:
            names = ", ".join(self[rank] for rank in silent or others)
            return SiteError(f"the connection to another site is gone; one of these ended: {names}")
        return self._blame(culprit, None)

    def _blame(self, rank: int, reason: str | None) -> SiteError:
        self.announce(f"{_LOST}{rank}")
        if reason is None:
            reason = "the connection closed without a word: it was killed, or its machine or link went down"
        return SiteError(f"{self[rank]} is gone: {reason}")

    def _last_words(self, others: list[int], peer: int | None) -> dict[int, str]:
        """Reads the board until the site in question, or all but one, have spoken, for a short while at most."""
        deadline = time.monotonic() + _GRACE
        words: dict[int, str] = {}
        while self._store is not None:
            try:
                for rank in others:
                    if rank not in words and self._store.check([str(rank)]):
                        words[rank] = self._store.get(str(rank)).decode()
            except Exception:
                return words
            if len(words) == len(others) or peer in words or len(others) == 1 or time.monotonic() > deadline:
                return words
            time.sleep(0.05)
        return words


_watched: weakref.WeakSet[Sites] = weakref.WeakSet()


def _watch_exit(sites: Sites) -> None:
    """Has this process say why it ends: an uncaught exception, or the end of its program."""
    if not _watched:
        previous = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
            _announce_all(f"{kind.__name__}: {error}" if str(error) else kind.__name__)
            previous(kind, error, traceback)

        sys.excepthook = excepthook
        atexit.register(_at_exit)
    _watched.add(sites)


def _at_exit() -> None:
    _announce_all("its program ended while this site was still training")
    for sites in list(_watched):
        for close in sites.at_exit:
            close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _announce_all(words: str) -> None:
    for sites in list(_watched):
        sites.announce(words)
