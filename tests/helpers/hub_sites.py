"""A hub on loopback, and sites that are linked to it, each in a thread or a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from running_hub import RunningHub, running_hub

from dadplug.exchange import Traffic
from dadplug.hub.pki.kits import Kit
from dadplug.hub.site.link import HubLink
from dadplug.hub.site.transport import HubTransport

TIMEOUT = 60.0
NAMES = ("a", "b", "c", "d")


def open_link(kits: Path, name: str, address: tuple[str, int] | None = None, **options: Any) -> HubLink:
    """Link a site to a hub with its kit."""
    return HubLink.open(Kit.load(kits / name), address=address, **{"timeout": TIMEOUT, **options})


@contextmanager
def links(
    folder: Path, world_size: int = 2, addresses: Sequence[tuple[str, int]] = (), **options: Any
) -> Iterator[list[HubLink]]:
    """Run a hub, and link sites to it; they are closed with the context.

    Args:
        folder: folder for the kits.
        world_size: number of sites.
        addresses: addresses that the sites dial, by slot; those of the hub where none are given.
        options: of the hub.
    """
    with running_hub(folder / "kits", NAMES[:world_size], **options) as hub:
        opened = link_all(hub, world_size, addresses)
        try:
            yield opened
        finally:
            for link in opened:
                link.close(0.1)


def link_all(hub: RunningHub, world_size: int = 2, addresses: Sequence[tuple[str, int]] = ()) -> list[HubLink]:
    """Link sites to a hub that is running."""
    everywhere = list(addresses) or [hub.address] * world_size
    return together(lambda rank: open_link(hub.kits, NAMES[rank], everywhere[rank]), world_size)


def together(function: Callable[[int], Any], world_size: int = 2) -> list[Any]:
    """Call a function with each rank, all at the same time; return the results, or raise the first error."""
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(function, range(world_size)))


def transports(opened: Sequence[HubLink], timeout: float = TIMEOUT) -> list[HubTransport]:
    """Return a transport for each link."""
    return [HubTransport(link, Traffic(), timeout) for link in opened]
