"""torch.distributed behind one small interface: gather payloads, reduce buckets, talk at set-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import SiteError
from .membership import Sites, own_name
from .objects import gather_objects
from .socket_setup import open_streams
from .socket_transport import StreamGather, Streams
from .status import Member
from .topology import Machines
from .traffic import Traffic

_FEW = 1 << 20  # bytes of which receiving a copy costs next to nothing
_PACKETS = 1 << 14  # bytes that cost less than a few latencies


class Gather(Protocol):
    """An all-gather that is used step after step, of payloads whose sizes all sites know.

    Attributes:
        payload: this site's payload, to be filled before `launch`.
    """

    payload: Tensor

    def post(self) -> None:
        """Makes ready to receive; does nothing when called again before `wait`."""

    def launch(self) -> None:
        """Sends the payload, and returns at once."""

    def wait(self) -> list[Tensor]:
        """Waits for all payloads, and returns them by rank; they hold until the next `post`."""


class Reduction(Protocol):
    """A sum over sites that is under way."""

    def wait(self) -> None:
        """Waits for the sum, which replaces the tensor's values."""


class Transport:
    """What the exchange needs of a process group.

    Args:
        group: the process group; its processes are the sites.
        sites: the sites by name, which turn connection errors into ones that name somebody.
        traffic: the meter.
        device: device of the model. Buffers lie there if the group's backend can send from it, else on the CPU.
        timeout: seconds after which a silent site counts as lost.

    Attributes:
        copies: how many times this site sends a gathered payload to other machines.
        ring: how many times its own size this site sends of a sum to other machines.
        machines: the processes of each machine; None where each is one by itself.
    """

    machines: Machines | None = None

    def __init__(
        self, group: dist.ProcessGroup, sites: Sites, traffic: Traffic, device: torch.device, timeout: float
    ) -> None:
        self._group: dist.ProcessGroup | None = group
        self.sites = sites
        self.traffic = traffic
        self.timeout = timeout
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._peer_to_peer = device.type == "cpu" or "nccl" not in str(dist.get_backend(group))
        self.device = torch.device("cpu") if self._peer_to_peer else device
        self._tags = 0
        self.copies = self.world_size - 1
        self.ring = 2 * (self.world_size - 1) / self.world_size
        self._streams: Streams | None = None
        self._asked_for_streams = False
        sites.watch(self)

    def close(self) -> None:
        """Ends the process group; nothing can be exchanged afterwards. May be called twice."""
        if self._streams is not None:
            self._streams.close()
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def __del__(self) -> None:
        if "_group" in vars(self):
            self.close()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            RuntimeError: if it has been closed.
        """
        if self._group is None:
            raise RuntimeError("this process has left the other sites: its process group has been closed")
        return self._group

    def gather(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        """Prepares an all-gather; all sites must ask for theirs in the same order.

        Args:
            sizes: number of elements of each site's payload, by rank.
            dtype: type of the elements.
        """
        if not self._peer_to_peer:
            return _CollectiveGather(self, sizes, dtype)
        if not self._asked_for_streams:
            self._asked_for_streams = True
            with self.traffic.apart():
                self._streams = open_streams(self)
        if self._streams is not None:
            return StreamGather(self, self._streams, sizes, dtype)
        self._tags += 1
        return _PeerGather(self, sizes, dtype, self._tags)

    def all_reduce(self, tensor: Tensor) -> Reduction:
        """Starts the sum of a tensor over sites, in place; the tensor lies on `device`."""
        self.traffic.add(int(self.ring * tensor.numel() * tensor.element_size()))
        return _GroupReduction(self, dist.all_reduce(tensor, group=self.group, async_op=True))

    def broadcast(self, tensor: Tensor) -> None:
        """Replaces a tensor's values by those of rank 0."""
        if self.rank == 0:
            self.traffic.add((self.world_size - 1) * tensor.numel() * tensor.element_size())
        staged = tensor.to(self.device)
        source = dist.get_global_rank(self.group, 0)
        self.wait(dist.broadcast(staged, source, group=self.group, async_op=True))
        if staged is not tensor:
            tensor.copy_(staged)

    def broadcast_bytes(self, content: bytes) -> bytes:
        """Sends rank 0's bytes to all sites; what others pass is ignored."""
        size = torch.tensor([len(content)], dtype=torch.int64, device=self.device)
        self.broadcast(size)
        data = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self.broadcast(data)
        return data.cpu().numpy().tobytes()

    def gather_objects(self, item: Any) -> list[Any]:
        """Gathers one object a site, by rank, for set-up and checkpoints; see `dadplug.exchange.codec.encode`."""
        return gather_objects(item, self.group, self.wait)

    def lost(self, error: BaseException, peer: int | None = None) -> SiteError:
        """Turns an error of the process group into one that names the site that is gone."""
        return self.sites.lost(error, self.timeout, peer)

    def wait(self, work: dist.Work, peer: int | None = None) -> None:
        """Waits for a piece of work, and names the site that is gone if it fails.

        Raises:
            SiteError: if a site is gone or silent.
        """
        try:
            with self.traffic.waiting():
                work.wait()
        except RuntimeError as error:
            raise self.lost(error, peer) from error

    def prefers_gather(self, nbytes: int) -> bool:
        """Says whether tensors of so many bytes are summed sooner by each site for itself than by an all-reduce.

        Two sites send no more that way, and a gather has one latency where an all-reduce has 2 (S - 1).
        """
        peers = self.world_size - 1
        return self._peer_to_peer and ((peers == 1 and nbytes <= _FEW) or 0 < peers * nbytes <= _PACKETS)


