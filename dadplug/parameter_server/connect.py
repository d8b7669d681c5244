"""Connections between the sites and the sequencer, each over one socket."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, NamedTuple

from ..exchange import Transport


class Connections(NamedTuple):
    """Connections of one site.

    Attributes:
        own: the socket to the sequencer.
        served: at the site that has the sequencer, its sockets by rank of the other end; else empty.
    """

    own: socket.socket
    served: dict[int, socket.socket]


def connect_star(transport: Transport, sequencer: int, timeout: float) -> Connections:
    """Connect each site with the one that has the sequencer; all sites must call it together.

    Args:
        transport: the transport, over which sites learn each other's addresses.
        sequencer: rank of that site.
        timeout: seconds that it may take.

    Raises:
        SiteError: if a site does not connect.
    """
    from ..adapm.connections import connect_sites  # loads the tables' kernels

    rank = transport.rank

    def name(peer: int) -> str:
        return transport.sites[peer]

    gather: Callable[[Any], list[Any]] = transport.gather_objects
    sockets: dict[int, socket.socket] = {}
    if transport.world_size > 1:
        sockets = dict(transport.open_streams(timeout) or connect_sites(rank, gather, timeout, name))
        transport.gather_objects(None)  # before it, nothing may be sent on a stream
    if rank != sequencer:
        for peer in [peer for peer in sockets if peer != sequencer]:
            sockets.pop(peer).close()
        return Connections(sockets[sequencer], {})
    inner, outer = socket.socketpair()
    return Connections(outer, {rank: inner} | sockets)
