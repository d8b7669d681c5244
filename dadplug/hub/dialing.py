"""Start of a site's connection to the hub: TCP, TLS, the hub's verdict, `Hello` and the answer to it."""

from __future__ import annotations

import socket
import sys

from ..errors import RefusedError
from . import tls
from .actions import Refuse
from .frames import FrameError, Head, Hello, Kind, Welcome, pack_control, read_control
from .kits import Kit
from .loopback import connection_mark
from .receiver import FrameReceiver
from .secure_socket import SecureSocket


class TryAgainError(ConnectionError):
    """The hub refuses this site at present, and may accept it later."""


def dial_hub(kit: Kit, hello: Hello, address: tuple[str, int], seconds: float) -> tuple[SecureSocket, Welcome]:
    """Dial the hub once.

    Args:
        kit: kit of this site.
        hello: first message of this site; the version of dadplug and the connection's mark are filled in.
        address: host and port of the hub.
        seconds: time for each part.

    Returns:
        The connection, and the hub's answer.

    Raises:
        RefusedError: if the hub refuses this site for good.
        OSError: if the hub cannot be reached, or may accept this site later.
        FrameError: if the hub sends something that is no answer.
    """
    hello = hello._replace(release=sys.modules[__name__.partition(".")[0]].__version__)
    connection = tls.dial(kit, seconds, address)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mark = "" if kit.policy.encrypt_local else connection_mark(connection, dialled=True)
        connection.sendall(pack_control(hello._replace(mark=mark), kit.slot))
        answer = _read_answer(connection, len(kit.roster.sites))
        if isinstance(answer, Refuse):
            if answer.retry:
                raise TryAgainError(f"it refuses this site at present: {answer.reason}")
            raise RefusedError(f"the hub at {address[0]}:{address[1]} refuses {kit.name}: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise FrameError(f"{type(answer).__name__} where an answer to Hello is due")
        if answer.plain and not mark:
            raise FrameError("the hub goes on without encryption, which this site has not offered")
        if answer.plain:
            connection.stop_encrypting()
    except BaseException:
        connection.close()
        raise
    return connection, answer


def tell(hub: str, error: Exception) -> bool:
    """Print why a site has to dial again, where the hub has told it so; return whether it has.

    Args:
        hub: name of the hub.
        error: error of `dial_hub`.
    """
    if isinstance(error, TryAgainError):
        print(f"dadplug: {hub}: {error}", file=sys.stderr, flush=True)
    return isinstance(error, TryAgainError)


def _read_answer(connection: SecureSocket, world_size: int) -> object:
    def room(head: Head) -> memoryview:
        if head.kind is not Kind.CONTROL:
            raise FrameError(f"a {head.kind.name} frame where an answer to Hello is due")
        return memoryview(bytearray(head.length))

    receiver = FrameReceiver(connection, room)
    while receiver.receive() is None:
        pass
    return read_control(bytes(receiver.body), world_size)
