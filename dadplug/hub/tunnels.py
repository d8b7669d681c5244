"""Tunnels of this process: one beside each training connection, and those of processes that take part in no run."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import TYPE_CHECKING

from ..exchange.transport import StreamToHub
from .peer_stream import HUB_SLOT
from .tunnel import Tunnel

if TYPE_CHECKING:
    from .kits import Kit
    from .link import HubLink

_tunnels: weakref.WeakKeyDictionary[HubLink, Tunnel] = weakref.WeakKeyDictionary()
_alone: list[Tunnel] = []  # of processes that take part in no run
_opening = threading.Lock()


def tunnel_of(link: HubLink, timeout: float) -> Tunnel:
    """Return the tunnel beside a site's training connection; it dials when first asked for.

    Args:
        link: the training connection.
        timeout: seconds to dial.

    Raises:
        RefusedError: if the hub refuses this site.
        SiteError: if the hub cannot be reached in time.
    """
    with _opening:
        tunnel = _tunnels.get(link)
        if tunnel is None or tunnel.closed:
            tunnel = Tunnel(link.kit, link.address, link.sealing.keys)
            tunnel.start(timeout)
            _tunnels[link] = tunnel
        return tunnel


def open_alone(kit: Kit, timeout: float) -> Tunnel:
    """Return the tunnel of a process that takes part in no run, as one that replaces a lost site; see `tunnel_of`."""
    with _opening:
        for tunnel in _alone:
            if tunnel.kit.certificate == kit.certificate and not tunnel.closed:
                return tunnel
        tunnel = Tunnel(kit)
        tunnel.start(timeout)
        _alone.append(tunnel)
        return tunnel


def stream_to_hub(tunnel: Tunnel) -> StreamToHub:
    """Open a stream to the hub itself."""
    return StreamToHub(tunnel.dial(HUB_SLOT), tunnel.hub, tunnel.check)


def check_tunnel(link: HubLink) -> None:
    """Raise the error with which the tunnel beside a training connection has failed, if it has.

    Raises:
        SiteError: see `dadplug.hub.connection.HubConnection.check`.
    """
    tunnel = _tunnels.get(link)
    if tunnel is not None:
        tunnel.check()


@atexit.register  # before any transport, whose last messages go first therefore
def _close_at_exit() -> None:
    for tunnel in [*_tunnels.values(), *_alone]:
        tunnel.close()
