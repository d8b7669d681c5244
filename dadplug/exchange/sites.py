"""Who takes part, and why somebody left: errors between sites that name the site."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ..errors import SiteError

_GRACE = 1.5  # seconds that a site waits for the others' last words before it says who is gone
_LOST = "lost:"


class Sites:
    """The sites of a process group, by name, with a board on the group's store for their last words.

    A connection that closes tells neither which site is at fault (another may have left because of it) nor why. So a
    site that ends writes why before its connections close, and a site that finds a connection closed reads it.

    Args:
        rank: this site.
        names: one name a site, by rank.
        store: where the board is; None keeps none.
    """

    def __init__(self, rank: int, names: Sequence[str], store: dist.Store | None) -> None:
        self.rank = rank
        self.names = list(names)
        self._store = store
        self._announced = self._found_lost = False
        self._transports: weakref.WeakSet[Any] = weakref.WeakSet()
        if store is not None:
            _watch_exit(self)

    @staticmethod
    def own_name() -> str:
        """Names this process for the other sites: host and process id."""
        return f"{socket.gethostname()}, pid {os.getpid()}"

    def __getitem__(self, rank: int) -> str:
        return f"site {rank} ({self.names[rank]})"

    def announce(self, words: str, *, unless_announced: bool = False) -> None:
        """Writes this site's last words.

        Args:
            words: why this site ends.
            unless_announced: keep what has been announced before.
        """
        # The error that a survivor raises says less than whom it has lost.
        keep = unless_announced or words.startswith(SiteError.__name__)
        if self._store is None or (keep and self._announced):
            return
        self._announced = True
        with suppress(Exception):  # the store's host may be the one that is gone
            self._store.set(str(self.rank), words)

    def found_lost(self) -> SiteError | None:
        """Tells of a site that another one has found lost, without waiting."""
        try:
            spoken = [rank for rank in range(len(self.names)) if rank != self.rank and self._has_spoken(rank)]
            words = {rank: self._store.get(str(rank)).decode() for rank in spoken} if self._store is not None else {}
        except Exception:  # the store's host may be the one that is gone
            return None
        for found in words.values():
            culprit = int(found.removeprefix(_LOST)) if found.startswith(_LOST) else -1
            if culprit not in (-1, self.rank):
                reason = words.get(culprit, _LOST)
                told = "another site has lost the connection to it, or has waited for it in vain"
                return self._blame(culprit, told if reason.startswith(_LOST) else reason)
        return None

    def _has_spoken(self, rank: int) -> bool:
        return self._store is not None and self._store.check([str(rank)])

    def linger(self) -> None:
        """Keeps the board up for a short while if a site has been lost, so that all can read which."""
        deadline = time.monotonic() + _GRACE
        with suppress(Exception):
            while self._found_lost and self.rank == 0 and time.monotonic() < deadline:
                if all(self._has_spoken(rank) for rank in range(len(self.names))):
                    break
                time.sleep(0.05)

    def watch(self, transport: Any) -> None:
        """Has a transport closed when the process ends: its threads abort an interpreter that ends before them."""
        self._transports.add(transport)

    def close_transports(self) -> None:
        """Closes what is still open."""
        for transport in list(self._transports):
            transport.close()

    def withdraw(self) -> None:
        """Takes words back that were not the last: this site begins something new."""
        if self._store is not None and self._announced:
            self._announced = False
            with suppress(Exception):
                self._store.delete_key(str(self.rank))

    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError:
        """Turns a transport's error into one that names the site that is gone, and says why if it said so.

        Args:
            error: what the transport raised.
            timeout: seconds after which a silent site counts as lost.
            peer: the site on the other end of the connection, where it is known.
        """
        self._found_lost = True
        others = [rank for rank in range(len(self.names)) if rank != self.rank]
        if "imed out" in str(error):
            self.announce(f"{_LOST}{-1 if peer is None else peer}", unless_announced=True)
            who = self[peer] if peer is not None else self[others[0]] if len(others) == 1 else "one of the other sites"
            return SiteError(
                f"{who} has not answered for {timeout:g} s. Is it stuck, or is the network between the sites down? "
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
        suspect = peer if peer in silent else silent[0] if len(silent) == 1 else None
        if suspect is None:
            self.announce(f"{_LOST}-1", unless_announced=True)
            names = ", ".join(self[rank] for rank in silent or others)
            return SiteError(f"the connection to another site is gone; one of these ended: {names}")
        return self._blame(suspect, None)

    def _blame(self, rank: int, reason: str | None) -> SiteError:
        self._found_lost = True
        self.announce(f"{_LOST}{rank}", unless_announced=True)
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
                    if rank not in words and self._has_spoken(rank):
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
        atexit.register(_at_exit)
    _watched.add(sites)


def _at_exit() -> None:
    error = getattr(sys, "last_value", None)  # what the interpreter has reported as uncaught
    if error is not None:
        announce(describe(error))
    announce("its program ended, while others were still at work", unless_announced=True)
    for sites in list(_watched):
        sites.linger()
        sites.close_transports()
    if dist.is_initialized():
        dist.destroy_process_group()


def describe(error: BaseException) -> str:
    """Return the type and text of an exception, as the last line of a traceback has them."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def announce(words: str, unless_announced: bool = False) -> None:
    """Writes this process's last words to all sites that it knows."""
    for sites in list(_watched):
        sites.announce(words, unless_announced=unless_announced)


_of_default_group: tuple[object, Sites] | None = None


def introduce(group: dist.ProcessGroup, timeout: float) -> Sites:
    """Learns the names of the sites of a process group; all of them must call it together.

    Args:
        group: the process group.
        timeout: seconds after which a silent site counts as lost.

    Raises:
        SiteError: if a site ends or does not answer.
    """
    global _of_default_group
    is_default = group is dist.group.WORLD
    if is_default and _of_default_group is not None and _of_default_group[0] is group:
        _of_default_group[1].withdraw()
        return _of_default_group[1]
    ranks = dist.get_process_group_ranks(group)
    store = dist.distributed_c10d._get_default_store()
    board = dist.PrefixStore(f"dadplug/last-words/{'-'.join(map(str, ranks))}", store)
    unknown = [f"rank {rank} of the process group" for rank in ranks]
    names: list[Any] = [None] * len(ranks)
    try:
        dist.all_gather_object(names, Sites.own_name(), group=group)
    except RuntimeError as error:
        raise Sites(dist.get_rank(group), unknown, board).lost(error, timeout) from error
    sites = Sites(dist.get_rank(group), names, board)
    if is_default:
        _of_default_group = group, sites
    return sites
