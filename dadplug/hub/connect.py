"""`dadplug.connect`. Without a kit it needs nothing that only hubs need, such as the extra `hub`."""

from __future__ import annotations

import sys
from pathlib import Path

from ..exchange import DEFAULT_TIMEOUT, rendezvous
from ..support.refusals import refuse


def check_start(kit: str | Path | None, start_sites: int | None, start_after: float | None) -> None:
    """Raise ValueError if what a start without all sites needs is missing; arguments are those of `connect`."""
    refuse(
        (start_sites is not None and kit is None, "start_sites needs a hub, by the kit of this site: give kit="),
        (start_after is not None and start_sites is None, "start_after needs start_sites, the number of sites"),
    )


def check_kit(
    kit: str | Path | None, timeout: float, start_sites: int | None = None, start_after: float | None = None
) -> None:
    """Raise what `connect` raises before it connects, for trainers that prepare much before; as in `connect`."""
    check_start(kit, start_sites, start_after)
    if kit is not None:
        from .site.runtime import load_site_kit, start_terms

        loaded = load_site_kit(kit)
        loaded.check_dates()
        start_terms(loaded, start_sites, start_after, timeout)


def connect(
    rank: int | None = None,
    num_nodes: int | None = None,
    dist_url: str | None = None,
    *,
    kit: str | Path | None = None,
    backend: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    start_sites: int | None = None,
    start_after: float | None = None,
) -> None:
    """Join the other sites: start the default process group of torch.distributed.

    Without arguments, the environment that torchrun sets is read (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or in a
    step of SLURM, started by srun, that of SLURM. Nothing is done if it names no other site, or if a group exists
    already.

    With a kit, this site connects to the hub that the kit names, listens at no port, and all messages of the process
    group and of dadplug's own transports are encrypted. Number of this site and number of sites are those of the kit.
    After an error by which a site was lost, the sites can connect again. If the environment announces several processes
    on this machine (``torchrun --standalone``), they are one site: the first of them connects to the hub, and the
    others exchange with it over the loopback interface.

    Args:
        rank: number of this site, from 0; site 0 hosts the rendezvous.
        num_nodes: number of sites.
        dist_url: the rendezvous address, ``tcp://HOST:PORT``, an address of site 0 that all sites reach.
        kit: folder of this site's kit, in place of the three above, see ``python -m dadplug provision``.
        backend: ``"gloo"`` (CPU, and GPUs across sites), ``"nccl"`` (GPUs in one place); chosen by device if None.
        timeout: seconds to wait for all sites.
        start_sites: with a kit: number of sites with which training may start; the others join when they connect. The
            reduction needs ``min_sites``, of this number at most. All sites state the same. None: all sites.
        start_after: with ``start_sites``: seconds for which so many sites wait for the others, 60 by default.

    Raises:
        ValueError: if an argument is out of its range or missing, does not go with the others, or contradicts an
            earlier call.
        KitError: if the kit is incomplete or damaged, or not valid at present.
        RefusedError: if the hub refuses this site.
        SiteError: if a site does not come in time, two claim one rank, the port is taken, or the hub cannot be reached.
        MismatchError: if the sites run different versions of dadplug.
    """
    check_start(kit, start_sites, start_after)
    if kit is None:
        if dist_url is not None and (runtime := sys.modules.get(f"{__package__}.site.runtime")) is not None:
            runtime.check_not_connected()
        rendezvous.connect(rank, num_nodes, dist_url, backend=backend, timeout=timeout)
        return
    from ..support import jit  # noqa: F401  # numba takes seconds to load, in which a connected site would be silent
    from .site.runtime import connect_by_kit

    connect_by_kit(kit, rank, num_nodes, dist_url, backend, timeout, start_sites, start_after)
