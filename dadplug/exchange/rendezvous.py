"""Where sites meet: the start of a process group, with errors that say who is missing."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from ..errors import SiteError
from .sites import Sites, introduce

DEFAULT_TIMEOUT = 300.0  # seconds
_INTERFACE = "GLOO_SOCKET_IFNAME"


def connect(
    rank: int | None = None,
    num_nodes: int | None = None,
    dist_url: str | None = None,
    *,
    backend: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> None:
    """Joins the other sites: starts torch.distributed's default process group.

    Without arguments it reads the environment that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); where
    that names no other site, and where a group exists already, it does nothing.

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
    if num_nodes is None and rank is None and dist_url is None:
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
            return
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun hosts the store itself
            dist.init_process_group(_backend(backend), timeout=timedelta(seconds=timeout))
            introduce(_world(), timeout)
            return
        rank, num_nodes = _from_environment("RANK"), _from_environment("WORLD_SIZE")
        host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _from_environment("MASTER_PORT")
    else:
        if rank is None or num_nodes is None or dist_url is None:
            raise ValueError("rank, num_nodes and dist_url go together: give all three, or none to use torchrun's")
        host, port = _parse(dist_url)
    if num_nodes < 1:
        raise ValueError(f"num_nodes must be at least 1, got {num_nodes}")
    if not 0 <= rank < num_nodes:
        raise ValueError(f"rank must lie in 0 to {num_nodes - 1} for {num_nodes} sites, got {rank}")
    deadline = time.monotonic() + timeout
    store = _open_store(host, port, rank, timeout)
    _roll_call(store, rank, num_nodes, timeout, deadline)
    choose_interface(host, port)
    with gloo_interface():
        dist.init_process_group(
            _backend(backend),
            store=dist.PrefixStore("dadplug/group", store),
            rank=rank,
            world_size=num_nodes,
            timeout=timedelta(seconds=timeout),
        )
    introduce(_world(), timeout)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


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


def _open_store(host: str, port: int, rank: int, timeout: float) -> dist.Store:
    limit = timedelta(seconds=timeout)
    try:
        return dist.TCPStore(host, port, None, rank == 0, limit, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:  # DistNetworkError and kin derive from RuntimeError
        if rank == 0 and "EADDRINUSE" in str(error):
            raise SiteError(
                f"port {port} is in use on this machine: another run may still be going on; end it, or choose another "
                "port for all sites"
            ) from error
        if rank == 0:
            raise SiteError(
                f"site 0 cannot open its meeting point {host}:{port}: the address must be one of this machine's own, "
                f"and reachable from the other sites ({_first_line(error)})"
            ) from error
        raise SiteError(
            f"site {rank} did not reach site 0 at {host}:{port} within {timeout:g} s: is site 0 running, is the "
            "address right, and does a firewall let the port through?"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _roll_call(store: dist.Store, rank: int, num_nodes: int, timeout: float, deadline: float) -> None:
    """Waits until every site has come, and says who has not."""
    if store.add(f"dadplug/claims/{rank}", 1) > 1:
        raise SiteError(f"another process already claims rank {rank}: every site needs a rank of its own")
    store.set(f"dadplug/here/{rank}", Sites.own_name())
    said_so = False
    start = time.monotonic()
    while True:
        missing = [site for site in range(num_nodes) if not _is_here(store, site)]
        if not missing:
            return
        names = ", ".join(map(str, missing))
        if time.monotonic() > deadline:
            raise SiteError(
                f"waited {timeout:g} s for {num_nodes} sites: {'sites' if len(missing) > 1 else 'site'} {names} did "
                "not come. Start every site with the same meeting point, or give a larger timeout"
            )
        if not said_so and time.monotonic() - start > 5:
            said_so = True
            print(f"site {rank} waits for {'sites' if len(missing) > 1 else 'site'} {names} …", file=sys.stderr)
        time.sleep(0.02)


def _is_here(store: dist.Store, site: int) -> bool:
    try:
        return store.check([f"dadplug/here/{site}"])
    except RuntimeError as error:
        raise SiteError("site 0, which hosts the meeting point, ended before all sites had come") from error


_interface: str | None = None  # the one that leads to the other sites, where it has been looked up


def choose_interface(host: str, port: int) -> None:
    """Look up which network interface leads to the other sites, for `gloo_interface`.

    Left alone gloo takes the one that the machine's own name resolves to, often loopback, and the sites never meet.
    """
    global _interface
    if not sys.platform.startswith("linux"):
        return
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(host), port))
            address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                if address_of(probe, name) == address:
                    _interface = name
    except OSError:
        pass


def interface_in_use() -> str | None:
    """Return the network interface that the user has named for gloo, or else the one that has been looked up."""
    return os.environ.get(_INTERFACE, "").split(",")[0] or _interface


@contextmanager
def gloo_interface() -> Iterator[None]:
    """Set the environment variable that gloo reads when a process group is created; remove it afterwards."""
    if _INTERFACE in os.environ or _interface is None:
        yield
        return
    os.environ[_INTERFACE] = _interface
    try:
        yield
    finally:
        os.environ.pop(_INTERFACE, None)


def address_of(probe: socket.socket, interface: str) -> str | None:
    """Looks up the IPv4 address of a network interface; None where it has none."""
    import fcntl

    request = struct.pack("256s", interface[:15].encode())
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
    except OSError:
        return None
