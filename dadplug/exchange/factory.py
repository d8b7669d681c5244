"""Transport factory: a single site, sites of one process each, or nodes with several processes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MismatchError
from ..support.logs import get_logger
from .codec import gather_objects
from .group_transport import GroupTransport, wait_patiently
from .handshake import gloo_interface, within
from .rounds import Requirements
from .status import Member, PeerNames, ProcessSites, introduce, own_name
from .traffic import Traffic
from .transport import Gather, Hierarchy, Nodes, PendingSum, Transport, members_of, node_id

_log = get_logger(__name__)
_reported: list[int] = []  # processes that have reported, not the parents that they were forked from


def report_alone() -> None:
    """Log once in a process that it trains alone: without a launcher there is no error."""
    if os.getpid() not in _reported:
        _reported.append(os.getpid())
        _log.info(
            "this site trains alone (rank 0 of 1 site): start the program by torchrun, "
            "or pass rank, num_nodes and dist_url, to train with others"
        )


class _OwnGather(Gather):
    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.payload = torch.zeros(size, dtype=dtype, device=device)

    def launch(self) -> None:
        pass

    def wait(self) -> list[Tensor]:
        return [self.payload]


class SingleSite(Transport):
    """Transport whose exchanges return what they are given.

    Args:
        traffic: the meter.
        device: device of the model.
        timeout: unused; as that of other transports.
        sites: the site by name, and others that are made up; None for this process alone.
    """

    def __init__(self, traffic: Traffic, device: torch.device, timeout: float, sites: PeerNames | None = None) -> None:
        sites = sites or ProcessSites(0, [Member(own_name(), "", 0, b"")])
        super().__init__(sites, traffic, 0, device, timeout)

    def close(self) -> None:
        pass

    def gather(self, sizes: Sequence[int], dtype: torch.dtype, **use: Any) -> Gather:
        return _OwnGather(sizes[0], dtype, self.device)

    def all_reduce(self, tensor: Tensor) -> PendingSum:
        return PendingSum()

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def broadcast_bytes(self, content: bytes) -> bytes:
        return content

    def gather_present(self, item: Any) -> dict[int, Any]:
        return {0: item}

    def prefers_gather(self, nbytes: int) -> bool:
        return False


Recognise = Callable[[dist.ProcessGroup], bool]
Open = Callable[[Traffic, torch.device, float, "Requirements | None", bool], Transport]

_networks: list[tuple[Recognise, Open, Recognise]] = []


def register_network(recognise: Recognise, open_network: Open, may_leave: Recognise) -> None:
    """Register a network with a transport of its own.

    Args:
        recognise: returns whether a process group is one of the network.
        open_network: opens a transport for such a group; takes meter, device, timeout, requirements and
            whether it is for a trainer, see `open_transport`.
        may_leave: returns whether training in such a group goes on without a site that leaves.
    """
    _networks.append((recognise, open_network, may_leave))


def sites_may_leave() -> bool:
    """Return whether training goes on without a site that leaves the default process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    group: Any = dist.group.WORLD
    return any(recognise(group) and may_leave(group) for recognise, _, may_leave in _networks)


def open_transport(
    group: dist.ProcessGroup | None,
    traffic: Traffic,
    device: torch.device,
    timeout: float,
    hierarchy: Hierarchy = None,
    requirements: Requirements | None = None,
    for_trainer: bool = False,
) -> Transport:
    """Open a transport over a process group of its own, so that no other messages come between its messages.

    Args:
        group: the process group whose processes are the sites; the default group where None.
        traffic: the meter.
        device: device of the model.
        timeout: seconds after which a silent site counts as lost.
        hierarchy: which processes share a node, see `dadplug.exchange.transport.members_of`; None for one level. It has
            no effect with one node, or with one process on each.
        requirements: what training requires to go on without a site that leaves; None where all sites must stay.
        for_trainer: whether a trainer exchanges by it everything but gradients. With requirements, a site that joins in
            mid-training is then alone in all exchanges up to its first step.

    Raises:
        SiteError: if a site ends or does not answer.
        TypeError: if the group is none, or one without this process.
        ValueError: if the hierarchy does not fit the number of processes, or the group has requirements and no hub.
        RuntimeError: if the environment announces several processes and no process group exists.
    """
    if not (dist.is_available() and dist.is_initialized()):
        _check_not_alone()
        report_alone()
        return SingleSite(traffic, device, timeout)
    parent = group if group is not None else dist.group.WORLD
    if not isinstance(parent, dist.ProcessGroup):
        raise TypeError(f"process_group must be a torch.distributed process group with this process, got {parent!r}")
    ranks = dist.get_process_group_ranks(parent)
    if len(ranks) == 1:
        report_alone()
        return SingleSite(traffic, device, timeout)
    for recognise, open_network, _ in _networks:
        if recognise(parent):
            transport = open_network(traffic, device, timeout, requirements, for_trainer)
            transport.belong_to(parent)
            return transport
    if requirements is not None:
        raise ValueError(
            "min_sites needs a hub, since only a hub tracks which sites are present: dadplug.connect(kit=...)"
        )
    sites = introduce(parent, timeout)
    local = len(ranks) < dist.get_world_size()
    ids = _node_ids(parent, sites, timeout)
    if hierarchy is not None:
        nodes = Nodes.of(members_of(hierarchy, ids), dist.get_rank(parent))
        if 1 < nodes.count < len(ranks):
            from .hierarchy import HierarchicalTransport  # which most runs do not need

            # Messages between pairs are gloo's; from a GPU they go by way of the CPU.
            own = _new_group(sites, ranks, timeout, "gloo", local)
            return HierarchicalTransport(own, sites, traffic, timeout, nodes)
    return GroupTransport(_new_group(sites, ranks, timeout, None, local), sites, traffic, device, timeout)


def _node_ids(parent: dist.ProcessGroup, sites: ProcessSites, timeout: float) -> list[Any]:
    """Gather the `node_id` of each process."""
    try:  # also without a hierarchy: a site that has failed by now opens none, which a new group does not notice
        wait = partial(wait_patiently, begun=sites.begun.begin("objects"), sites=sites, timeout=timeout)
        return gather_objects(node_id(), parent, wait)
    except MismatchError:
        raise
    except RuntimeError as error:
        raise sites.lost(error, timeout) from None


def _new_group(
    sites: PeerNames, ranks: list[int], timeout: float, backend: str | None, local: bool
) -> dist.ProcessGroup:
    """Make a process group, within the timeout: the store that it needs may be at a site that is stopped."""
    limit = timedelta(seconds=timeout)
    if local:  # torch's name for the new group depends on how many there are: count none that is garbage at some sites
        gc.collect()

    def make() -> dist.ProcessGroup:
        with gloo_interface():
            group: dist.ProcessGroup = dist.new_group(ranks, limit, backend, use_local_synchronization=local)
            return group

    try:
        return within(timeout, make)
    except (RuntimeError, TimeoutError) as error:
        raise sites.lost(error, timeout) from None


def _check_not_alone() -> None:
    announced = os.environ.get("WORLD_SIZE", "1")
    if announced.isdigit() and int(announced) > 1:
        raise RuntimeError(
            f"the environment announces {announced} sites (WORLD_SIZE), but torch.distributed is not initialised: call "
            "dadplug.connect() or torch.distributed.init_process_group() first"
        )
