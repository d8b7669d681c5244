"""Codes of the parameter manager: states of keys, placement techniques, and the fields of synchronisation messages.

Kernels use the plain integers below, which numba compiles into them; all other code uses the enumerations.
"""

from __future__ import annotations

from enum import IntEnum


class KeyState(IntEnum):
    """State of a key at a site, see `dadplug.adapm.rows`."""

    FREE = 0
    OWNED = 1
    REQUESTED = 2
    REPLICA = 3


class Technique(IntEnum):
    """Response of an owner to an intent of another site."""

    RELOCATE_OR_REPLICATE = 0
    REPLICATE = 1
    RELOCATE = 2
    STAY = 3


class InFlight(IntEnum):
    """Synchronisation of a replica that is in flight; OUTDATED is a bit that makes the reply's value be ignored."""

    IDLE = 0
    ASKED = 1
    LEAVING = 2
    OUTDATED = 4


class SyncCode(IntEnum):
    """Reply of a site to a replica's SYNC; AWAY marks a key that another site owns."""

    SAME = 0
    VALUE = 1
    DROPPED = 2
    MOVED = 3
    AWAY = 4


class ReplicaFlag(IntEnum):
    """Bits of a replica in a SYNC: it has an unsent delta (DIRTY); it leaves (DROP)."""

    DIRTY = 1
    DROP = 2


FREE, OWNED, REQUESTED, REPLICA = (state.value for state in KeyState)
RELOCATE_OR_REPLICATE, REPLICATE, RELOCATE, STAY = (technique.value for technique in Technique)
IDLE, ASKED, LEAVING, OUTDATED = (state.value for state in InFlight)
SAME, VALUE, DROPPED, MOVED, AWAY = (code.value for code in SyncCode)
DIRTY, DROP = (flag.value for flag in ReplicaFlag)
