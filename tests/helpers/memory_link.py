"""Link between sites that are threads of one process, with the methods of a link to the hub that groups need."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from dadplug.errors import SiteError


class Network:
    """What all sites share: messages that have been sent and not been received."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.messages: dict[tuple[int, int, int], deque[bytes]] = defaultdict(deque)
        self.gone: dict[int, str] = {}
        self.sent = [0] * world_size

    def leave(self, rank: int, reason: str) -> None:
        """Let a site leave."""
        with self.changed:
            self.gone[rank] = reason
            self.changed.notify_all()


class Incoming:
    """Room for a message."""

    def __init__(self, key: tuple[int, int, int], buffer: memoryview) -> None:
        self.key = key
        self.buffer = buffer


class MemoryLink:
    """One site's link."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network = network
        self.rank = rank
        self.world_size = network.world_size
        self.rounds = SimpleNamespace(elastic=False)
        self._channels = 0

    def new_channel(self) -> int:
        self._channels += 1
        return (self._channels - 1) << 24

    def send(self, exchange: int, content: memoryview) -> None:
        assert len(content), "empty messages are neither sent nor expected"
        with self.network.changed:
            self.network.sent[self.rank] += len(content)
            for other in range(self.world_size):
                if other != self.rank:
                    self.network.messages[self.rank, other, exchange].append(bytes(content))
            self.network.changed.notify_all()

    def expect(self, slot: int, exchange: int, buffer: memoryview) -> Incoming:
        assert len(buffer)
        return Incoming((slot, self.rank, exchange), buffer)

    def wait(self, incoming: Sequence[Incoming], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self.network.changed:
            for each in incoming:
                while not self.network.messages[each.key]:
                    if each.key[0] in self.network.gone:
                        raise SiteError(f"site {each.key[0]} is gone: {self.network.gone[each.key[0]]}")
                    if not self.network.changed.wait(deadline - time.monotonic()):
                        raise SiteError(f"site {each.key[0]} has not answered for {timeout:g} s")
                each.buffer[:] = self.network.messages[each.key].popleft()

    def unread(self) -> int:
        """Number of messages for this site that nobody has taken."""
        return sum(len(queue) for key, queue in self.network.messages.items() if key[1] == self.rank)


def run(world_size: int, function: Callable[[MemoryLink], Any]) -> list[Any]:
    """Run a function of a link in a thread for each site; return the results by rank."""
    network = Network(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(function, MemoryLink(network, rank)) for rank in range(world_size)]
        return [future.result(60) for future in futures]
