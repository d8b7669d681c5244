"""Sites without a model that load a hub: they send payloads in each round, and receive those of the others."""

from __future__ import annotations

import itertools
import os
import select
import time
from pathlib import Path

from dadplug.errors import RefusedError
from dadplug.hub.pki.kits import Kit
from dadplug.hub.secure import tls
from dadplug.hub.secure.secure_socket import SecureSocket
from dadplug.hub.site.connection import introduce
from dadplug.hub.wire.messages import (
    FRESH,
    VERSION,
    Close,
    Head,
    Hello,
    Kind,
    Leave,
    Start,
    frames,
    pack_control,
    read_control,
)
from dadplug.hub.wire.streams import NumberedStream, Stream

_INSTANCES = itertools.count(1)
SECONDS = 60.0


class LoadSite(NumberedStream):
    """One site, over TLS also in the hub's machine.

    Attributes:
        connection: the encrypted connection.
        closed: the last round that the hub has closed.
        started: whether training has started.
        nbytes: bytes of payloads that have arrived.
    """

    def __init__(self, kit: Kit) -> None:
        super().__init__(kit.slot)
        self._world_size = len(kit.roster.sites)
        self.connection = _connected(kit)
        self.take_over(Stream(self.connection), lambda head: memoryview(bytearray(head.length)))
        self.closed, self.started, self.nbytes = 0, False, 0

    def fileno(self) -> int:
        return self.connection.fileno()

    def begin(self, step: int, content: memoryview) -> None:
        """Send a payload, and the end of a round."""
        for packed, body in frames(Head(Kind.PAYLOAD, self.slot, step=step), content):
            self.send(packed + bytes(body))
        self.send(Head(Kind.END, self.slot, step=step).pack())

    def leave(self) -> None:
        """Say that training is complete."""
        self.send(pack_control(Leave(""), self.slot))

    def advance(self) -> None:
        """Send and receive what is possible."""
        assert self.stream is not None
        self.blocked = not self.stream.flush(self.queue)
        while (head := self.next_frame()) is not None:
            self.count(head.length)
            if head.kind is Kind.CONTROL:
                message = read_control(bytes(self._receiver.body), self._world_size)
                if isinstance(message, Close):
                    self.closed = message.step
                self.started |= isinstance(message, Start)
            elif head.kind is Kind.PAYLOAD:
                self.nbytes += head.length


def _connected(kit: Kit) -> SecureSocket:
    """Connect a site to its hub; the hub of a busy machine may give the handshake up."""
    hello = Hello(VERSION, next(_INSTANCES), FRESH, "training")
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            connection = tls.dial(kit, SECONDS)
            introduce(connection, kit, hello, kit.roster.address(), SECONDS)
        except RefusedError:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return connection


def advance(sites: list[LoadSite], done: object) -> None:
    """Let sites get on until a condition of theirs is true."""
    deadline = time.monotonic() + 10 * SECONDS
    while not done():  # type: ignore[operator]
        for site in sites:
            site.advance()
        select.select(sites, [each for each in sites if each.blocked], [], 0.5)
        for site in sites:
            site.ping()
        if time.monotonic() > deadline:
            raise TimeoutError("the hub does not get on")


def usage(pid: int) -> tuple[float, float]:
    """Return the seconds of processor time that a process has used, and its memory in MB."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    memory = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(memory) / 1e3
