"""Transport between sites with several processes each: over loopback inside a site, and over one link to the hub.

The leader of a site sends its processes' payloads to the hub as one, and passes on to them what arrives. A sum is
formed in three steps: the leader adds up the tensors of its site, the hub or every leader adds up those of the sites,
and the leader sends the result to its processes. To a method, a site is a node, see `dadplug.exchange.hierarchy`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MismatchError, SiteError
from ..exchange import codec
from ..exchange.codec import MAX_BYTES, check_lengths, decode_objects, encode_object
from ..exchange.hierarchy import Job, NodeMessages, Work, WorkerThreads
from ..exchange.topology import Nodes
from ..exchange.traffic import Traffic
from ..exchange.transport import Gather, PendingSum
from .link import HubLink
from .local_site import LocalGroup, LocalSite
from .site_members import SiteMembers
from .transport import HubGather, HubTransport, bytes_of

_PACKET_BYTES = 1 << 14  # that cost less than a few latencies
_NARROW = (torch.float16, torch.bfloat16)  # added in float32, and rounded once

Result = TypeVar("Result")


class SiteTransport(NodeMessages):
    """Messages between the processes of all sites. All buffers lie on the CPU.

    Args:
        local: processes of this site; None if it has one.
        link: link to the hub, at the leader of the site; None at its other processes.
        sites: the processes by name.
        nodes: ranks of the processes of each site.
        traffic: the meter; what goes to other sites is counted at the leader, once for the site.
        timeout: seconds after which a silent process counts as lost.
        group: process group of all processes, if there is one.
    """

    is_direct = False

    def __init__(
        self,
        local: LocalSite | None,
        link: HubLink | None,
        sites: SiteMembers,
        nodes: Nodes,
        traffic: Traffic,
        timeout: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.workers = WorkerThreads()
        self._process = os.getpid()
        self._last: object = None
        self._local: LocalGroup | None = None
        self._error: SiteError | MismatchError | None = None  # the first one, which has closed the connections
        super().__init__(sites, traffic, sites.rank, torch.device("cpu"), timeout)
        self.nodes = nodes
        self.copies = nodes.count - 1
        self.ring = float(link is not None)
        self._link = link
        self._group = group
        # Two channels: a thread numbers the sums once the tensors of its site have come, in one order at all sites.
        self.hub = None if link is None else HubTransport(link, Traffic(), timeout)
        self.sums = None if link is None else HubTransport(link, Traffic(), timeout)
        if local is not None:
            self._local = local.open_group(timeout)
            self._processes = local.processes
        sites.watch(self)

    @property
    def leader(self) -> int:
        """Rank of the leader of this site."""
        return self.nodes.own[0]

    @property
    def group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("these sites have no process group: connect by dadplug.connect(kit=...)")
        return self._group

    def close(self) -> None:
        if self._process != os.getpid():
            return
        if self._local is None:
            self.workers.close(0.0)
            return
        self._end_workers(self.nodes.peers)
        self._last = None
        self._local.close()

    def __del__(self) -> None:
        self.close()

    def lost(self, error: BaseException, peer: int | None = None) -> SiteError:
        return self._error if isinstance(self._error, SiteError) else super().lost(error, peer)

    # Messages inside the site

    def _start(self, tensor: Tensor, rank: int, tag: int, sends: bool) -> dist.Work:
        assert self._local is not None
        return self._local.start(tensor, self.nodes.own.index(rank), tag, sends)

    def wait(self, work: Work, peer: int | None = None) -> None:
        try:
            with self.traffic.waiting():
                work.wait()
        except RuntimeError as error:
            raise self._failed(self.lost(error, peer)) from error
        self._last = work  # as in `GroupTransport.wait`

    def wait_for(self, job: Job) -> None:
        try:
            super().wait_for(job)
        except (SiteError, MismatchError) as error:
            raise self._failed(error) from error

    def over_hub(self, call: Callable[[HubTransport], Result]) -> Result:
        """Call a function of the transport over the hub, at the leader; the others get its error.

        Raises:
            SiteError: if a site or the hub is lost or silent.
            MismatchError: if the sites do not run the same program.
        """
        assert self.hub is not None
        try:
            with self.traffic.waiting():
                return call(self.hub)
        except (SiteError, MismatchError) as error:
            raise self._failed(error) from error

    def _failed(self, error: SiteError | MismatchError) -> SiteError | MismatchError:
        """Tell the other processes of this site and, if one of these is lost, the other sites; return the error.

        The connections inside the site are closed, so that nobody waits for messages that do not come.
        """
        self._error = self._error or error
        if self._link is None or self._local is None:
            return error
        if self._link.first_lost() is None and not self._link.closed:
            self._link.leave(str(error))
        self._processes.relay(error)
        self._local.close()
        return error

    def _spread(self, content: bytes | None) -> bytes:
        """Send bytes of the leader to all processes of the site; the argument is ignored at the others."""
        if self._local is None:
            assert content is not None
            return content
        size = torch.tensor([0 if content is None else len(content)])
        self.wait(self._broadcast(size), self.leader)
        if not 0 <= int(size) <= MAX_BYTES:
            raise ValueError(f"{self.sites[self.leader]} announces {int(size)} bytes: there may be {MAX_BYTES} at most")
        data = torch.zeros(int(size), dtype=torch.uint8)
        if content:
            data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self.wait(self._broadcast(data), self.leader)
        return bytes_of(data).tobytes()

    def _collect(self, own: bytes) -> list[bytes]:
        """Gather byte strings of the processes of this site, by local rank."""
        if self._local is None:
            return [own]
        lengths, work = self._gather(torch.tensor([len(own)]))
        self.wait(work)
        sizes = [int(length) for length in lengths]
        check_lengths(sizes)
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        every, work = self._gather(padded)
        self.wait(work)
        return [bytes_of(each[:size]).tobytes() for each, size in zip(every, sizes, strict=True)]

    def _broadcast(self, tensor: Tensor) -> dist.Work:
        assert self._local is not None
        return self._begun(lambda local: local.broadcast(tensor))

    def _gather(self, tensor: Tensor) -> tuple[list[Tensor], dist.Work]:
        return self._begun(lambda local: local.gather(tensor))

    def _begun(self, start: Callable[[LocalGroup], Result]) -> Result:
        assert self._local is not None
        try:
            return start(self._local)
        except RuntimeError as error:
            raise self._failed(self.lost(error)) from error

    # Messages between all processes

    def gather(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        return self._open_gather(HubTransport.gather, sizes, dtype)

    def gather_once(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        return self._open_gather(HubTransport.gather_once, sizes, dtype)

    def gather_again(self, first: Gather, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        assert isinstance(first, SiteGather)
        if first.over_hub is None:
            return self._open_gather(HubTransport.gather, sizes, dtype)
        again = partial(HubTransport.gather_again, first=first.over_hub)
        return self._open_gather(lambda hub, totals, dtype: again(hub, sizes=totals, dtype=dtype), sizes, dtype)

    def _open_gather(self, open_gather: Callable[..., Gather], sizes: Sequence[int], dtype: torch.dtype) -> SiteGather:
        totals = [sum(sizes[rank] for rank in ranks) for ranks in self.nodes.members]
        over_hub = None if self.hub is None else open_gather(self.hub, totals, dtype)
        assert over_hub is None or isinstance(over_hub, HubGather)
        return SiteGather(self, over_hub, sizes, dtype, self.tags(self.world_size))

    def all_reduce(self, tensor: Tensor) -> PendingSum:
        if self._local is None:
            assert self.sums is not None
            self.traffic.add(tensor.numel() * tensor.element_size())
            return self.sums.all_reduce(tensor)
        return _SiteSum(self, tensor.view(-1), self.tags(2))

    def broadcast(self, tensor: Tensor) -> None:
        staged = tensor.detach().to("cpu").contiguous()
        if self.hub is not None:
            if self.rank == 0:
                self.traffic.add(staged.numel() * staged.element_size())
            self.over_hub(lambda hub: hub.broadcast(staged))
        if self._local is not None:
            # Gloo of torch 2.8 sends real numbers
            sent = torch.view_as_real(staged) if staged.is_complex() else staged
            self.wait(self._broadcast(sent), self.leader)
        if self.rank and staged.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(staged)

    def broadcast_bytes(self, content: bytes) -> bytes:
        return self._spread(None if self.hub is None else self.over_hub(lambda hub: hub.broadcast_bytes(content)))

    def gather_objects(self, item: Any) -> list[Any]:
        own, refusal = encode_object(item)
        contents = self._collect(own)
        every: bytes | None = None
        if self.hub is not None:
            sites = self.over_hub(lambda hub: hub.gather_bytes(codec.encode(contents)))
            every = codec.encode([content for site in sites for content in codec.decode(site)])
        return decode_objects(codec.decode(self._spread(every)), refusal)

    def end_step(self) -> None:
        if self.hub is not None:
            self.hub.end_step()

    def prefers_gather(self, nbytes: int) -> bool:
        return (self.world_size - 1) * nbytes <= _PACKET_BYTES

    def open_streams(self, timeout: float) -> None:
        raise ValueError(
            "AdaPM's tables and parameter servers exchange messages between pairs of sites, and over a hub each site "
            "has one process for that: start one process at each site"
        )


class SiteGather(Gather):
    """Gather of payloads of all processes: those of a site travel over the hub as one.

    Args:
        transport: the transport.
        over_hub: gather of the sites' payloads, at the leader.
        sizes: number of elements of each process's payload, by rank.
        dtype: type of the elements.
        tag: first of as many tags as there are processes.

    Attributes:
        over_hub: gather of the sites' payloads, at the leader.
    """

    def __init__(
        self, transport: SiteTransport, over_hub: HubGather | None, sizes: Sequence[int], dtype: torch.dtype, tag: int
    ) -> None:
        self.over_hub = over_hub
        self._transport = transport
        self._tag = tag
        members, own = transport.nodes.members, transport.nodes.node
        totals = [sum(sizes[rank] for rank in ranks) for ranks in members]
        flats = [torch.zeros(total, dtype=dtype) for total in totals] if over_hub is None else over_hub.payloads
        parts: dict[int, Tensor] = {}
        for ranks, flat in zip(members, flats, strict=True):
            parts.update(zip(ranks, flat.split([sizes[rank] for rank in ranks]), strict=True))
        self._payloads = [parts[rank] for rank in range(transport.world_size)]
        self._remote = [(ranks[0], flats[slot]) for slot, ranks in enumerate(members) if slot != own]
        self._own_bytes = totals[own] * flats[own].element_size()
        self.payload = self._payloads[transport.rank]
        self._arriving: list[tuple[Work, int]] | None = None
        self._sends: list[tuple[Work, int]] = []
        self._job: Job | None = None

    def post(self) -> None:
        if self._arriving is not None:
            return
        transport = self._transport
        self._arriving = []
        for peer in transport.nodes.peers:
            self._arriving += transport.receive(self._payloads[peer], peer, self._tag + peer)
        if self.over_hub is not None:
            self.over_hub.post()
            return
        for first, flat in self._remote:
            self._arriving += transport.receive(flat, transport.leader, self._tag + first)

    def launch(self) -> None:
        self.post()
        transport, arriving = self._transport, self._arriving or []
        over_hub = self.over_hub
        if over_hub is not None:
            transport.traffic.add(self._own_bytes)
            if not transport.nodes.peers:
                over_hub.launch()
                return
        for peer in transport.nodes.peers:
            self._sends += transport.send(self.payload, peer, self._tag + transport.rank)
        steps: list[tuple[str, Callable[[], None]]] = [("up", lambda: transport.arrive(arriving))]
        if over_hub is not None:
            steps = [("up", partial(self._pass_up, over_hub, arriving)), ("down", partial(self._pass_down, over_hub))]
        self._job = transport.workers.submit(*steps)

    def _pass_up(self, over_hub: HubGather, arriving: Sequence[tuple[Work, int]]) -> None:
        self._transport.arrive(arriving)
        over_hub.launch()

    def _pass_down(self, over_hub: HubGather) -> None:
        transport = self._transport
        over_hub.wait()
        for first, flat in self._remote:
            for peer in transport.nodes.peers:
                self._sends += transport.send(flat, peer, self._tag + first)

    def wait(self) -> list[Tensor]:
        transport = self._transport
        if self._job is not None:
            transport.wait_for(self._job)
            self._job = None
        elif self._arriving is not None and self.over_hub is not None:
            with transport.traffic.waiting():
                self.over_hub.wait()
        transport.wait_all(self._sends)
        self._arriving = None
        return self._payloads


class _SiteSum(PendingSum):
    """Sum over all processes, of a site with several."""

    def __init__(self, transport: SiteTransport, flat: Tensor, tag: int) -> None:
        self._transport = transport
        self._tag = tag
        self._flat = flat
        self._sum: PendingSum | None = None
        self._sends: list[tuple[Work, int]] = []
        peers, leader = transport.nodes.peers, transport.leader
        if transport.sums is None:
            arriving = transport.receive(flat, leader, tag + 1)
            self._sends += transport.send(flat, leader, tag)
            self._job = transport.workers.submit(("back", lambda: transport.arrive(arriving, sums=True)))
            return
        transport.traffic.add(flat.numel() * flat.element_size())
        addends = [torch.empty_like(flat) for _ in peers]
        received = [
            work for room, peer in zip(addends, peers, strict=True) for work in transport.receive(room, peer, tag)
        ]
        add = partial(self._add, transport.sums, addends, received)
        self._job = transport.workers.submit(("up", add), ("down", self._send_result))

    def _add(self, sums: HubTransport, addends: Sequence[Tensor], received: Sequence[tuple[Work, int]]) -> None:
        self._transport.arrive(received)
        total = self._flat.float() if self._flat.dtype in _NARROW else self._flat
        for addend in addends:
            total += addend
        if total is not self._flat:
            self._flat.copy_(total)
        self._sum = sums.all_reduce(self._flat)

    def _send_result(self) -> None:
        transport = self._transport
        assert self._sum is not None
        self._sum.wait()
        for peer in transport.nodes.peers:
            self._sends += transport.send(self._flat, peer, self._tag + 1)

    def wait(self) -> None:
        self._transport.wait_for(self._job)
        self._transport.wait_all(self._sends)
