"""How sites come to have streams: each listens, tells the others where, and calls those of lower rank."""

from __future__ import annotations

import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from .addresses import own_addresses
from .socket_transport import ENOUGH, Streams

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
    for address in own_addresses():
        try:
            listener = _sized(socket.AF_INET)
            listener.bind((address, 0))
            listener.listen(1024)
        except OSError:
            continue
        return listener
    return None


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
    for rank, caller in _callers(listener, places[transport.rank][2], expected, deadline):
        sockets[rank] = caller
    return sockets


def _callers(
    listener: socket.socket, token: bytes, expected: set[int], deadline: float
) -> Iterator[tuple[int, socket.socket]]:
    """Wait for the calls of sites; other connections, which send something else or nothing, delay nobody."""
    unknown: dict[socket.socket, bytearray] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while expected and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is listener:
                    with suppress(OSError):
                        caller, _ = listener.accept()
                        caller.setblocking(False)
                        unknown[caller] = bytearray()
                        selector.register(caller, selectors.EVENT_READ)
                    continue
                caller = cast(socket.socket, key.fileobj)
                if not _hear(caller, unknown[caller]):
                    continue
                selector.unregister(caller)
                hello = unknown.pop(caller)
                said, rank = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1)
                if rank in expected and secrets.compare_digest(said, token):
                    expected.remove(rank)
                    yield rank, caller
                else:
                    caller.close()
    for caller in unknown:
        caller.close()


def _hear(caller: socket.socket, hello: bytearray) -> bool:
    """Read what a caller says; return whether it has said enough, or will say no more."""
    try:
        received = caller.recv(_HELLO.size - len(hello))
    except BlockingIOError:
        return False
    except OSError:
        return True
    hello += received
    return not received or len(hello) == _HELLO.size
