"""A relay between sites and the hub that cuts connections after a number of bytes."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Sequence

_RESET = struct.pack("ii", 1, 0)


class CuttingProxy:
    """A relay that resets its connections, one after the other, after given numbers of bytes.

    Args:
        target: address to connect to.
        limits: bytes of both directions together after which each connection is cut; later ones are not.

    Attributes:
        address: address to dial.
        cuts: number of connections that were cut.
    """

    def __init__(self, target: tuple[str, int], limits: Sequence[int]) -> None:
        self._target, self._limits = target, list(limits)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.cuts = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near = self._listener.accept()[0]
                with near, socket.create_connection(self._target) as far:
                    self._pass_on(near, far, self._limits.pop(0) if self._limits else None)

    def _pass_on(self, near: socket.socket, far: socket.socket, limit: int | None) -> None:
        others = {near: far, far: near}
        with selectors.DefaultSelector() as selector:
            for each in others:
                selector.register(each, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    try:
                        content = source.recv(65536 if limit is None else min(65536, max(1, limit)))
                        others[source].sendall(content)
                    except OSError:
                        content = b""
                    if limit is not None:
                        limit -= len(content)
                    if not content:
                        return
                    if limit is not None and limit <= 0:
                        self.cuts += 1
                        for each in others:
                            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        return

    def close(self) -> None:
        """Accept no connection any more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
