"""Addresses of this host that other sites can reach, and the network interface that gloo uses."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

_INTERFACE = "GLOO_SOCKET_IFNAME"
_chosen: str | None = None  # towards the meeting point


def address_of(probe: socket.socket, interface: str) -> str | None:
    """Look up the IPv4 address of a network interface; None where it has none."""
    import fcntl

    request = struct.pack("256s", interface[:15].encode())
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
    except OSError:
        return None


def choose_interface(host: str, port: int) -> None:
    """Find the network interface that leads to the meeting point, for `gloo_interface` and `own_addresses`."""
    global _chosen
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(host), port))  # sends nothing; selects the route
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if address_of(probe, name) == address:
                _chosen = name


def interface_in_use() -> str:
    """Return the name of the interface that leads to the other sites: the user's choice first; empty if unknown."""
    return os.environ.get(_INTERFACE, "").split(",")[0] or _chosen or ""


@contextmanager
def gloo_interface() -> Iterator[None]:
    """Set gloo's interface for groups that are made inside, unless the user has set it; a context manager.

    By default gloo takes the interface that the host name resolves to, often loopback, and the sites cannot connect.
    """
    if _INTERFACE in os.environ or _chosen is None:
        yield
        return
    os.environ[_INTERFACE] = _chosen
    try:
        yield
    finally:
        os.environ.pop(_INTERFACE, None)


def own_addresses() -> list[str]:
    """Return addresses of this host that others may reach, the most likely first: those that gloo would take."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface_in_use():
            address = address_of(probe, interface_in_use())
            return [address] if address else []
        with suppress(OSError, KeyError):
            probe.connect((socket.gethostbyname(os.environ["MASTER_ADDR"]), 9))
            found.append(probe.getsockname()[0])
    with suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return [*found, "127.0.0.1"]


def listen(addresses: Sequence[str] = ()) -> socket.socket | None:
    """Open a listening socket; return None if no address allows it.

    Args:
        addresses: addresses of this machine, the first that allows it is used; by default those that others reach.
    """
    for address in addresses or own_addresses():
        listener = socket.socket(socket.AF_INET)
        try:
            listener.bind((address, 0))
            listener.listen(1024)
        except OSError:
            listener.close()
            continue
        return listener
    return None


def free_port() -> int:
    """Return a TCP port of this machine that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def explain_unresolved(host: str, error: OSError) -> str:
    """Return what it means that a name has not been resolved."""
    return f"the DNS name {host} does not resolve ({error.strerror or error}); is it right, and does DNS work here?"
