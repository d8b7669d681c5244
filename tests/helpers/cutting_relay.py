"""Relay between a site and its hub that resets their connection after a number of bytes."""

from __future__ import annotations

import json
import selectors
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import hub_kits
from running_hub import RunningHub, running_hub
from support import free_port

_RESET = b"\1\0\0\0\0\0\0\0"  # SO_LINGER of 0 s


class CuttingRelay:
    """Relay of TCP connections on loopback; a context manager.

    Args:
        target: address of the hub.

    Attributes:
        address: address that the site connects to.
        counts: bytes that were passed on, from the site (0) and from the hub (1).
        cuts: connections that were reset.
        hold: whether bytes are held back, as on a dead link.
        refuse: whether new connections are reset at once.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.counts = [0, 0]
        self.cuts = 0
        self.hold = self.refuse = False
        self._cut_at: tuple[int, int] | None = None  # direction and count
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> CuttingRelay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join(200)
        for pair in self._pairs:
            for each in pair:
                each.close()
        self._listener.close()

    def cut_after(self, direction: int, nbytes: int) -> None:
        """Reset the connection once so many more bytes have been passed on in a direction."""
        self._cut_at = direction, self.counts[direction] + nbytes

    def cut(self, refuse: bool = False) -> None:
        """Reset the connections that are open, and refuse others from now on if asked."""
        self.refuse = self.refuse or refuse
        pairs, self._pairs = self._pairs, []
        self.cuts += len(pairs)
        for pair in pairs:
            for each in pair:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.close()

    def _run(self) -> None:
        while not self._ended:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                for pair in self._pairs:
                    for direction in (0, 1) if not self.hold else ():
                        with suppress(ValueError):  # another thread has cut it
                            selector.register(pair[direction], selectors.EVENT_READ, (direction, pair))
                for key, _ in selector.select(0.02):
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        with suppress(OSError):  # another pair may have been cut meanwhile
                            self._pass_on(*key.data)

    def _accept(self) -> None:
        site, _ = self._listener.accept()
        if self.refuse:
            site.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            site.close()
        else:
            self._pairs.append((site, socket.create_connection(self._target)))

    def _pass_on(self, direction: int, pair: tuple[socket.socket, socket.socket]) -> None:
        if pair not in self._pairs:
            return
        limit = 1 << 16
        if self._cut_at is not None and self._cut_at[0] == direction:
            limit = max(0, min(limit, self._cut_at[1] - self.counts[direction]))
        content = pair[direction].recv(limit) if limit else b""
        pair[1 - direction].sendall(content)
        self.counts[direction] += len(content)
        if self._cut_at is not None and self.counts[self._cut_at[0]] >= self._cut_at[1]:
            self._cut_at = None
            self.cut()
        elif not content and limit:
            self._pairs.remove(pair)
            for each in pair:
                each.close()


def goes_by_way_of(relay: CuttingRelay, kit: Path) -> None:
    """Let a site dial a relay in place of the hub."""
    roster = json.loads((kit / "roster.json").read_text())
    roster["hub"] = f"127.0.0.1:{relay.address[1]}"
    (kit / "roster.json").write_text(json.dumps(roster))


@contextmanager
def relayed_hub(folder: Path, names: Sequence[str], sealed: bool = False, **settings: object) -> Iterator[RunningHub]:
    """Run a hub that each site reaches by a relay of its own; they are its attribute `relays`.

    Args:
        folder: folder for the kits.
        names: names of the sites.
        sealed: whether their messages are sealed.
        settings: of the hub.
    """
    with ExitStack() as opened:
        if sealed:
            address = f"127.0.0.1:{free_port()}"
            hub_kits.make(folder / "kits", hub=address, hub_names=[], sites=list(names), sealed=True, hub_at=None)
        hub = opened.enter_context(running_hub(folder / "kits", tuple(names), **settings))
        hub.relays = [opened.enter_context(CuttingRelay(hub.address)) for _ in names]
        for name, relay in zip(names, hub.relays, strict=True):
            goes_by_way_of(relay, hub.kits / name)
        yield hub
