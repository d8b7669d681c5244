"""Dialers, by which a process without a process group reaches a training over a network of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ..support.registry import Registry

if TYPE_CHECKING:
    from .transport import StreamToHub


class Dialled(Protocol):
    """Connection of a process that belongs to no process group.

    Attributes:
        rank: rank of its site.
    """

    rank: int

    def dial(self, slot: int) -> socket.socket:
        """Open a stream to the site of a rank."""

    def dial_hub(self) -> StreamToHub:
        """Open a stream to the hub itself."""


DIALERS: Registry[str, Callable[[str, float], Dialled]] = Registry("network")
"""Functions that connect, by name of the network; they take an address in it, and seconds."""
