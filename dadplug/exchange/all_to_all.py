"""All-to-all exchanges: over the sites' own connections, and over messages of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .socket_transport import Message, PeerSockets, others_of
from .transport import AllToAll, Transport


class _Base(AllToAll):
    """Buffers of an exchange.

    Args:
        transport: the transport.
        sizes: number of elements that each site sends to the site of this rank, by rank of the receiver.
        dtype: type of the elements.
    """

    def __init__(self, transport: Transport, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self._transport = transport
        rank = transport.rank
        self.payloads = [torch.zeros(size, dtype=dtype) for size in sizes]
        self._received = [torch.zeros(sizes[rank], dtype=dtype) for _ in sizes]
        self._received[rank] = self.payloads[rank]
        self._bytes = sum(each.numel() * each.element_size() for each in self.payloads) - (
            self.payloads[rank].numel() * self.payloads[rank].element_size()
        )


class SocketAllToAll(_Base):
    """Exchange on the sites' own connections.

    Args:
        transport: the transport.
        sockets: the connections.
        sizes: number of elements that each site sends to the site of this rank, by rank of the receiver.
        dtype: type of the elements.
    """

    def __init__(self, transport: Transport, sockets: PeerSockets, sizes: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(transport, sizes, dtype)
        self._sockets = sockets
        self._own = others_of(self.payloads, transport.rank)
        self._others = others_of(self._received, transport.rank)
        self._messages: list[Message] = []

    def launch(self) -> None:
        self._transport.traffic.add(self._bytes)
        self._messages = self._sockets.launch(self._own, self._others)

    def wait(self) -> list[Tensor]:
        if self._messages:
            with self._transport.traffic.waiting():
                self._sockets.wait(self._messages)
            self._messages = []
        return self._received


class _Group(Protocol):
    """Part of `dadplug.exchange.group_transport.GroupTransport` that messages of torch.distributed need."""

    @property
    def group(self) -> dist.ProcessGroup: ...

    def wait(self, work: dist.Work, peer: int | None = None) -> None: ...


class PointToPointAllToAll(_Base):
    """Exchange by one message of torch.distributed for each pair of sites.

    Args:
        transport: the transport.
        sizes: number of elements that each site sends to the site of this rank, by rank of the receiver.
        dtype: type of the elements.
        tag: tag of the messages.
    """

    def __init__(self, transport: Any, sizes: Sequence[int], dtype: torch.dtype, tag: int) -> None:
        super().__init__(transport, sizes, dtype)
        self._network: _Group = transport
        self._tag = tag
        self._global = dist.get_process_group_ranks(self._network.group)
        self._receives: list[tuple[dist.Work, int]] = []
        self._sends: list[tuple[dist.Work, int]] = []

    def post(self) -> None:
        if not self._receives:
            self._receives = self._start(dist.irecv, self._received)

    def launch(self) -> None:
        self.post()
        self._sends = self._start(dist.isend, self.payloads)
        self._transport.traffic.add(self._bytes)

    def _start(self, start: Any, payloads: Sequence[Tensor]) -> list[tuple[dist.Work, int]]:
        works = []
        for peer, payload in enumerate(payloads):
            if peer == self._transport.rank or not payload.numel():
                continue
            try:
                works.append((start(payload, self._global[peer], group=self._network.group, tag=self._tag), peer))
            except RuntimeError as error:
                raise self._transport.lost(error, peer) from error
        return works

    def wait(self) -> list[Tensor]:
        for works in (self._receives, self._sends):
            for work, peer in works:
                self._network.wait(work, peer)
            works.clear()
        return self._received
