"""Connections that stay inside one machine: their messages pass through a Unix socket, without encryption.

Site and hub have proved by certificates who they are before they compare what each of them sees, over TLS. They share
the running kernel and its network namespace, and the connection has the same pair of addresses and ports at both ends.
A kernel has one connection with that pair. So nothing lies between the ends, neither a relay nor another machine. The
hub then dials a Unix socket of the site, whose name and secret the site has sent over TLS, and answers there. Messages
in it belong to no network interface, where packets could be captured.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import sys
from pathlib import Path

from .frames import Hello
from .secure_socket import SecureSocket

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # random, made when the kernel starts
_NAMESPACE = "/proc/self/ns/net"
_PREFIX = "\0dadplug-"  # of names of sockets
_SECRET_BYTES = 32
_SECRET_SECONDS = 0.5  # until the secret has arrived, which the hub sends at once


def connection_mark(connection: SecureSocket, dialled: bool) -> str:
    """Return a digest of kernel, network namespace and addresses of a connection, the same at both ends of a local one.

    Args:
        connection: the connection.
        dialled: whether this end has dialled.

    Returns:
        The digest; empty where the system does not tell, or the connection is lost.
    """
    if sys.platform != "linux":
        return ""
    try:
        ends = connection.addresses()
        seen = (_BOOT.read_text().strip(), os.readlink(_NAMESPACE), *(ends if dialled else reversed(ends)))
    except OSError:
        return ""
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def is_local(connection: SecureSocket, mark: str) -> bool:
    """Return whether both ends of a connection are in one machine and network namespace, with nothing in between.

    Args:
        connection: the connection, at the end that was dialled.
        mark: result of `connection_mark` at the other end.
    """
    own = connection_mark(connection, dialled=False) if mark else ""
    return bool(own) and hmac.compare_digest(own.encode(), mark.encode())


class LocalDoor:
    """Unix socket at which a site waits for the answer of a hub in the same machine. To be closed.

    Its name is an abstract one: it belongs to the network namespace, and leaves no file.

    Args:
        mark: result of `connection_mark`.

    Attributes:
        mark: the same.
        place: name of the socket.
        secret: what the hub, which gets to know it over TLS, has to send first.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.place, self.secret = (secrets.token_hex(_SECRET_BYTES // 2) for _ in range(2))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(_PREFIX + self.place)
        self._listener.listen()

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._listener.fileno()

    def accept(self) -> socket.socket | None:
        """Return the hub's connection if it has arrived; others are closed."""
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return None
            connected.settimeout(_SECRET_SECONDS)
            try:
                found = connected.recv(_SECRET_BYTES)
            except OSError:
                found = b""
            if hmac.compare_digest(found, self.secret.encode()):
                return connected
            connected.close()

    def close(self) -> None:
        """Close the socket."""
        self._listener.close()


def open_door(connection: SecureSocket) -> LocalDoor | None:
    """Return a socket for a hub that may be in the same machine; None where that cannot be.

    Args:
        connection: the connection to the hub, at the end that has dialled.
    """
    mark = connection_mark(connection, dialled=True)
    try:
        here, there = connection.addresses()
        return LocalDoor(mark) if mark and here[0] == there[0] else None
    except OSError:
        return None


def dial_back(connection: SecureSocket, hello: Hello) -> socket.socket | None:
    """Return a connection to the Unix socket of a site in the same machine; None where there is none.

    Args:
        connection: the connection from the site, at the hub.
        hello: the site's first message.
    """
    if not hello.place or not is_local(connection, hello.mark):
        return None
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    local.setblocking(False)
    try:
        local.connect(_PREFIX + hello.place)
        local.send(hello.secret.encode())
    except OSError:
        local.close()
        return None
    return local
