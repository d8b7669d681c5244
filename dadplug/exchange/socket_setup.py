"""Setup of connections between sites: each listens, sends its address to the others, and connects to lower ranks."""

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
from typing import cast

from .addresses import own_addresses
from .socket_transport import KERNEL_BYTES, PeerSockets
from .transport import Transport

_HELLO = struct.Struct("<16sI")  # the listener's token, the connecting site's rank
_BUFFER_BYTES = 4 << 20  # requested from the kernel for each direction
_CONNECT_SECONDS = 10.0  # for all sites to reach one another
_SWITCH = "DADPLUG_STREAMS"


def connect_sockets(transport: Transport) -> PeerSockets | None:
    """Connect all sites of a transport with one another; all of them must call it together.

    Returns:
        The connections; None on all sites if one of them cannot connect or has DADPLUG_STREAMS=0 in its environment.
        Messages are sent by gloo then.

    Raises:
        SiteError: if a site is gone.
    """
    listener = _listen() if os.environ.get(_SWITCH, "1") != "0" and hasattr(select, "poll") else None
    token = secrets.token_bytes(16)
    address = None if listener is None else (*listener.getsockname()[:2], token)
    addresses = transport.gather_objects(address)
    sockets: dict[int, socket.socket] = {}
    if listener is not None and all(addresses):
        try:
            sockets = _connect_all(transport, listener, addresses)
        except OSError:
            sockets = {}
    if listener is not None:
        listener.close()
    complete = len(sockets) == transport.world_size - 1
    if all(transport.gather_objects(complete)):
        return PeerSockets(transport, sockets)
    for connected in sockets.values():
        connected.close()
    return None


def _listen() -> socket.socket | None:
    """Open a socket on the address at which other sites reach this one; return None if there is none."""
    for address in own_addresses():
        try:
            listener = _large_socket(socket.AF_INET)
            listener.bind((address, 0))
            listener.listen(1024)
        except OSError:
            continue
        return listener
    return None


def _large_socket(family: socket.AddressFamily) -> socket.socket:
    """Make a socket with large buffers of fixed size; where the system grants less, leave their size to it."""
    sized = socket.socket(family)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with suppress(OSError):
            sized.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        if sized.getsockopt(socket.SOL_SOCKET, option) < KERNEL_BYTES:
            sized.close()
            return socket.socket(family)
    return sized


def _connect_all(
    transport: Transport, listener: socket.socket, addresses: Sequence[tuple[str, int, bytes]]
) -> dict[int, socket.socket]:
    """Connect to the sites of lower rank, and accept the connections of the others.

    Args:
        transport: the transport.
        listener: this site's listening socket.
        addresses: host, port and token of every site, by rank.

    Returns:
        Connected sockets by rank; without those of sites that have not connected in time.

    Raises:
        OSError: if a site cannot be reached.
    """
    deadline = time.monotonic() + min(_CONNECT_SECONDS, transport.timeout)
    sockets: dict[int, socket.socket] = {}
    for rank in range(transport.rank):
        host, port, token = addresses[rank]
        connected = sockets[rank] = _large_socket(socket.AF_INET)
        connected.settimeout(max(0.1, deadline - time.monotonic()))
        connected.connect((host, port))
        connected.sendall(_HELLO.pack(token, transport.rank))
    expected = set(range(transport.rank + 1, transport.world_size))
    for rank, connected in _accept(listener, addresses[transport.rank][2], expected, deadline):
        sockets[rank] = connected
    return sockets


def _accept(
    listener: socket.socket, token: bytes, expected: set[int], deadline: float
) -> Iterator[tuple[int, socket.socket]]:
    """Yield the connections of the expected sites; connections of others are closed without a delay for the sites.

    Args:
        listener: the listening socket.
        token: what a site sends to prove that it belongs to the group.
        expected: ranks that are to connect; those that have are removed.
        deadline: end of the wait, by `time.monotonic`.
    """
    unknown: dict[socket.socket, bytearray] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while expected and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is listener:
                    with suppress(OSError):
                        connected, _ = listener.accept()
                        connected.setblocking(False)
                        unknown[connected] = bytearray()
                        selector.register(connected, selectors.EVENT_READ)
                    continue
                connected = cast(socket.socket, key.fileobj)
                if not _read_hello(connected, unknown[connected]):
                    continue
                selector.unregister(connected)
                hello = unknown.pop(connected)
                received, rank = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1)
                if rank in expected and secrets.compare_digest(received, token):
                    expected.remove(rank)
                    yield rank, connected
                else:
                    connected.close()
    for connected in unknown:
        connected.close()


def _read_hello(connected: socket.socket, hello: bytearray) -> bool:
    """Read from a new connection into `hello`; return whether it is complete, or the connection has ended."""
    try:
        received = connected.recv(_HELLO.size - len(hello))
    except BlockingIOError:
        return False
    except OSError:
        return True
    hello += received
    return not received or len(hello) == _HELLO.size
