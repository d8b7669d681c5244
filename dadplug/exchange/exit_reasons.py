"""Announcement of the reason why this process exits, by every network that it takes part in."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

from ..errors import SiteError

Announcer = Callable[[str, bool], None]
"""Function that sends other processes the exit reason; takes it, and whether one that was sent before stays."""


class ClosesTransports(Protocol):
    """Object with transports to be closed at exit."""

    def close_transports(self) -> None:
        """Close the transports that are still open."""


ENDED = "it exited first. Unequal numbers of batches? Use reduction.join()"  # of a process without an error

_announcers: list[Announcer] = []
_watched: weakref.WeakSet[ClosesTransports] = weakref.WeakSet()


def add_announcer(announcer: Announcer) -> None:
    """Have a function called with this process's exit reason, from now on."""
    if announcer not in _announcers:
        _announcers.append(announcer)


def remove_announcer(announcer: Announcer) -> None:
    """Have a function called no longer."""
    if announcer in _announcers:
        _announcers.remove(announcer)


def announce(reason: str, unless_announced: bool = False) -> None:
    """Report this process's exit reason to all sites that it knows.

    Args:
        reason: the reason.
        unless_announced: keep a reason that has been reported before.
    """
    # A SiteError says less than the report of the lost site, which has been made before.
    keep = unless_announced or reason.startswith(SiteError.__name__)
    for announcer in list(_announcers):
        announcer(reason, keep)


def watch_exit(sites: ClosesTransports) -> None:
    """Register the report at exit: an uncaught exception, or the end of the program."""
    if not _watched:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
    _watched.add(sites)


def _at_exit() -> None:
    error = getattr(sys, "last_value", None)  # the uncaught exception, if any
    if error is not None:
        announce(describe(error))
    announce(ENDED, unless_announced=True)
    for sites in list(_watched):
        sites.close_transports()
    if dist.is_initialized():
        dist.destroy_process_group()


def describe(error: BaseException) -> str:
    """Return the type and text of an exception, as in the last line of a traceback."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