class _GroupReduction:
    def __init__(self, transport: Transport, work: dist.Work) -> None:
        self._transport = transport
        self._work = work

    def wait(self) -> None:
        self._transport.wait(self._work)


class _PeerGather:
    """Point to point: each payload in its exact size, with one latency for any number of sites."""

    def __init__(self, transport: Transport, sizes: Sequence[int], dtype: torch.dtype, tag: int) -> None:
        self._transport = transport
        self._tag = tag
        self._payloads = [torch.zeros(size, dtype=dtype, device=transport.device) for size in sizes]
        self.payload = self._payloads[transport.rank]
        self._global = [dist.get_global_rank(transport.group, rank) for rank in range(transport.world_size)]
        self._receives: dict[int, dist.Work] = {}
        self._sends: dict[int, dist.Work] = {}

    def _peers(self) -> list[int]:
        rank, size = self._transport.rank, self._transport.world_size
        return [(rank + step) % size for step in range(1, size)]

    def post(self) -> None:
        if self._receives:
            return
        for peer in self._peers():
            if self._payloads[peer].numel():
                self._receives[peer] = self._start(dist.irecv, peer)

    def launch(self) -> None:
        self.post()
        for peer in self._peers():
            if self.payload.numel():
                self._sends[peer] = self._start(dist.isend, peer)
                self._transport.traffic.add(self.payload.numel() * self.payload.element_size())

    def _start(self, start: Any, peer: int) -> dist.Work:
        tensor = self.payload if start is dist.isend else self._payloads[peer]
        try:
            work: dist.Work = start(tensor, self._global[peer], group=self._transport.group, tag=self._tag)
            return work
        except RuntimeError as error:
            raise self._transport.lost(error, peer) from error

    def wait(self) -> list[Tensor]:
        for works in (self._receives, self._sends):
            for peer, work in works.items():
                self._transport.wait(work, peer)
            works.clear()
        return self._payloads


class _CollectiveGather:
    """One collective, for backends made for them: payloads padded to the largest."""

    def __init__(self, transport: Transport, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self._transport = transport
        self._sizes = list(sizes)
        self._padded = torch.zeros(max(sizes), dtype=dtype, device=transport.device)
        self._gathered = torch.empty(max(sizes) * len(sizes), dtype=dtype, device=transport.device)
        self.payload = self._padded[: sizes[transport.rank]]
        self._work: dist.Work | None = None

    def post(self) -> None:
        pass

    def launch(self) -> None:
        if not self._padded.numel():
            return
        peers = self._transport.world_size - 1
        self._transport.traffic.add(peers * self._padded.numel() * self._padded.element_size())
        self._work = dist.all_gather_into_tensor(
            self._gathered, self._padded, group=self._transport.group, async_op=True
        )

    def wait(self) -> list[Tensor]:
        if self._work is not None:
            self._transport.wait(self._work)
            self._work = None
        width = self._padded.numel()
        return [self._gathered[rank * width : rank * width + size] for rank, size in enumerate(self._sizes)]


class _Done:
    def wait(self) -> None:
        pass


class _OwnGather:
    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.payload = torch.zeros(size, dtype=dtype, device=device)

    def post(self) -> None:
        pass

    def launch(self) -> None:
        pass

    def wait(self) -> list[Tensor]:
        return [self.payload]


class SingleSite(Transport):
    """The transport of a site that trains alone: every exchange returns what it was given."""

    def __init__(self, traffic: Traffic, device: torch.device) -> None:
        self.sites = Sites(0, [Member(own_name(), "", 0, b"")])
        self.traffic = traffic
        self.rank, self.world_size = 0, 1
        self.copies, self.ring = 0, 0.0
        self.device = device
        self._peer_to_peer = False

    def close(self) -> None:
        pass

    def gather(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        return _OwnGather(sizes[0], dtype, self.device)

    def all_reduce(self, tensor: Tensor) -> Reduction:
        return _Done()

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def broadcast_bytes(self, content: bytes) -> bytes:
        return content

    def gather_objects(self, item: Any) -> list[Any]:
        return [item]
