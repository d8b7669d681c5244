"""Control messages by which sites and a hub that has been restarted go on with a run, see `dadplug.hub.recovery`."""

from __future__ import annotations

from typing import NamedTuple

from .actions import Position


class Report(NamedTuple):
    """Report of a site on a run that the hub does not know.

    Attributes:
        run: number of the run, the life of the hub at which it has started.
        position: the last round that has been closed for this site.
        before: the round before it.
        contributors: slots of the contributors of the last closed round.
        joined: slots of those of them that had joined in it, and do not count.
        gone: slots of the sites that take no part in the open round, as far as this site knows.
        received: number of frames in the last closed round, by slot of their sender.
        arrived: the same for the open round.
        listens: whether this site has joined in the open round.
        min_sites: number of sites that are required; 0 where all have to stay.
        timeout_ms: milliseconds of silence after which a site counts as lost; 0 where all have to stay.
        skips: as in `dadplug.exchange.transport.Requirements`, like the next.
        patience_percent: time after which a site is late.
    """

    run: int
    position: Position
    before: Position
    contributors: tuple[int, ...]
    joined: tuple[int, ...]
    gone: tuple[int, ...]
    received: tuple[int, ...]
    arrived: tuple[int, ...]
    listens: bool
    min_sites: int
    timeout_ms: int
    skips: bool
    patience_percent: int


class Repeat(NamedTuple):
    """Request to send the frames of the last closed round again, for sites that the close has not reached.

    Attributes:
        position: the round.
    """

    position: Position


class Continue(NamedTuple):
    """Announcement that the run goes on: all send the frames of the open round again.

    Attributes:
        life: number of this life of the hub, which closes the rounds from now on.
        position: the last closed round.
    """

    life: int
    position: Position
