"""Dialers, by which a process without a process group opens a stream to the hub of a training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..support.registry import Registry

if TYPE_CHECKING:
    from .transport import StreamToHub

DIALERS: Registry[str, Callable[[str, float], tuple[int, StreamToHub]]] = Registry("network")
"""Functions by name of the network; they take an address in it and seconds, and return the rank of the site, too."""
