"""Connections between the sites and the sequencer, each over one socket."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from ..exchange import Traffic, Transport
from ..exchange.handshake import connect_sites
from ..model_sync.sameness import raise_problems
from .dealer import OwnDealer, SharedDealer
from .holder import at_site
from .hub_client import start_at_hub
from .log import Log
from .options import ServerOptions
from .returning import KIT, Listener, Reception
from .sequencer import Sequencer
from .service import SequencerService

_LEAST_LIMIT = 1 << 26  # bytes of a message that are possible in any case


class Connections(NamedTuple):
    """Connections of one site.

    Attributes:
        own: the socket to the sequencer.
        served: at the site that has the sequencer, its sockets by rank of the other end; else empty.
    """

    own: socket.socket
    served: dict[int, socket.socket]


def connect_star(transport: Transport, sequencer: int, timeout: float) -> Connections:
    """Connect each site with the one that has the sequencer; all sites must call it together.

    Args:
        transport: the transport, over which sites learn each other's addresses.
        sequencer: rank of that site.
        timeout: seconds that it may take.

    Raises:
        SiteError: if a site does not connect.
    """
    rank = transport.rank

    def name(peer: int) -> str:
        return transport.sites[peer]

    gather: Callable[[Any], list[Any]] = transport.gather_objects
    sockets: dict[int, socket.socket] = {}
    if transport.world_size > 1:
        sockets = dict(transport.open_streams(timeout) or connect_sites(rank, gather, timeout, name))
        transport.gather_objects(None)  # before it, nothing may be sent on a stream
    if rank != sequencer:
        for peer in [peer for peer in sockets if peer != sequencer]:
            sockets.pop(peer).close()
        return Connections(sockets[sequencer], {})
    inner, outer = socket.socketpair()
    return Connections(outer, {rank: inner} | sockets)


class Opened(NamedTuple):
    """Parts of a parameter server at one site.

    Attributes:
        log: the log.
        service: at the site that has the sequencer, its service; else None.
        address: address for sites that return, without the rank; empty where none can.
    """

    log: Log
    service: SequencerService | None
    address: str


def check_role(role: str, rejoin: str | None) -> None:
    """Raise ValueError for a role that there is not."""
    roles = ("worker", "server") if rejoin is None else ("worker",)
    if role not in roles:
        raise ValueError(f"unknown role {role!r}; valid ones are {', '.join(map(repr, roles))}")


def raise_problem(problem: str) -> None:
    """Raise ValueError if the arguments of a site that returns are not valid."""
    if problem:
        raise ValueError(problem)


def gather_workers(transport: Transport, role: str, quorum: int, problem: str) -> list[int]:
    """Return the ranks of the sites that contribute; all sites must call it together.

    Args:
        transport: the transport.
        role: role of this site.
        quorum: number of sites whose gradients make a commit.
        problem: what is wrong with this site's arguments; empty if nothing is.

    Raises:
        ValueError: on all sites, if something is wrong at one.
    """
    roles = transport.gather_objects(role)
    workers = [rank for rank, each in enumerate(roles) if each == "worker"]
    if not problem and not workers:
        problem = "no process has role='worker'"
    if not problem and quorum > len(workers):
        problem = f"quorum={quorum} needs as many sites, and there are {len(workers)}"
    raise_problems(problem, transport)
    return workers


def largest_message(model: nn.Module) -> int:
    """Return the number of bytes that a contribution, or the state of a site, may have at most."""
    return _LEAST_LIMIT + 16 * sum(each.numel() * each.element_size() for each in model.parameters())


def open_log(
    transport: Transport,
    options: ServerOptions,
    workers: Sequence[int],
    limit: int,
    traffic: Traffic,
    in_trainer: bool,
) -> Opened:
    """Start the sequencer, and connect this site to it; all sites must call it together.

    The hub has it where there is one that may read what sites send; else site 0.

    Args:
        transport: the transport.
        options: the options.
        workers: ranks of the sites that contribute.
        limit: bytes of the largest message.
        traffic: meter of sent bytes.
        in_trainer: whether sites return in the midst of a phase only.

    Raises:
        SiteError: if a site does not connect.
        ValueError: at all sites, if the hub does not start it.
    """
    times = options.site_timeout, options.timeout
    if (stream := transport.open_hub_stream(options.timeout)) is not None:
        own, holder, place = start_at_hub(transport, stream, options, workers, limit, in_trainer)
        return Opened(Log(own, holder, transport.sites, limit, *times, traffic), None, place)
    own, served = connect_star(transport, 0, options.timeout)
    service, address = None, ("", "")
    if served:
        shared = options.deal == "shared"
        dealer = SharedDealer(workers, in_trainer) if shared else OwnDealer(workers)
        sequencer = Sequencer(workers, options.rules, balanced=not shared)
        service = SequencerService(
            served, workers, sequencer, dealer, limit, options.site_timeout, traffic, transport.rank, in_trainer
        )
        address = _receive_returning(transport, service, options.timeout)
    place, token = transport.gather_objects(address)[0]
    place = f"{KIT}{transport.dialed_by}" if transport.dialed_by else place
    holder = at_site(transport.sites, 0, options.timeout)
    log = Log(own, holder, transport.sites, limit, *times, traffic, delayed=service.is_blocked if service else None)
    return Opened(log, service, f"{place}/{token}" if token else "")


def _receive_returning(transport: Transport, service: SequencerService, timeout: float) -> tuple[str, str]:
    """Receive sites that return, from now on, at the site that has the sequencer.

    Returns:
        Host and port, where they dial this site itself; and their secret, empty where none can return.
    """
    reception = Reception([transport.sites.name(rank) for rank in range(transport.world_size)], service.admit)
    if transport.accept_streams(reception.take, timeout):
        return "", reception.token
    if not transport.is_direct or transport.world_size == 1:
        return "", ""
    service.listener = Listener(reception)
    return service.listener.place, reception.token if service.listener.place else ""
