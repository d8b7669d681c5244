"""Backend of torch.distributed whose messages go over the hub, for trainers and libraries that use collectives.

Every collective is one gather or broadcast of bytes over the link, in a channel of the group's own; sums are formed by
each site, in the order of ranks, so that all sites get the same bits. A group holds all sites, or one.

**Where sites may leave** (``min_sites``), a collective is a round of its own, see `dadplug.hub.elastic`, and complete
when it returns. Reductions are those of the sites that are present, and barriers wait for these. All others need what
a certain site has sent: they raise an error at all sites, where it is absent.

**Where sites have several processes**, a group holds all processes, or one. Its gathers are those of a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import SiteError
from .collectives import BACKEND, Collectives
from .site_transport import SiteTransport
from .transport import bytes_of
from .work import HubWork

_NUMBERS = 1 << 23  # of the collectives of a channel, before they begin again


class Link(Protocol):
    """The part of `dadplug.hub.link.HubLink` that a process group needs. Its methods may be called in any thread."""

    rank: int
    world_size: int
    step: int
    rounds: Any

    def name(self, slot: int) -> str: ...

    def new_channel(self) -> int: ...

    def send(self, exchange: int, content: memoryview) -> None: ...

    def expect(self, slot: int, exchange: int, buffer: memoryview) -> Any: ...

    def wait(self, incoming: Sequence[Any], timeout: float) -> None: ...


def register(open_group: Callable[[Sequence[int], int, float], Collectives]) -> None:
    """Register the backend.

    Args:
        open_group: function that makes a process group of ranks in the default group, the rank of this process in the
            new one, and a timeout in seconds.
    """

    def create(options: Any, _: Any) -> Collectives:
        ranks = options.global_ranks_in_group or range(options.group_size)
        return open_group(ranks, options.group_rank, options.timeout.total_seconds())

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


class HubGroup(Collectives):
    """Process group over the hub, of sites with one process each.

    Args:
        link: the link to the hub.
        slots: slots of the sites, by rank.
        rank: rank of this site in the group.
        seconds: timeout of a collective.

    Raises:
        ValueError: if the group has several sites, but not all.
    """

    def __init__(self, link: Link, slots: Sequence[int], rank: int, seconds: float) -> None:
        super().__init__(slots, rank, link.world_size, seconds)
        self._link = link
        self._slots = list(slots)
        # A group of one site exists at this site only, so it must not take a number that others give to another group.
        self._first = link.new_channel() if len(slots) > 1 else 0
        self._count = 0

    def _gather(
        self,
        own: Tensor,
        sizes: Sequence[int],
        put: Callable[[list[Tensor]], object],
        tensors: Sequence[Tensor],
        needs_all: bool = True,
    ) -> HubWork:
        self._check_size(own, sizes)
        parts = [torch.empty(size, dtype=own.dtype) for size in sizes]
        parts[self._own] = own.clone()  # it may be changed before the end
        if self.size() == 1:
            return self._work(tensors, finish=lambda: put(parts))
        if self._link.rounds.elastic:
            put(self._present(self._gather_in_round(parts), parts, needs_all))
            return self._work(tensors)
        exchange = self._first + self._count
        self._count = (self._count + 1) % _NUMBERS
        others = [rank for rank, size in enumerate(sizes) if size and rank != self._own]
        incoming = [self._link.expect(self._slots[rank], exchange, bytes_of(parts[rank])) for rank in others]
        if len(own):
            self._link.send(exchange, bytes_of(own))
        return self._work(tensors, lambda seconds: self._link.wait(incoming, seconds), lambda: put(parts))

    def _gather_in_round(self, parts: Sequence[Tensor]) -> frozenset[int]:
        """Gather the tensors of the sites that are present in a round of its own.

        Args:
            parts: this site's tensor and room for the others, by rank.

        Returns:
            The ranks of the sites that are absent.
        """
        link = self._link
        buffers = {slot: bytes_of(part) for slot, part in zip(self._slots, parts, strict=True)}
        absent = link.rounds.gather(self._first + link.step % _NUMBERS, buffers, self.seconds)
        return frozenset(rank for rank, slot in enumerate(self._slots) if slot in absent)

    def _present(self, absent: frozenset[int], parts: list[Tensor], needs_all: bool) -> list[Tensor]:
        if needs_all and (missing := [rank for rank in sorted(absent) if len(parts[rank])]):
            names = ", ".join(self._link.name(self._slots[rank]) for rank in missing)
            raise SiteError(
                f"{names} is gone, and a collective needs what it would have sent: where sites may leave, there are "
                "reductions, barriers, and GradientReduction.gather_objects"
            )
        return parts if needs_all else [part for rank, part in enumerate(parts) if rank not in absent]


class SiteGroup(Collectives):
    """Process group over the hub, of sites with several processes.

    Args:
        open_transport: function that opens the transport of the group; called when it is first used.
        ranks: ranks of its processes in the default group.
        rank: rank of this process in the group.
        world_size: number of processes in the default group.
        seconds: timeout of a collective.

    Raises:
        ValueError: if the group has several processes, but not all.
    """

    def __init__(
        self,
        open_transport: Callable[[], SiteTransport],
        ranks: Sequence[int],
        rank: int,
        world_size: int,
        seconds: float,
    ) -> None:
        super().__init__(ranks, rank, world_size, seconds)
        self._open_transport = open_transport
        self._transport: SiteTransport | None = None

    def shutdown(self) -> None:
        """End the threads of the group, and close its connections."""
        super().shutdown()
        if self._transport is not None:
            self._transport.close()

    def _gather(
        self,
        own: Tensor,
        sizes: Sequence[int],
        put: Callable[[list[Tensor]], object],
        tensors: Sequence[Tensor],
        needs_all: bool = True,
    ) -> HubWork:
        self._check_size(own, sizes)
        if self.size() == 1:
            parts = [own.clone()]
            return self._work(tensors, finish=lambda: put(parts))
        if self._transport is None:
            self._transport = self._open_transport()
        gather = self._transport.gather_once(sizes, own.dtype)
        gather.payload.copy_(own)
        gather.launch()
        return self._work(tensors, lambda seconds: gather.wait(), lambda: put(gather.wait()))
