"""Return of a site that was lost: the socket at which it asks, and its transport, which has the log alone."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SiteError
from ..exchange import Traffic, Transport, codec
from ..exchange.addresses import listen
from ..exchange.sites import Sites
from ..exchange.transport import Gather, Reduction
from .log import Log
from .options import ServerOptions

_HELLO = struct.Struct("<32sH")  # token, rank
_SIZE = struct.Struct("<I")
_MOST_NAMES = 1 << 24  # bytes
_HELLO_SECONDS = 5.0


class Listener:
    """Listening socket for sites that return, with a thread.

    Args:
        names: names of the sites, by rank.
        admit: called in the thread with the rank and the socket of a site that has the token.

    Attributes:
        address: ``HOST:PORT/TOKEN``; empty where no socket can listen.
    """

    def __init__(self, names: Sequence[str], admit: Callable[[int, socket.socket], None]) -> None:
        self._names = codec.encode(list(names))
        self._count = len(names)
        self._admit = admit
        self._token = secrets.token_hex(16)
        self._socket = listen()
        self.address = ""
        if self._socket is not None:
            host, port = self._socket.getsockname()[:2]
            self.address = f"{host}:{port}/{self._token}"
            threading.Thread(target=self._run, args=(self._socket,), name="dadplug-returning", daemon=True).start()

    def close(self) -> None:
        """Stop to listen."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
            self._socket.close()

    def _run(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            try:
                connected.settimeout(_HELLO_SECONDS)
                token, rank = _HELLO.unpack(_read(connected, _HELLO.size))
                if not hmac.compare_digest(token, self._token.encode()) or rank >= self._count:
                    raise ConnectionError("it is no site")
                connected.sendall(_SIZE.pack(len(self._names)) + self._names)
            except OSError:
                connected.close()
                continue
            self._admit(rank, connected)


class Returned(Sites):
    """Sites by name, for one that has returned and knows no more of them."""

    def of(self, ranks: Sequence[int]) -> Sites:
        raise RuntimeError(_ALONE)

    def found_lost(self) -> SiteError | None:
        return None

    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError:
        return SiteError(f"{self[peer or 0]} is gone: {error}")


_ALONE = "this site has returned into a training: only step() and finish() of the ParameterServer involve other sites"


class ReturnedTransport(Transport):
    """Transport of a site that has returned: it gets the state of another one, and has no connections but the log's.

    Args:
        sites: the sites by name.
        traffic: the meter.
        device: device of the model.
        timeout: seconds that a wait may take.
        log: the log.
    """

    is_direct = False
    joins = True

    def __init__(self, sites: Sites, traffic: Traffic, device: torch.device, timeout: float, log: Log) -> None:
        super().__init__(sites, traffic, sites.rank, device, timeout)
        self.log = log

    @classmethod
    def open(
        cls, address: str, model: nn.Module, limit: int, options: ServerOptions, traffic: Traffic
    ) -> ReturnedTransport:
        """Connect to a training; see `dial` for the address and the errors.

        Args:
            address: address of the training.
            model: the model.
            limit: bytes of the largest message.
            options: the options.
            traffic: the meter.
        """
        connected, sites = dial(address, options.timeout)
        log = Log(connected, 0, sites, limit, options.site_timeout, options.timeout, traffic, returns=True)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return cls(sites, traffic, device, options.timeout, log)

    def receive_state(self) -> Any:
        self.log.wait(lambda: self.log.snapshot is not None, entries=False)
        return codec.decode(self.log.snapshot or b"")

    def close(self) -> None:
        pass

    def gather(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        raise RuntimeError(_ALONE)

    def all_reduce(self, tensor: Tensor) -> Reduction:
        raise RuntimeError(_ALONE)

    def broadcast(self, tensor: Tensor) -> None:
        raise RuntimeError(_ALONE)

    def broadcast_bytes(self, content: bytes) -> bytes:
        raise RuntimeError(_ALONE)

    def gather_objects(self, item: Any) -> list[Any]:
        raise RuntimeError(_ALONE)

    def prefers_gather(self, nbytes: int) -> bool:
        return True


def dial(address: str, timeout: float) -> tuple[socket.socket, Returned]:
    """Connect to the site that has the sequencer.

    Args:
        address: `ParameterServer.return_address` of the process that this one replaces.
        timeout: seconds that it may take.

    Returns:
        The socket, and the sites by name.

    Raises:
        ValueError: if the address is none.
        SiteError: if the training cannot be reached.
    """
    try:
        place, token, rank = address.split("/")
        host, port = place.rsplit(":", 1)
        hello, number = _HELLO.pack(token.encode(), int(rank)), int(port)
    except (ValueError, struct.error) as error:
        raise ValueError(f"rejoin should be the return_address of a ParameterServer, got {address!r}") from error
    try:
        connected = socket.create_connection((host, number), timeout)
        connected.sendall(hello)
        (size,) = _SIZE.unpack(_read(connected, _SIZE.size))
        names = codec.decode(_read(connected, min(size, _MOST_NAMES)))
    except (OSError, codec.DamagedError) as error:
        raise SiteError(f"the training at {place} cannot be reached, it may have ended: {error}") from error
    return connected, Returned(int(rank), names)


def _read(connected: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = connected.recv(size - len(content))
        if not part:
            raise ConnectionError("the connection was closed")
        content += part
    return content
