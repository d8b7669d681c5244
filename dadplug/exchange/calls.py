"""How sites come to have streams: each listens, tells the others where, and calls those of lower rank."""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from .rendezvous import address_of, interface_in_use
from .streams import ENOUGH, Streams

if TYPE_CHECKING:
    from .transport import Transport

_HELLO = struct.Struct("<16sI")  # the listener's token, the caller's rank
_BUFFER = 4 << 20  # bytes asked of the kernel for each direction
_OPENING = 10.0  # seconds for all sites to reach one another
_SWITCH = "DADPLUG_STREAMS"


def open_streams(transport: Transport) -> Streams | None:
    """Connects all sites of a transport with one another; all of them must call it together.

    Returns:
        The streams; None, on all sites alike, where some site cannot or does not want to: messages go by gloo then.

    Raises:
        SiteError: if a site is gone.
    """
    listener = _listen() if os.environ.get(_SWITCH, "1") != "0" and hasattr(select, "poll") else None
    token = secrets.token_bytes(16)
    place = None if listener is None else (*listener.getsockname()[:2], token)
    places = transport.gather_objects(place)
    sockets: dict[int, socket.socket] = {}
    if listener is not None and all(places):
        try:
            sockets = _meet(transport, listener, places)
        except OSError:
            sockets = {}
    if listener is not None:
        listener.close()
    complete = len(sockets) == transport.world_size - 1
    if all(transport.gather_objects(complete)):
        return Streams(transport, sockets)
    for connected in sockets.values():
        connected.close()
    return None


def _listen() -> socket.socket | None:
    """Opens a socket on the address under which other sites are to find this one."""
    for address in _addresses():
        try:
            listener = _sized(socket.AF_INET)
            listener.bind((address, 0))
            listener.listen(1024)
        except OSError:
            continue
        return listener
    return None


def _addresses() -> list[str]:
    """Own addresses that others may reach, the likeliest first: those that gloo would take."""
    found = []
    interface = interface_in_use()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            address = address_of(probe, interface)
            return [address] if address else []
        with suppress(OSError, KeyError):
            probe.connect((socket.gethostbyname(os.environ["MASTER_ADDR"]), 9))
            found.append(probe.getsockname()[0])
    with suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return [*found, "127.0.0.1"]


def _sized(family: socket.AddressFamily) -> socket.socket:
    """Makes a socket with large buffers, where the system grants them; else it fits them to the traffic itself."""
    sized = socket.socket(family)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with suppress(OSError):
            sized.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        if sized.getsockopt(socket.SOL_SOCKET, option) < ENOUGH:
            sized.close()
            return socket.socket(family)
    return sized


def _meet(
    transport: Transport, listener: socket.socket, places: Sequence[tuple[str, int, bytes]]
) -> dict[int, socket.socket]:
    """Calls the sites of lower rank, and waits for the calls of the others."""
    deadline = time.monotonic() + min(_OPENING, transport.timeout)
    sockets: dict[int, socket.socket] = {}
    for rank in range(transport.rank):
        host, port, token = places[rank]
        caller = sockets[rank] = _sized(socket.AF_INET)
        caller.settimeout(max(0.1, deadline - time.monotonic()))
        caller.connect((host, port))
        caller.sendall(_HELLO.pack(token, transport.rank))
    expected = set(range(transport.rank + 1, transport.world_size))
    while expected and time.monotonic() < deadline:
        listener.settimeout(max(0.1, deadline - time.monotonic()))
        caller, _ = listener.accept()
        caller.settimeout(1.0)
        try:
            token, rank = _HELLO.unpack(caller.recv(_HELLO.size, socket.MSG_WAITALL))
        except (OSError, struct.error):
            token, rank = b"", -1
        if rank in expected and secrets.compare_digest(token, places[transport.rank][2]):
            sockets[rank] = caller
            expected.remove(rank)
        else:  # a stranger
            caller.close()
    return sockets
