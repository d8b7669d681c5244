"""Recognition of connections that stay inside one machine, whose messages need not be encrypted there.

Site and hub have proved by certificates who they are before they compare what each of them sees, over TLS. They share
the running kernel and its network namespace, and the connection has the same pair of addresses and ports at both ends.
A kernel has one connection with that pair. So nothing lies between the ends, neither a relay nor another machine.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
from pathlib import Path

from .secure_socket import SecureSocket

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # random, made when the kernel starts
_NAMESPACE = "/proc/self/ns/net"


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
