"""Return of a site that was lost: the socket at which it asks, and its transport, which has the log alone."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import DamagedError, SiteError
from ..exchange import Traffic, Transport, codec
from ..exchange.failure_reports import PeerNames
from ..exchange.handshake import listen
from ..exchange.transport import Gather, PendingSum, StreamToHub
from ..hub.blocking import read_exactly, write_all
from ..methods import check_allowed
from .holder import Holder, at_site
from .hub_client import HUB_PLACE, return_to_hub
from .log import Log
from .options import ServerOptions

if TYPE_CHECKING:
    from ..hub.tunnel import Tunnel

_HELLO = struct.Struct("<32sH")  # token, rank
_SIZE = struct.Struct("<I")
_MOST_NAMES = 1 << 24  # bytes
_HELLO_SECONDS, _ANSWER_SECONDS = 5.0, 30.0
KIT = "kit:"  # before the folder of the kit, in addresses over a hub


class Reception:
    """Reception of sites that return: it answers those that know the training's secret, each in a thread.

    Args:
        names: names of the sites, by rank.
        admit: called with the rank and the socket of such a site.

    Attributes:
        token: the secret.
    """

    def __init__(self, names: Sequence[str], admit: Callable[[int, socket.socket], None]) -> None:
        self.token = secrets.token_hex(16)
        self._names = codec.encode(list(names))
        self._count = len(names)
        self._admit = admit

    def take(self, rank: int | None, connected: socket.socket) -> None:
        """Answer a process that has connected; return at once.

        Args:
            rank: its rank, where its certificate has shown that; else None.
            connected: the socket.
        """
        threading.Thread(target=self._greet, args=(rank, connected), name="dadplug-greeting", daemon=True).start()

    def _greet(self, known: int | None, connected: socket.socket) -> None:
        try:
            connected.settimeout(_HELLO_SECONDS)
            token, rank = _HELLO.unpack(read_exactly(connected, _HELLO.size))
            is_site = rank < self._count and known in (None, rank)
            if not hmac.compare_digest(token, self.token.encode()) or not is_site:
                raise ConnectionError("it is no site")
            write_all(connected, _SIZE.pack(len(self._names)) + self._names)
        except OSError:
            connected.close()
            return
        self._admit(rank, connected)


class Listener:
    """Listening socket for sites that return, with a thread.

    Args:
        reception: takes their connections.

    Attributes:
        place: ``HOST:PORT``; empty where no socket can listen.
    """

    def __init__(self, reception: Reception) -> None:
        self._reception = reception
        self._socket = listen()
        self.place = ""
        if self._socket is not None:
            host, port = self._socket.getsockname()[:2]
            self.place = f"{host}:{port}"
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
            self._reception.take(None, connected)


class Returned(PeerNames):
    """Sites by name, for one that has returned and knows no more of them."""

    def of(self, ranks: Sequence[int]) -> PeerNames:
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

    def __init__(self, sites: PeerNames, traffic: Traffic, device: torch.device, timeout: float, log: Log) -> None:
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
        connected, sites, holder = dial(address, options.timeout)
        check_allowed(options.of_reduction())  # a kit restricts it
        log = Log(connected, holder, sites, limit, options.site_timeout, options.timeout, traffic, returns=True)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return cls(sites, traffic, device, options.timeout, log)

    def receive_state(self, most: int) -> Any:
        self.log.wait(lambda: self.log.snapshot is not None, entries=False)
        return codec.decode(self.log.snapshot or b"")

    def close(self) -> None:
        pass

    def gather(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        raise RuntimeError(_ALONE)

    def all_reduce(self, tensor: Tensor) -> PendingSum:
        raise RuntimeError(_ALONE)

    def broadcast(self, tensor: Tensor) -> None:
        raise RuntimeError(_ALONE)

    def broadcast_bytes(self, content: bytes) -> bytes:
        raise RuntimeError(_ALONE)

    def gather_objects(self, item: Any) -> list[Any]:
        raise RuntimeError(_ALONE)

    def prefers_gather(self, nbytes: int) -> bool:
        return True


def dial(address: str, timeout: float) -> tuple[socket.socket, Returned, Holder]:
    """Connect to the site that has the sequencer, directly or over the hub, or to the hub that has it.

    Args:
        address: `ParameterServer.return_address` of the process that this one replaces.
        timeout: seconds that it may take.

    Returns:
        The socket, the sites by name, and the holder of the sequencer.

    Raises:
        ValueError: if the address is none.
        KitError: if the kit that it names is incomplete or damaged, or not valid at present.
        RefusedError: if the hub refuses this site.
        SiteError: if the training cannot be reached.
    """
    try:
        place, token, rank = address.rsplit("/", 2)
        hello = _HELLO.pack(token.encode(), int(rank))
        over_hub = place.startswith((KIT, HUB_PLACE))
        host, port = ("", "0") if over_hub else place.rsplit(":", 1)
        number = int(port)
    except (ValueError, struct.error) as error:
        raise ValueError(f"rejoin should be the return_address of a ParameterServer, got {address!r}") from error
    try:
        if place.startswith(HUB_PLACE):
            stream = _dial_sequencer(place.removeprefix(HUB_PLACE), int(rank), timeout)
            holder, names = return_to_hub(stream, token, min(timeout, _ANSWER_SECONDS))
            return stream.connected, Returned(int(rank), names), holder
        if place.startswith(KIT):
            connected = _dial_hub(place.removeprefix(KIT), timeout).dial(0)
        else:
            connected = socket.create_connection((host, number), timeout)
        connected.settimeout(min(timeout, _ANSWER_SECONDS))
        write_all(connected, hello)
        (size,) = _SIZE.unpack(read_exactly(connected, _SIZE.size))
        names = codec.decode(read_exactly(connected, min(size, _MOST_NAMES)))
    except (OSError, DamagedError) as error:
        raise SiteError(f"the training at {place} cannot be reached, it may have ended: {error}") from error
    sites = Returned(int(rank), names)
    return connected, sites, at_site(sites, 0, timeout)


def _dial_sequencer(folder: str, rank: int, timeout: float) -> StreamToHub:
    """Open a stream to the hub, which has the sequencer."""
    from ..hub.tunnels import stream_to_hub

    tunnel = _dial_hub(folder, timeout)
    if tunnel.rank != rank:
        raise ValueError(
            f"rejoin is the return_address of site {rank}, and the kit {folder} that of site {tunnel.rank}"
        )
    return stream_to_hub(tunnel)


def _dial_hub(folder: str, timeout: float) -> Tunnel:
    """Dial the hub, and put the restrictions of this site's kit into force."""
    from ..hub import tunnels  # only hubs need what they import
    from ..hub.kits import Kit
    from ..hub.project import Restrictions, impose_restrictions

    kit = Kit.load(folder)
    kit.check_dates()
    impose_restrictions(Restrictions(kit.policy, kit.roster))
    return tunnels.open_alone(kit, timeout)
