"""Setup of connections between sites: each listens, sends its address to the others, and connects to lower ranks.

Processes of a node connect by Unix sockets where the system has abstract names for them, as Linux does: those take
about half of the processor time of TCP on the loopback interface.
"""

from __future__ import annotations

import os
import secrets
import select
import selectors
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, cast

from .addresses import own_addresses
from .socket_transport import KERNEL_BYTES
from .transport import Transport

_HELLO = struct.Struct("<16sI")  # the listener's token, the connecting site's rank
_BUFFER_BYTES = 4 << 20  # requested from the kernel for each direction
_CONNECT_SECONDS = 10.0  # for all sites to reach one another
_SWITCH = "DADPLUG_STREAMS"


class _Address(NamedTuple):
    """Address of a listening site.

    Attributes:
        host: IPv4 address.
        port: TCP port.
        token: what a site that connects sends to prove that it belongs to the group.
        name: abstract name of a Unix socket; empty where it has none.
    """

    host: str
    port: int
    token: bytes
    name: bytes


def connect_sockets(transport: Transport, near: Collection[int] = ()) -> dict[int, socket.socket] | None:
    """Connect all sites of a transport with one another; all of them must call it together.

    Args:
        transport: the transport.
        near: ranks that may be reached by Unix sockets, where that is possible.

    Returns:
        Connected sockets by rank; None on all sites if one of them cannot connect or has DADPLUG_STREAMS=0 in its
        environment. Messages are sent by gloo then.

    Raises:
        SiteError: if a site is gone.
    """
    listener = _listen() if os.environ.get(_SWITCH, "1") != "0" and hasattr(select, "poll") else None
    listeners = [] if listener is None else [listener, *(_listen_near() if near else ())]
    address = None
    if listener is not None:
        name = listeners[1].getsockname() if len(listeners) > 1 else b""
        host, port = listener.getsockname()[:2]
        address = _Address(host, port, secrets.token_bytes(16), name)
    addresses = transport.gather_objects(address and tuple(address))
    sockets: dict[int, socket.socket] = {}
    if listeners and all(addresses):
        try:
            sockets = _connect_all(transport, listeners, [_Address(*each) for each in addresses], near)
        except OSError:
            sockets = {}
    for each in listeners:
        each.close()
    complete = len(sockets) == transport.world_size - 1
    if all(transport.gather_objects(complete)):
        return sockets
    for connected in sockets.values():
        connected.close()
    return None


def _listen() -> socket.socket | None:
    """Open a socket on the address at which other sites reach this one; return None if there is none."""
    for address in own_addresses():
        try:
            listener = large_socket(socket.AF_INET)
            listener.bind((address, 0))
            listener.listen(1024)
        except OSError:
            continue
        return listener
    return None


def _listen_near() -> list[socket.socket]:
    """Open a Unix socket with an abstract name, which is gone with the socket; return none where there are none."""
    if sys.platform != "linux":
        return []
    listener = large_socket(socket.AF_UNIX)
    try:
        listener.bind(b"\0dadplug-" + secrets.token_hex(16).encode())
        listener.listen(1024)
    except OSError:
        listener.close()
        return []
    return [listener]


def large_socket(family: socket.AddressFamily) -> socket.socket:
    """Make a socket with large buffers of fixed size; where TCP is granted less, leave their size to the system.

    The system lets them grow with a long link's round trip, unless a program has set their size.
    """
    sized = socket.socket(family)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with suppress(OSError):
            sized.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        if family == socket.AF_INET and sized.getsockopt(socket.SOL_SOCKET, option) < KERNEL_BYTES:
            sized.close()
            return socket.socket(family)
    return sized


def _connect_all(
    transport: Transport, listeners: Sequence[socket.socket], addresses: Sequence[_Address], near: Collection[int]
) -> dict[int, socket.socket]:
    """Connect to the sites of lower rank, and accept the connections of the others.

    Args:
        transport: the transport.
        listeners: this site's listening sockets.
        addresses: address of every site, by rank.
        near: ranks that may be reached by Unix sockets.

    Returns:
        Connected sockets by rank; without those of sites that have not connected in time.

    Raises:
        OSError: if a site cannot be reached.
    """
    deadline = time.monotonic() + min(_CONNECT_SECONDS, transport.timeout)
    sockets: dict[int, socket.socket] = {}
    for rank in range(transport.rank):
        connected = _connect(addresses[rank], rank in near, deadline)
        sockets[rank] = connected
        connected.sendall(_HELLO.pack(addresses[rank].token, transport.rank))
    expected = set(range(transport.rank + 1, transport.world_size))
    for rank, connected in _accept(listeners, addresses[transport.rank].token, expected, deadline):
        sockets[rank] = connected
    return sockets


def _connect(address: _Address, is_near: bool, deadline: float) -> socket.socket:
    """Connect to a listening site, by TCP where its Unix socket cannot be reached: it may be in another container."""
    if is_near and address.name:
        connected = large_socket(socket.AF_UNIX)
        with suppress(OSError):
            connected.settimeout(max(0.1, deadline - time.monotonic()))
            connected.connect(address.name)
            return connected
        connected.close()
    connected = large_socket(socket.AF_INET)
    connected.settimeout(max(0.1, deadline - time.monotonic()))
    try:
        connected.connect((address.host, address.port))
    except OSError:
        connected.close()
        raise
    return connected


def _accept(
    listeners: Sequence[socket.socket], token: bytes, expected: set[int], deadline: float
) -> Iterator[tuple[int, socket.socket]]:
    """Yield the connections of the expected sites; connections of others are closed without a delay for the sites.

    Args:
        listeners: the listening sockets.
        token: what a site sends to prove that it belongs to the group.
        expected: ranks that are to connect; those that have are removed.
        deadline: end of the wait, by `time.monotonic`.
    """
    unknown: dict[socket.socket, bytearray] = {}
    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        while expected and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj in listeners:
                    with suppress(OSError):
                        connected, _ = cast(socket.socket, key.fileobj).accept()
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
