"""Transport of a trainer for everything but gradients, where sites of a parameter server leave and return."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..exchange import Traffic, Transport
from ..exchange.failure_reports import PeerNames
from ..exchange.transport import Gather, PendingSum
from .returning import Returned
from .server import ParameterServer

_places = itertools.count()


class ServerTransport(Transport):
    """Messages of a trainer besides those of its parameter server.

    Before the first step they go over another transport, which needs all sites. From then on they go over the log,
    between its phases, so that sites that have left are not waited for. A site that returns runs the program from its
    beginning, and comes to exchanges that the others had long ago. Up to its first step it therefore exchanges nothing:
    it is alone in every exchange, and `joins` is true. The trainer calls `end_step` after each step.

    Args:
        first: the transport for the beginning; None at a site that returns.
        sites: the sites by name.
        device: device of the model.
        timeout: seconds that a wait may take.

    Attributes:
        server: the parameter server, once there is one.
    """

    elastic = True
    is_direct = False

    def __init__(self, first: Transport | None, sites: PeerNames, device: torch.device, timeout: float) -> None:
        super().__init__(sites, Traffic(), sites.rank, device, timeout)
        self.server: ParameterServer | None = None
        self.joins = first is None
        self._place = next(_places)
        self._first = first
        self._lowest = 0  # of those that took part in the last exchange

    @classmethod
    def of_returning(cls, rank: int, names: Sequence[str], device: torch.device, timeout: float) -> ServerTransport:
        """Return the transport of a site that returns.

        Args:
            rank: this site.
            names: names of the sites, by rank.
            device: device of the model.
            timeout: seconds that a wait may take.
        """
        return cls(None, Returned(rank, names), device, timeout)

    @property
    def place(self) -> int:
        return self._place

    @property
    def present(self) -> list[int]:
        return list(range(self.world_size)) if self.server is None else self.server.present_sites

    @property
    def lowest(self) -> int:
        return self._lowest

    def end_step(self) -> None:
        self.joins = False

    def close(self) -> None:
        if self._first is not None:
            self._first.close()

    def gather_present(self, item: Any) -> dict[int, Any]:
        if self.joins:
            return {self.rank: item}
        if self.server is not None and self.server.gathers:
            every = self.server.gather_present(item)
            self._lowest = min(every)
            return every
        return dict(enumerate(self._beginning.gather_objects(item)))

    def gather_objects(self, item: Any) -> list[Any]:
        every = self.gather_present(item)
        return [every.get(rank) for rank in range(self.world_size)]

    def broadcast_bytes(self, content: bytes) -> bytes:
        while not self.joins:
            source = self._lowest
            every = self.gather_present(content if self.rank == source else b"")
            if source in every:
                return bytes(every[source])
        return content

    def broadcast(self, tensor: Tensor) -> None:
        if not self.joins:
            self._beginning.broadcast(tensor)

    @property
    def _beginning(self) -> Transport:
        if self._first is None:
            raise RuntimeError("a site that has returned into a training can take part in this one only")
        return self._first

    @property
    def group(self) -> Any:
        return self._beginning.group

    def gather(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        return self._beginning.gather(sizes, dtype)

    def all_reduce(self, tensor: Tensor) -> PendingSum:
        return self._beginning.all_reduce(tensor)

    def prefers_gather(self, nbytes: int) -> bool:
        return True
