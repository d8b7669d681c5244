"""Transport over a site's link to its hub, which passes payloads on and adds up summands."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange.codec import check_lengths, decode_objects, encode_object
from ..exchange.traffic import Traffic
from ..exchange.transport import Gather, PendingSum, StreamToHub, Transport
from .dtypes import CODES
from .frames import Kind
from .inbox import Incoming
from .link import CHANNEL_BITS, HubLink
from .members import HubSites
from .tunnels import stream_to_hub, tunnel_of

SECOND_ROUND = 1 << 23  # bit of the number of a gather's second round
_COLLECTIVES = 1 << 22  # first number of those that are used once, and their count
_PACKET_BYTES = 1 << 14  # that cost less than the hub's work
assert 2 * _COLLECTIVES == SECOND_ROUND < 1 << CHANNEL_BITS


class HubTransport(Transport):
    """Messages between the sites of a hub. All buffers lie on the CPU.

    Args:
        link: the link.
        traffic: the meter; it counts what this site sends to the hub.
        timeout: seconds after which a silent site counts as lost.
        group: process group of the sites, if there is one.
    """

    is_direct = False

    def __init__(self, link: HubLink, traffic: Traffic, timeout: float, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(HubSites(link), traffic, link.rank, torch.device("cpu"), timeout)
        self.link = link
        self.ring = float(self.copies) if link.sealing.required else 1.0  # the hub cannot add up sealed summands
        self._group = group
        self._channel = link.new_channel()
        self._gathers = self._collectives = 0

    @property
    def group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this link to a hub has no process group: connect by dadplug.connect(kit=...)")
        return self._group

    def close(self) -> None:
        """Nothing: the link is the process's, and outlives this transport."""

    def gather(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        return HubGather(self, self.next_gather(), sizes, dtype)

    def next_gather(self) -> int:
        """Return the number of an exchange that takes place in many steps."""
        self._gathers += 1
        if self._gathers >= _COLLECTIVES:
            raise RuntimeError(f"more than {_COLLECTIVES} gathers have been prepared")
        return self._channel | self._gathers

    def gather_again(self, first: Gather, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        assert isinstance(first, HubGather)
        return HubGather(self, first.exchange | SECOND_ROUND, sizes, dtype)

    def gather_once(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        return HubGather(self, self.next_collective(), sizes, dtype)

    def end_step(self) -> None:
        self.link.end_step()

    def next_collective(self) -> int:
        """Return the number of an exchange that takes place once."""
        self._collectives = (self._collectives + 1) % _COLLECTIVES
        return self._channel | _COLLECTIVES | self._collectives

    def all_reduce(self, tensor: Tensor) -> PendingSum:
        if tensor.dtype in CODES and not self.prefers_gather(tensor.numel() * tensor.element_size()):
            return _HubSum(self, tensor)
        return GatheredSum(self, tensor)

    def broadcast(self, tensor: Tensor) -> None:
        sizes = [tensor.numel() * (rank == 0) for rank in range(self.world_size)]
        gather = HubGather(self, self.next_collective(), sizes, tensor.dtype)
        if self.rank == 0:
            gather.payload.copy_(tensor.detach().reshape(-1))
        gather.launch()
        first = gather.wait()[0]
        if self.rank:
            tensor.detach().copy_(first.view(tensor.shape))

    def broadcast_bytes(self, content: bytes) -> bytes:
        return self.gather_bytes(content if self.rank == 0 else b"")[0].tobytes()

    def gather_objects(self, item: Any) -> list[Any]:
        own, refusal = encode_object(item)
        return decode_objects(self.gather_bytes(own), refusal)

    def gather_bytes(self, own: bytes) -> list[memoryview]:
        """Gather byte strings of all sites, by rank; sizes go first, and are checked before memory is allocated."""
        gather = HubGather(self, self.next_collective(), [1] * self.world_size, torch.int64)
        gather.payload[0] = len(own)
        gather.launch()
        lengths = [int(size) for size in gather.wait()]
        check_lengths(lengths)
        gather = HubGather(self, self.next_collective(), lengths, torch.uint8)
        if own:
            gather.payload.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        gather.launch()
        return [bytes_of(payload) for payload in gather.wait()]

    def open_streams(self, timeout: float) -> dict[int, socket.socket]:
        return tunnel_of(self.link, timeout).open(self.gather_objects)

    def accept_streams(self, take: Callable[[int | None, socket.socket], None], timeout: float) -> bool:
        if self.link.sealing.required:  # the sites agree on their keys when a run starts
            return False
        tunnel_of(self.link, timeout).accept(take)
        return True

    def open_hub_stream(self, timeout: float) -> StreamToHub | None:
        if self.link.sealing.required:  # the hub cannot read what it would have to order
            return None
        return stream_to_hub(tunnel_of(self.link, timeout))

    @property
    def dialed_by(self) -> str:
        return str(self.link.kit.folder.resolve())

    def prefers_gather(self, nbytes: int) -> bool:
        peers = self.world_size - 1  # one other site sends as much as the hub would
        return self.link.sealing.required or peers == 1 or peers * nbytes <= _PACKET_BYTES


class HubGather(Gather):
    """Gather of payloads that the hub passes on.

    Args:
        transport: the transport.
        exchange: number of the exchange.
        sizes: number of elements of each site's payload, by rank.
        dtype: type of the elements.

    Attributes:
        exchange: number of the exchange.
        payloads: this site's payload and room for the others, by rank.
    """

    def __init__(self, transport: HubTransport, exchange: int, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self.exchange = exchange
        self._transport = transport
        self.payloads = [torch.zeros(size, dtype=dtype) for size in sizes]
        self.payload = self.payloads[transport.rank]
        self._own = bytes_of(self.payload)
        self._others = [
            (rank, bytes_of(payload))
            for rank, payload in enumerate(self.payloads)
            if rank != transport.rank and payload.numel()
        ]
        self._incoming: list[Incoming] = []

    def post(self) -> None:
        if not self._incoming and self._others:
            expect = self._transport.link.expect
            self._incoming = [expect(rank, self.exchange, buffer) for rank, buffer in self._others]

    def launch(self) -> None:
        self.post()
        self._transport.traffic.add(len(self._own))
        self._transport.link.send(self.exchange, self._own, soon=self._transport.more_follows)

    def wait(self) -> list[Tensor]:
        if self._incoming:
            with self._transport.traffic.waiting():
                self._transport.link.wait(self._incoming, self._transport.timeout)
            self._incoming = []
        return self.payloads


class _HubSum(PendingSum):
    """Sum that the hub computes from the summands of all sites, in the order of ranks."""

    def __init__(self, transport: HubTransport, tensor: Tensor) -> None:
        self._transport = transport
        self._tensor = tensor.detach()
        self._staged = self._tensor.to(transport.device).reshape(-1)
        content, exchange = bytes_of(self._staged), transport.next_collective()
        # The link copies what it sends, so that the sum can arrive where the summand lies.
        self._incoming = transport.link.expect(0, exchange, content, Kind.SUM)
        transport.traffic.add(len(content))
        transport.link.send(exchange, content, Kind.SUMMAND, CODES[tensor.dtype])

    def wait(self) -> None:
        with self._transport.traffic.waiting():
            self._transport.link.wait([self._incoming], self._transport.timeout)
        if self._staged.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._staged.view(self._tensor.shape))


class GatheredSum(PendingSum):
    """Sum that every site computes from the addends of all, in the order of ranks; narrow types in single precision."""

    def __init__(self, transport: HubTransport, tensor: Tensor) -> None:
        self._tensor = tensor
        self._gather = transport.gather_once([tensor.numel()] * transport.world_size, tensor.dtype)
        self._gather.payload.copy_(tensor.detach().reshape(-1))
        self._gather.launch()

    def wait(self) -> None:
        first, *others = self._gather.wait()
        total = first.to(torch.promote_types(first.dtype, torch.float32)) if first.is_floating_point() else first
        for payload in others:
            total += payload
        self._tensor.detach().copy_(total.view(self._tensor.shape))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, which share its memory."""
    return tensor.view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
