"""Frames: the messages between a site and the sequencer."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """Kinds of frames."""

    CONTRIBUTION = 1
    """A contribution: from its site to the sequencer, and on to the other sites."""
    REACHED = 2
    """The version that a site goes on at."""
    FINISH = 3
    """A site has no further contribution in this phase; with its buffers, which are passed on."""
    DECISION = 4
    """An entry of the log; `number` is that of the epochs that have begun since the start of the training."""
    LEFT = 5
    """A site has left; the body is the reason."""
    ALIVE = 6
    """Heartbeat; that of the sequencer names the sites that it waits for."""
    BYE = 7
    """A site closes its connection; the body is the reason."""
    BEGIN = 8
    """A site begins an epoch: its number in the phase; its samples; the batches in `used`."""
    ORDER = 9
    """A digest of the order of the batches of an epoch at a site; `number` is the epoch since the start."""
    DRAW = 10
    """A site asks for a batch; `used` is 1 if it waits until there is one."""
    USED = 11
    """A site has used batches without a contribution."""
    PASSED = 12
    """A site has passed over all of its data."""
    DEAL = 13
    """Answer of the dealer; its kind is in `used`."""
    RETURNED = 14
    """A site is back; to that site: the place of the log that its state will belong to."""
    SNAPSHOT = 15
    """The state of a site, for one that returns, whose rank is `number`; without a body the request for it."""
    READY = 16
    """A site that returns has loaded the state; in the answer, `number` is that of its next contribution."""
    TRAINS = 17
    """A site has begun the steps of a phase, within which sites of a trainer may return."""
    EPOCHS = 18
    """A site has loaded a checkpoint; `number` is that of the epochs before it."""


class Frame(NamedTuple):
    """Message between a site and the sequencer.

    Attributes:
        kind: its kind.
        site: the site that it is from, or about.
        number: number of the contribution among those of its site.
        base: version that it was computed at.
        reached: version that the site goes on at.
        samples: samples that it stands for.
        used: number of dealt batches that it stands for.
        body: further content.
    """

    kind: Kind
    site: int = 0
    number: int = 0
    base: int = 0
    reached: int = 0
    samples: int = 0
    used: int = 0
    body: bytes | bytearray = b""
