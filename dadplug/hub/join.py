"""Connection of this process to the other sites: at a rendezvous address, or by a kit through the hub."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from ..errors import KitError
from ..exchange import DEFAULT_TIMEOUT, rendezvous
from ..exchange.deadline import check_seconds
from ..logs import get_logger
from .kits import Kit
from .local_site import LocalPlace
from .site_connection import Connection, current_connection

_log = get_logger(__name__)


def connect(
    rank: int | None = None,
    num_nodes: int | None = None,
    dist_url: str | None = None,
    *,
    kit: str | Path | None = None,
    backend: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> None:
    """Join the other sites: start the default process group of torch.distributed.

    Without arguments, the environment that torchrun sets is read (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Nothing
    is done if it names no other site, or if a group exists already.

    With a kit, this site dials the hub that the kit names, listens at no port, and all messages of the process group
    and of dadplug's own transports are encrypted. Number of this site and number of sites are those of the kit. After
    an error by which a site was lost, the sites can connect again. If the environment announces several processes on
    this machine (``torchrun --standalone``), they are one site: the first of them dials the hub, and the others
    exchange with it over the loopback interface.

    Args:
        rank: number of this site, from 0; site 0 hosts the rendezvous.
        num_nodes: number of sites.
        dist_url: the rendezvous address, ``tcp://HOST:PORT``, an address of site 0 that all sites reach.
        kit: folder of this site's kit, in place of the three above, see ``python -m dadplug provision``.
        backend: ``"gloo"`` (CPU, and GPUs across sites), ``"nccl"`` (GPUs in one place); chosen by device if None.
        timeout: seconds to wait for all sites.

    Raises:
        ValueError: if an argument is out of its range or missing, or does not go with the others.
        KitError: if the kit is incomplete or damaged, or not valid at present.
        RefusedError: if the hub refuses this site.
        SiteError: if a site does not come in time, two claim one rank, the port is taken, or the hub cannot be reached.
        MismatchError: if the sites run different versions of dadplug.
    """
    if kit is None:
        rendezvous.connect(rank, num_nodes, dist_url, backend=backend, timeout=timeout)
        return
    check_seconds("timeout", timeout)
    loaded = load_site_kit(kit, rank=rank, num_nodes=num_nodes, dist_url=dist_url, backend=backend)
    if dist.is_initialized():
        if _is_connected(loaded):
            return
        dist.destroy_process_group()
    while (connection := current_connection()) is not None:  # of an earlier run
        connection.close_transports()
    Connection(loaded, timeout, LocalPlace.find(os.environ))
    host, port = loaded.roster.address()
    names = ", ".join(loaded.roster.sites)
    _log.info("connected to the hub %s:%d as site %d of %s", host, port, loaded.slot, names)


def load_site_kit(folder: str | Path, **places: object) -> Kit:
    """Load the kit by which this process is to be connected.

    Args:
        folder: folder of the kit.
        places: what a kit determines, by the names of arguments; None where it is not given.

    Raises:
        ValueError: if one of them is given, or the environment announces processes that are not those of one site.
        KitError: if the kit is incomplete or damaged, or that of the hub.
    """
    if given := [name for name, value in places.items() if value is not None]:
        raise ValueError(f"a kit determines the place of this site and its backend: leave out {', '.join(given)}")
    LocalPlace.find(os.environ)  # or an error
    kit = Kit.load(folder)
    if kit.is_hub:
        raise KitError(f"{folder} is the kit of the hub: a site needs its own")
    return kit


def _is_connected(kit: Kit) -> bool:
    """Return whether this process is connected by a kit, and none of its sites is lost.

    Raises:
        ValueError: if this process is connected otherwise.
    """
    connection = current_connection()
    if connection is None:
        raise ValueError("this process has a process group already, whose messages do not go over the kit's hub")
    if connection.kit.certificate != kit.certificate:
        raise ValueError(f"this process is connected by the kit {connection.kit.folder} already")
    return not connection.is_lost
