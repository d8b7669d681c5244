"""Start of the process group at a meeting point, with errors that name missing sites."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..errors import SiteError
from ..logs import Troubles, get_logger
from .addresses import choose_interface, explain_unresolved, gloo_interface
from .deadline import check_seconds, within
from .membership import ProcessSites, introduce_default, own_member
from .roll_call import RollCall, plural
from .status import Member

_log = get_logger(__name__)
DEFAULT_TIMEOUT = 300.0  # seconds
_SLACK = 1.0  # seconds for a call to raise its own error


def connect(
    rank: int | None = None,
    num_nodes: int | None = None,
    dist_url: str | None = None,
    *,
    backend: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> None:
    """Join the other sites: start the default process group of torch.distributed.

    Without arguments, the environment that torchrun sets is read (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Nothing
    is done if it names no other site, or if a group exists already.

    Args:
        rank: number of this site, from 0; site 0 hosts the meeting point.
        num_nodes: number of sites.
        dist_url: the meeting point, ``tcp://HOST:PORT``, an address of site 0 that all sites reach.
        backend: ``"gloo"`` (CPU, and GPUs across sites), ``"nccl"`` (GPUs in one place); chosen by device if None.
        timeout: seconds to wait for all sites.

    Raises:
        ValueError: if an argument is out of its range or missing.
        SiteError: if a site does not come in time, two claim one rank, or the port is taken.
    """
    if dist.is_initialized():
        return
    if num_nodes is None and rank is None and dist_url is None and int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return
    rank, num_nodes, host, port = _meeting_point(rank, num_nodes, dist_url)
    check_seconds("timeout", timeout)
    backend = _backend(backend)
    choose_interface(host, port)
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and dist_url is None
    store, members = meet(rank, num_nodes, (host, port), timeout, own_member(), by_torchrun)
    sites = ProcessSites(rank, members)
    limit = timedelta(seconds=timeout)
    # A store that torchrun keeps over a restart holds the addresses of processes that have ended.
    prefixed = dist.PrefixStore(f"dadplug/group/{members[0].token.hex()}", store)

    def start() -> None:
        with gloo_interface():
            dist.init_process_group(backend, store=prefixed, rank=rank, world_size=num_nodes, timeout=limit)
            if backend == "gloo":
                dist.barrier()  # else site 0 may end, with the store, while others still read from it

    try:
        within(timeout, start)
    except (RuntimeError, TimeoutError) as error:
        raise sites.lost(error, timeout) from error
    introduce_default(sites)
    names = ", ".join(f"site {each}: {member.name}" for each, member in enumerate(members))
    _log.info("connected as site %d of %d (%s); site 0 is at %s:%d", rank, num_nodes, names, host, port)


def meet(
    rank: int, count: int, address: tuple[str, int], timeout: float, own: Member, by_torchrun: bool, noun: str = "site"
) -> tuple[dist.Store, list[Member]]:
    """Wait until all processes have come to a meeting point.

    Args:
        rank: number of this process; number 0 hosts the meeting point, unless torchrun does.
        count: number of processes.
        address: host and port of the meeting point.
        timeout: seconds to wait.
        own: this process, as the others are to know it.
        by_torchrun: whether torchrun hosts the meeting point.
        noun: name of a process in messages.

    Returns:
        The store at the meeting point, and the processes by number.

    Raises:
        SiteError: if a process does not come in time, two claim one number, or the port is taken.
    """
    deadline = time.monotonic() + timeout
    if by_torchrun:
        owner = "the meeting point of torchrun"
        store = _within(timeout, owner, lambda: next(rendezvous("env://", timeout=timedelta(seconds=timeout)))[0])
    else:
        owner = f"{noun} 0, which hosts the meeting point,"
        store = _within(timeout, owner, lambda: _open_store(*address, rank, timeout, noun))
    return store, RollCall(store, rank, count, timeout, deadline, owner, own, noun).run()


def _meeting_point(rank: int | None, num_nodes: int | None, dist_url: str | None) -> tuple[int, int, str, int]:
    """Return rank, number of sites, host and port, from the arguments or from torchrun's environment.

    Raises:
        ValueError: if an argument is out of its range or missing.
    """
    if num_nodes is None and rank is None and dist_url is None:
        rank, num_nodes = _from_environment("RANK"), _from_environment("WORLD_SIZE")
        host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _from_environment("MASTER_PORT")
    elif rank is None or num_nodes is None or dist_url is None:
        raise ValueError("rank, num_nodes and dist_url go together: give all three, or none to use torchrun's")
    else:
        host, port = _parse(dist_url)
    for name, value in (("rank", rank), ("num_nodes", num_nodes)):
        if not isinstance(value, int):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
    if num_nodes < 1:
        raise ValueError(f"num_nodes must be at least 1, got {num_nodes}")
    if not 0 <= rank < num_nodes:
        raise ValueError(f"rank must lie in 0 to {num_nodes - 1} for {num_nodes} sites, got {rank}")
    return rank, num_nodes, host, port


def _within(timeout: float, owner: str, call: Callable[[], dist.Store]) -> dist.Store:
    try:
        return within(timeout + _SLACK, call)
    except TimeoutError as error:
        raise SiteError(f"{owner} has not answered for {timeout:g} s") from error


def _backend(backend: str | None) -> str:
    if backend is None:
        return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if backend not in ("gloo", "nccl", "mpi", "cpu:gloo,cuda:nccl"):
        raise ValueError(f"unknown backend {backend!r}; valid ones are gloo, nccl and mpi")
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise ValueError("backend 'nccl' needs CUDA GPUs and a build of torch with NCCL; use 'gloo' here")
    return backend


def _from_environment(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise ValueError(f"the environment variable {name} should be a number, it is {value!r}")
    return int(value)


def _parse(url: str) -> tuple[str, int]:
    try:
        parsed = urlparse(url)
        host, port = parsed.hostname, parsed.port
    except ValueError:
        host = port = None
    if not url.startswith("tcp://") or host is None or port is None:
        raise ValueError(f"the meeting point should read tcp://HOST:PORT, got {url!r}")
    return host, port


def _open_store(host: str, port: int, rank: int, timeout: float, noun: str) -> dist.Store:
    limit = timedelta(seconds=timeout)
    try:
        if rank != 0:
            _wait_for_host(host, port, timeout)
            return dist.TCPStore(host, port, None, False, limit, wait_for_workers=False)
        listener = _listen(host, port)  # torch's own listens on all interfaces
        store = dist.TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.fileno())
        listener.detach()  # it is the store's now
        return store
    except (RuntimeError, ValueError, OSError) as error:  # DistNetworkError and kin derive from RuntimeError
        if rank == 0 and getattr(error, "errno", None) == errno.EADDRINUSE:
            raise SiteError(
                f"port {port} is in use on this machine: another run may still be going on; end it, or choose another "
                f"port for all {plural(noun)}"
            ) from error
        if isinstance(error, socket.gaierror):
            place = "its meeting point" if rank == 0 else f"{noun} 0"
            raise SiteError(f"{noun} {rank} cannot find {place}: {explain_unresolved(host, error)}") from error
        if rank == 0:
            raise SiteError(
                f"{noun} 0 cannot open its meeting point {host}:{port}: the address must be one of this machine's own, "
                f"and reachable from the others ({_first_line(error)})"
            ) from error
        raise SiteError(
            f"{noun} {rank} did not reach {noun} 0 at {host}:{port} within {timeout:g} s: is it running, is the "
            "address right, and does a firewall let the port through?"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _wait_for_host(host: str, port: int, timeout: float) -> None:
    """Wait until the meeting point can be reached.

    Raises:
        OSError: if that takes too long.
    """
    deadline = time.monotonic() + timeout
    troubles = Troubles(_log)
    while True:
        try:
            socket.create_connection((host, port), max(0.1, deadline - time.monotonic())).close()
            troubles.end("unresolved", f"{host} resolves now")
            return
        except OSError as error:
            if isinstance(error, socket.gaierror):
                troubles.begin("unresolved", explain_unresolved(host, error))
                troubles.remind()
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _listen(host: str, port: int) -> socket.socket:
    """Open the meeting point on the one address that it names."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener
