"""Kits in temporary folders, and connections between a hub and a site over loopback."""

import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dadplug.errors import RefusedError
from dadplug.hub import Project
from dadplug.hub.pki import provision
from dadplug.hub.pki.kits import Kit
from dadplug.hub.secure import tls
from dadplug.hub.secure.secure_socket import SecureSocket
from dadplug.hub.server.acceptor import ClosingConnection, PendingConnection

TIMEOUT = 60.0
PUBLIC = {"ca.pem", "certificate.pem", "revoked.pem", "roster.json"}
PROJECT = {
    "name": "study",
    "hub": "hub.example.org:8470",
    "hub_names": ["127.0.0.1"],
    "sites": ["a", "b"],
    "hub_at": "a",
}


def make(out: Path, now: Any = None, **entries: Any) -> Path:
    """Make kits in a folder and return it; entries of the project that are None are left out."""
    project = {name: value for name, value in (PROJECT | entries).items() if value is not None}
    provision.provision(Project.parse(project), out, now)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder, hidden ones included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def attempt(function: Callable[[], Any]) -> Any:
    """Return what a function returns or raises."""
    try:
        return function()
    except Exception as error:
        return error


def meet(hub: Kit, client: Callable[[tuple[str, int]], Any]) -> tuple[Any, Any]:
    """Connect a client to a hub in a thread, and return what each of them gets or raises.

    Args:
        hub: the hub's kit.
        client: function of the hub's address.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT)
        results: list[Any] = []

        def serve() -> Any:
            connection, _ = server.accept()
            return accept(connection, hub)

        thread = threading.Thread(target=lambda: results.append(attempt(serve)))
        thread.start()
        answer = attempt(lambda: client(server.getsockname()))
        thread.join(3 * TIMEOUT)
    assert results, "the hub has not come to an end"
    return results[0], answer


def accept(connection: socket.socket, kit: Kit) -> tuple[SecureSocket, str]:
    """Take the hub's part in the start of a connection, until it has accepted the site or refused it.

    Args:
        connection: an accepted connection.
        kit: the hub's kit.
    """
    pending = PendingConnection(connection, "", tls.hub_context(kit), kit, time.monotonic())
    try:
        while not pending.name:
            select.select([pending.connection], [pending.connection] if pending.writing else [], [], TIMEOUT)
            pending.advance(time.monotonic())
    except (RefusedError, OSError):
        closing = ClosingConnection(pending.detach(), time.monotonic())
        while time.monotonic() < closing.deadline and not closing.drain():
            time.sleep(0.01)
        closing.connection.close()
        raise
    pending.connection.settimeout(TIMEOUT)
    return pending.connection, pending.name


def dial(kit: Kit) -> Callable[[tuple[str, int]], SecureSocket]:
    """Return a client that connects with a site's kit."""
    return lambda address: tls.dial(kit, TIMEOUT, address)


def connects(kits: Path, name: str = "a") -> bool:
    """Return whether the hub accepts a site, both with the kits of a folder."""
    hub, site = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / name)))
    if isinstance(site, Exception):
        return False
    with hub[0], site:
        return hub[1] == name
