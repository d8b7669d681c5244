"""Transport factory: a single site, sites of one process each, or nodes with several processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from .addresses import gloo_interface
from .deadline import within
from .group_transport import GroupTransport
from .hierarchy import HierarchicalTransport
from .membership import introduce
from .objects import gather_objects
from .requirements import Requirements
from .single_site import SingleSite, report_alone
from .sites import Sites
from .topology import Hierarchy, Nodes, members_of, node_id
from .traffic import Traffic
from .transport import Transport

Recognise = Callable[[dist.ProcessGroup], bool]
Open = Callable[[dist.ProcessGroup, Traffic, torch.device, float, "Requirements | None", bool], Transport]

_networks: list[tuple[Recognise, Open]] = []


def register_network(recognise: Recognise, open_network: Open) -> None:
    """Register a network with a transport of its own.

    Args:
        recognise: returns whether a process group is one of the network.
        open_network: opens a transport for such a group; takes group, meter, device, timeout, requirements and
            whether it is for a trainer, see `open_transport`.
    """
    _networks.append((recognise, open_network))


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
        hierarchy: which processes share a node, see `dadplug.exchange.topology.members_of`; None for one level. It has
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
    for recognise, open_network in _networks:
        if recognise(parent):
            return open_network(parent, traffic, device, timeout, requirements, for_trainer)
    if requirements is not None:
        raise ValueError("min_sites needs a hub, which knows who is there: dadplug.connect(kit=...)")
    sites = introduce(parent, timeout)
    local = group is not None
    try:  # also without a hierarchy: a site that has failed by now opens none, which a new group does not notice
        ids = gather_objects(node_id(), parent, lambda work: work.wait(timedelta(seconds=timeout)))
    except RuntimeError as error:
        raise sites.lost(error, timeout) from error
    if hierarchy is not None:
        nodes = Nodes.of(members_of(hierarchy, ids), dist.get_rank(parent))
        if 1 < nodes.count < len(ranks):
            # Messages between pairs are gloo's; from a GPU they go by way of the CPU.
            own = _new_group(sites, ranks, timeout, "gloo", local)
            return HierarchicalTransport(own, sites, traffic, timeout, nodes)
    return GroupTransport(_new_group(sites, ranks, timeout, None, local), sites, traffic, device, timeout)


def _new_group(sites: Sites, ranks: list[int], timeout: float, backend: str | None, local: bool) -> dist.ProcessGroup:
    """Make a process group, within the timeout: the store that it needs may be at a site that is stopped."""
    limit = timedelta(seconds=timeout)

    def make() -> dist.ProcessGroup:
        with gloo_interface():
            group: dist.ProcessGroup = dist.new_group(ranks, limit, backend, use_local_synchronization=local)
            return group

    try:
        return within(timeout, make)
    except (RuntimeError, TimeoutError) as error:
        raise sites.lost(error, timeout) from error


def _check_not_alone() -> None:
    announced = os.environ.get("WORLD_SIZE", "1")
    if announced.isdigit() and int(announced) > 1:
        raise RuntimeError(
            f"the environment announces {announced} sites (WORLD_SIZE), but torch.distributed is not initialised: call "
            "dadplug.connect() or torch.distributed.init_process_group() first"
        )
