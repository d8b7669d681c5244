"""Start of a site's connection to the hub: TCP, TLS, the hub's verdict, `Hello` and the answer to it."""

from __future__ import annotations

import select
import socket
import sys
import time
from contextlib import ExitStack, closing

from ..errors import FrameError, RefusedError, TryAgainError
from . import tls
from .actions import Refuse
from .frames import Head, Hello, Kind, Welcome, pack_control, read_control
from .kits import Kit
from .loopback import LocalDoor, open_door
from .receiver import FrameReceiver
from .secure_socket import SecureSocket


def dial_hub(kit: Kit, hello: Hello, address: tuple[str, int], seconds: float) -> tuple[SecureSocket, Welcome]:
    """Dial the hub once.

    Args:
        kit: kit of this site.
        hello: first message of this site; what it says of dadplug's version and of this machine is filled in.
        address: host and port of the hub.
        seconds: time for each part.

    Returns:
        The connection, and the hub's answer.

    Raises:
        RefusedError: if the hub refuses this site for good.
        OSError: if the hub cannot be reached, or may accept this site later.
        FrameError: if the hub sends something that is no answer.
    """
    release = sys.modules[__name__.partition(".")[0]].__version__
    hello = hello._replace(release=release, sites=hello.sites or len(kit.roster.sites))
    connection = tls.dial(kit, seconds, address)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with ExitStack() as opened:
            door = None if kit.policy.encrypt_local else open_door(connection)
            if door is not None:
                opened.enter_context(closing(door))
                hello = hello._replace(mark=door.mark, place=door.place, secret=door.secret)
            return connection, introduce(connection, kit, hello, address, seconds, door)
    except BaseException:
        connection.close()
        raise


def introduce(
    connection: SecureSocket,
    kit: Kit,
    hello: Hello,
    address: tuple[str, int],
    seconds: float,
    door: LocalDoor | None = None,
) -> Welcome:
    """Send the first message, and return the hub's answer.

    Args:
        connection: the connection, which the hub has accepted.
        kit: kit of this site.
        hello: the message.
        address: host and port of the hub, for messages.
        seconds: time for the answer.
        door: where a hub in this machine gives its answer.

    Raises:
        RefusedError: if the hub refuses this site for good.
        OSError: if the connection is lost, or the hub may accept this site later.
        FrameError: if the hub sends something that is no answer.
    """
    connection.sendall(pack_control(hello, kit.slot))
    answer = _read_answer(connection, door, len(kit.roster.sites), seconds)
    if isinstance(answer, Refuse):
        if answer.retry:
            raise TryAgainError(f"it refuses this site at present: {answer.reason}")
        raise RefusedError(f"the hub at {address[0]}:{address[1]} refuses {kit.name}: {answer.reason}")
    if not isinstance(answer, Welcome):
        raise FrameError(f"{type(answer).__name__} where an answer to Hello is due")
    return answer


def tell(hub: str, error: Exception) -> bool:
    """Print why a site has to dial again, where the hub has told it so; return whether it has.

    Args:
        hub: name of the hub.
        error: error of `dial_hub`.
    """
    if isinstance(error, TryAgainError):
        print(f"dadplug: {hub}: {error}", file=sys.stderr, flush=True)
    return isinstance(error, TryAgainError)


def _read_answer(connection: SecureSocket, door: LocalDoor | None, world_size: int, seconds: float) -> object:
    def room(head: Head) -> memoryview:
        if head.kind is not Kind.CONTROL:
            raise FrameError(f"a {head.kind.name} frame where an answer to Hello is due")
        return memoryview(bytearray(head.length))

    receiver = FrameReceiver(connection, room)
    deadline, timeout = time.monotonic() + seconds, connection.gettimeout()
    connection.setblocking(False)
    while receiver.receive() is None:
        ends: list[SecureSocket | LocalDoor] = [connection] if door is None else [connection, door]
        ready = select.select(ends, [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready:
            raise TimeoutError(f"it has not answered for {seconds:g} s")
        if door in ready and door is not None and (local := door.accept()) is not None:
            connection.continue_over(local)
            door = None
    connection.settimeout(timeout)
    return read_control(bytes(receiver.body), world_size)
