"""Hierarchical groups: a payload crosses the link between two nodes once, and is forwarded inside the node.

A gather sends a process's payload to the other processes of its node, and to one process of each other node, which
forwards it. A sum is divided among the processes with the same index on all nodes: each sums its part inside its node,
then between nodes, and sends the result to the processes of its node. Messages travel on connections of the processes'
own, inside a node by Unix sockets where there are any, or else by gloo.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .group_transport import GroupTransport
from .node_messages import NodeMessages
from .sites import Sites
from .socket_setup import connect_sockets
from .socket_transport import mismatch
from .tagged_sockets import TaggedSockets
from .topology import Nodes
from .traffic import Traffic
from .transport import Gather, Reduction
from .worker_threads import Job, WorkerThreads


class HierarchicalTransport(GroupTransport, NodeMessages):
    """Transport that knows which processes share a node.

    Args:
        group: the process group, of backend gloo; its processes are the sites.
        sites: the sites by name.
        traffic: the meter; it counts messages inside a node separately.
        timeout: seconds after which a silent site counts as lost.
        nodes: the processes of each node.
    """

    def __init__(self, group: dist.ProcessGroup, sites: Sites, traffic: Traffic, timeout: float, nodes: Nodes) -> None:
        self.workers = WorkerThreads()
        self._messages: TaggedSockets | None = None
        super().__init__(group, sites, traffic, torch.device("cpu"), timeout)
        self.nodes = nodes
        self.has_all_to_all = False  # payloads are forwarded to all processes of a node
        self._global = dist.get_process_group_ranks(group)
        self.copies = nodes.count - 1
        works = nodes.index < nodes.owners
        self.ring = 2 * (nodes.count - 1) / nodes.count / nodes.owners if works else 0.0

    def close(self) -> None:
        if self._process != os.getpid():
            return
        self._end_workers(rank for rank in range(self.world_size) if rank != self.rank)
        if self._messages is not None:
            self._messages.close()
        super().close()

    def _close_connections(self, peers: Iterable[int]) -> None:
        if self._messages is None:
            super()._close_connections(peers)
        else:
            self._messages.shut_down()

    def gather(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        return _HierarchicalGather(self, sizes, dtype, self.tags(self.world_size))

    def all_reduce(self, tensor: Tensor) -> Reduction:
        return _HierarchicalReduction(self, tensor.view(-1), self.tags(4))

    def tags(self, count: int) -> int:
        if not self._sockets_tried:
            self._connect()
        return super().tags(count)

    def _connect(self) -> None:
        """Open the connections of the processes, which all of them do together."""
        self._sockets_tried = True
        with self.traffic.apart():
            sockets = connect_sockets(self, self.nodes.peers)
        if sockets is not None:
            self._messages = TaggedSockets(sockets, self.timeout, {rank: mismatch(self, rank) for rank in sockets})

    def _start(self, tensor: Tensor, rank: int, tag: int, sends: bool) -> dist.Work:
        if self._messages is not None:
            return self._messages.start(tensor, rank, tag, sends)
        start: Any = dist.isend if sends else dist.irecv
        work: dist.Work = start(tensor, self._global[rank], group=self.group, tag=tag)
        return work


class _HierarchicalGather(Gather):
    """Gather that sends each payload to every other node once, and forwards payloads of other nodes inside."""

    def __init__(self, transport: HierarchicalTransport, sizes: Sequence[int], dtype: torch.dtype, tag: int) -> None:
        self._transport = transport
        self._tag = tag
        nodes = transport.nodes
        self._payloads = [torch.zeros(size, dtype=dtype) for size in sizes]
        self.payload = self._payloads[transport.rank]
        remote = [rank for rank in range(transport.world_size) if rank not in nodes.own]
        self._forwarded = [rank for rank in remote if nodes.receiver(rank) == transport.rank]
        self._relayed = [(rank, nodes.receiver(rank)) for rank in remote if rank not in self._forwarded]
        self._sends: list[tuple[dist.Work, int]] = []
        self._jobs: list[Job] = []

    def post(self) -> None:
        if self._jobs:
            return
        remote, inside = self._receive((rank, rank) for rank in self._forwarded), self._receive(self._inside())
        submit = self._transport.workers.submit
        self._jobs = [
            submit(("relay", lambda: self._forward(remote))),
            submit(("arrive", lambda: self._receive_inside(inside))),
        ]

    def _inside(self) -> list[tuple[int, int]]:
        """Return the sites whose payloads come from inside the node, each with the rank that sends it."""
        return [*((rank, rank) for rank in self._transport.nodes.peers), *self._relayed]

    def _receive(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, list[tuple[dist.Work, int]]]]:
        receive = self._transport.receive
        return [(rank, receive(self._payloads[rank], through, self._tag + rank)) for rank, through in pairs]

    def _forward(self, arriving: Sequence[tuple[int, list[tuple[dist.Work, int]]]]) -> None:
        for rank, works in arriving:
            self._transport.arrive(works)
            for peer in self._transport.nodes.peers:
                self._sends += self._transport.send(self._payloads[rank], peer, self._tag + rank)

    def _receive_inside(self, arriving: Sequence[tuple[int, list[tuple[dist.Work, int]]]]) -> None:
        for rank, works in arriving:
            self._transport.arrive(works, origin=rank)

    def launch(self) -> None:
        self.post()
        nodes = self._transport.nodes
        for rank in (*nodes.partners(nodes.index), *nodes.peers):
            self._sends += self._transport.send(self.payload, rank, self._tag + self._transport.rank)

    def wait(self) -> list[Tensor]:
        transport = self._transport
        for job in self._jobs:
            transport.wait_for(job)
        self._jobs.clear()
        transport.wait_all(self._sends)
        return self._payloads


class _HierarchicalReduction(Reduction):
    """Sum in four hops: to the part's owner inside the node, to the piece's owner between nodes, and back."""

    def __init__(self, transport: HierarchicalTransport, flat: Tensor, tag: int) -> None:
        self._transport = transport
        self._tag = tag
        nodes = transport.nodes
        parts = flat.tensor_split(nodes.owners)
        self._sends: list[tuple[dist.Work, int]] = []
        self._receives: list[tuple[dist.Work, int]] = []
        steps: list[tuple[str, Callable[[], None]]] = []
        if nodes.index < nodes.owners:
            self._part = parts[nodes.index]
            self._pieces = self._part.tensor_split(nodes.count)
            self._addends = [torch.empty_like(self._part) for _ in nodes.peers]
            self._arriving = self._receive_all(self._addends, nodes.peers, tag)
            steps = [("up", self._sum_inside), ("between", self._sum_between), ("down", self._send_result)]
        for index, part in enumerate(parts):
            if index != nodes.index:
                owner = nodes.own[index]
                self._receives += transport.receive(part, owner, tag + 3)
                self._sends += transport.send(part, owner, tag)
        self._job = transport.workers.submit(*steps, ("back", lambda: transport.arrive(self._receives, sums=True)))

    def _receive_all(self, places: Sequence[Tensor], ranks: Sequence[int], tag: int) -> list[tuple[dist.Work, int]]:
        pairs = zip(places, ranks, strict=True)
        return [work for place, rank in pairs for work in self._transport.receive(place, rank, tag)]

    def _sum_inside(self) -> None:
        transport, nodes = self._transport, self._transport.nodes
        transport.arrive(self._arriving)
        for addend in self._addends:
            self._part.add_(addend)
        partners, own = nodes.partners(nodes.index), self._pieces[nodes.node]
        self._addends = [torch.empty_like(own) for _ in partners]
        self._arriving = self._receive_all(self._addends, partners, self._tag + 1)
        for piece, rank in zip(self._others(), partners, strict=True):
            self._sends += transport.send(piece, rank, self._tag + 1)

    def _sum_between(self) -> None:
        transport, nodes = self._transport, self._transport.nodes
        transport.arrive(self._arriving, sums=True)
        own = self._pieces[nodes.node]
        for addend in self._addends:
            own.add_(addend)
        partners = nodes.partners(nodes.index)
        self._arriving = self._receive_all(self._others(), partners, self._tag + 2)
        for rank in partners:
            self._sends += transport.send(own, rank, self._tag + 2)

    def _send_result(self) -> None:
        self._transport.arrive(self._arriving, sums=True)
        for rank in self._transport.nodes.peers:
            self._sends += self._transport.send(self._part, rank, self._tag + 3)

    def _others(self) -> list[Tensor]:
        """Return the pieces of the other nodes."""
        node = self._transport.nodes.node
        return [piece for number, piece in enumerate(self._pieces) if number != node]

    def wait(self) -> None:
        self._transport.wait_for(self._job)
        self._transport.wait_all(self._sends)
