"""A hub on loopback, and sites that are linked to it, each in a thread or a process of its own."""

import random
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from running_hub import RunningHub, running_hub
from torch import nn

from dadplug import GradientReduction
from dadplug.exchange import Traffic, factory
from dadplug.exchange.rounds import Requirements
from dadplug.hub.pki.kits import Kit
from dadplug.hub.site.elastic import ElasticTransport
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
        addresses: addresses that the sites connect to, by slot; those of the hub where none are given.
        options: of the hub.
    """
    with (
        running_hub(folder / "kits", NAMES[:world_size], **options) as hub,
        linked(hub, world_size, addresses) as opened,
    ):
        yield opened


@contextmanager
def linked(hub: RunningHub, world_size: int = 2, addresses: Sequence[tuple[str, int]] = ()) -> Iterator[list[HubLink]]:
    """Link sites to a hub that is running; they are closed with the context."""
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


@contextmanager
def linked_by(kits: Path, names: str = "ab") -> Iterator[list[HubLink]]:
    """Link sites to the hub that their kits name."""
    opened = together(lambda rank: open_link(kits, names[rank]), len(names))
    try:
        yield opened
    finally:
        for link in opened:
            link.close(0.1)


@contextmanager
def over_hub(kits: Path) -> Iterator[HubLink]:
    """Link this process to a hub by the kit of its rank; transports of its default group go over that link."""
    link = open_link(kits, NAMES[dist.get_rank()], timeout=200.0)

    def open_transport(
        traffic: Traffic, device: Any, timeout: float, requirements: Requirements | None, for_trainer: bool
    ) -> HubTransport:
        if requirements is None:
            return HubTransport(link, traffic, timeout)
        return ElasticTransport(link, traffic, timeout, requirements)

    network = (lambda group: True), open_transport, lambda group: link.rounds.elastic
    factory.register_network(*network)
    try:
        yield link
    finally:
        factory._networks.remove(network)
        link.close()


def together(function: Callable[[int], Any], world_size: int = 2) -> list[Any]:
    """Call a function with each rank, all at the same time; return the results, or raise the first error."""
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(function, range(world_size)))


def transports(opened: Sequence[HubLink], timeout: float = TIMEOUT) -> list[HubTransport]:
    """Return a transport for each link."""
    return [HubTransport(link, Traffic(), timeout) for link in opened]


def send(to: socket.socket, content: bytes, seed: int = 0) -> None:
    """Send in parts of random sizes, as a program without threads does, one buffer or several at a time."""
    chance = random.Random(seed)
    rest = memoryview(content)
    deadline = time.monotonic() + TIMEOUT
    while rest:
        size = chance.choice((1, 40, 3000, 70_000, 500_000))
        parts = [rest[:size], rest[size : 2 * size]]
        try:
            count = to.sendmsg(parts) if chance.random() < 0.5 else to.send(parts[0])
        except BlockingIOError:
            select.select([], [to], [], 1)
            assert time.monotonic() < deadline
            continue
        rest = rest[count:]


def receive(of: socket.socket, size: int) -> bytes:
    """Return so many bytes of a stream, or those up to its end."""
    content = bytearray()
    while len(content) < size:
        assert select.select([of], [], [], TIMEOUT)[0], f"{len(content)} of {size} bytes"
        part = of.recv(1 << 16)
        if not part:
            break
        content += part
    return bytes(content)


def train(model: nn.Module, loss: Callable[[int], torch.Tensor], steps: int, **options: Any) -> GradientReduction:
    """Train a model, with equal replicas in the end; return the reduction.

    Args:
        model: the model.
        loss: returns the loss of a step.
        steps: number of steps.
        options: of the reduction.
    """
    reduction = GradientReduction(model, **{"weighting": "samples"} | options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss(step).backward()
        reduction.synchronize()
        optimizer.step()
    assert reduction.first_difference() is None
    return reduction
