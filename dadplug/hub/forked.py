"""End of connections in forked children, such as a loader's workers: they would hide the end of their parent."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class HasDescriptors(Protocol):
    """Connection whose descriptors a child has to close."""

    def close_descriptors(self) -> None:
        """Close the descriptors, without a lock and without a TLS closing alert."""


_open: weakref.WeakSet[HasDescriptors] = weakref.WeakSet()


def close_in_children(connection: HasDescriptors) -> None:
    """Close a connection in each child of this process that is forked from now on."""
    _open.add(connection)


def _close_in_child() -> None:
    for connection in list(_open):
        connection.close_descriptors()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
