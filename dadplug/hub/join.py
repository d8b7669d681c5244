"""Connection of this process to the other sites: at a meeting point, or by a kit through the hub."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ..errors import KitError, MismatchError, SiteError
from ..exchange import DEFAULT_TIMEOUT, rendezvous
from ..exchange.exit_reasons import describe, watch_exit
from ..exchange.factory import register_network
from ..exchange.objects import gather_objects
from ..exchange.requirements import Requirements
from ..exchange.traffic import Traffic
from . import process_group, restrictions
from .elastic import ElasticTransport
from .kits import Kit
from .link import HubLink, current_link, set_current_link
from .process_group import BACKEND, HubGroup
from .restrictions import Restrictions
from .site_store import HubStore
from .trainer_transport import TrainerTransport
from .transport import HubTransport


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
    an error by which a site was lost, the sites can connect again.

    Args:
        rank: number of this site, from 0; site 0 hosts the meeting point.
        num_nodes: number of sites.
        dist_url: the meeting point, ``tcp://HOST:PORT``, an address of site 0 that all sites reach.
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
    loaded = load_site_kit(kit, rank=rank, num_nodes=num_nodes, dist_url=dist_url, backend=backend)
    if dist.is_initialized():
        if _is_connected(loaded):
            return
        dist.destroy_process_group()
    for connection in list(_connections):  # of an earlier run
        connection.close_transports()
    Connection(loaded, timeout)


def load_site_kit(folder: str | Path, **places: object) -> Kit:
    """Load the kit by which this process is to be connected.

    Args:
        folder: folder of the kit.
        places: what a kit determines, by the names of arguments; None where it is not given.

    Raises:
        ValueError: if one of them is given, or the environment announces other processes.
        KitError: if the kit is incomplete or damaged, or that of the hub.
    """
    if given := [name for name, value in places.items() if value is not None]:
        raise ValueError(f"a kit determines the place of this site and its backend: leave out {', '.join(given)}")
    here = os.environ.get("LOCAL_WORLD_SIZE", "1")  # WORLD_SIZE counts other sites as well
    if here != "1":
        raise ValueError(
            f"a kit connects one process of each site, and the environment announces {here} here (LOCAL_WORLD_SIZE): "
            "start the program once at each site"
        )
    kit = Kit.load(folder)
    if kit.is_hub:
        raise KitError(f"{folder} is the kit of the hub: a site needs its own")
    return kit


def _is_connected(kit: Kit) -> bool:
    """Return whether this process is connected by a kit, and none of its sites is lost.

    Raises:
        ValueError: if this process is connected otherwise.
    """
    link = current_link()
    if link is None:
        raise ValueError("this process has a process group already, whose messages do not go over the kit's hub")
    if link.kit.certificate != kit.certificate:
        raise ValueError(f"this process is connected by the kit {link.kit.folder} already")
    return not (link.closed or link.gone)


class Connection:
    """Connection of this process to the hub: the link, the process group and the restrictions of the kit.

    Args:
        kit: kit of this site.
        timeout: seconds to wait for all sites, and for messages of the process group.

    Raises:
        SiteError: see `connect`.
        MismatchError: see `connect`.
    """

    def __init__(self, kit: Kit, timeout: float) -> None:
        self._link = HubLink.open(kit, timeout=timeout)
        self._store = HubStore(kit, timeout)
        self._restrictions = Restrictions(kit.policy, kit.roster)
        _networks_ready()
        _connections.append(self)
        set_current_link(self._link)
        restrictions.impose(self._restrictions)
        watch_exit(self)
        try:
            dist.init_process_group(
                BACKEND,
                store=self._store,
                rank=self._link.rank,
                world_size=self._link.world_size,
                timeout=timedelta(seconds=timeout),
            )
            if not self._link.rounds.joins:
                self._compare_versions()
        except BaseException as error:
            self._link.leave(describe(error))
            if dist.is_initialized():
                dist.destroy_process_group()
            self.close_transports()
            raise

    def _compare_versions(self) -> None:
        """Raise MismatchError if the sites do not run the same version of dadplug."""
        own = sys.modules[__name__.partition(".")[0]].__version__
        versions = gather_objects(own)
        if any(version != own for version in versions):
            pairs = ", ".join(f"{self._link.name(slot)} {version}" for slot, version in enumerate(versions))
            raise MismatchError(f"the sites run different versions of dadplug: {pairs}")

    def close_transports(self) -> None:
        """Close the connections to the hub. May be called twice."""
        self._link.close()
        self._store.close()
        restrictions.lift(self._restrictions)
        if current_link() is self._link:
            set_current_link(None)
        if self in _connections:
            _connections.remove(self)


_connections: list[Connection] = []  # to keep them alive
_ready = False


def _networks_ready() -> None:
    """Register the backend of torch.distributed and the transport, once."""
    global _ready
    if not _ready:
        process_group.register(_link)
        register_network(lambda group: isinstance(group, HubGroup), _open_transport)
        _ready = True


def _link() -> HubLink:
    link = current_link()
    if link is None:
        raise SiteError("this process is not connected to a hub: call dadplug.connect(kit=...)")
    return link


def _open_transport(
    group: dist.ProcessGroup,
    traffic: Traffic,
    device: object,
    timeout: float,
    requirements: Requirements | None,
    for_trainer: bool,
) -> HubTransport:
    link = _link()
    if requirements is None:
        return HubTransport(link, traffic, timeout, group)
    link.rounds.rejoins &= not for_trainer  # it has to be started again to go on at another step
    elastic = TrainerTransport if for_trainer else ElasticTransport
    return elastic(link, traffic, timeout, requirements, group)
