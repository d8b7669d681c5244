"""Hierarchical groups: a payload crosses the link between two nodes once, and is forwarded inside the node.

A gather sends a process's payload to the other processes of its node, and to one process of each other node, which
forwards it. A sum is divided among the processes with the same index on all nodes: each sums its part inside its node,
then between nodes, and sends the result to the processes of its node. Messages travel on connections of the processes'
own, inside a node by Unix sockets where there are any, or else by gloo.
"""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MismatchError
from .framing import bytes_of
from .group_transport import MAX_TAGS, GroupTransport, Work
from .handshake import Deadline
from .status import PeerNames
from .traffic import Traffic
from .transport import Gather, Nodes, PendingSum, Transport

Step = tuple[str, Callable[[], None]]
"""Name of a worker thread, and what it runs."""
Job = Future[None]
"""Steps that run one after the other, each on the worker thread that it names; an exception ends them."""


class WorkerThreads:
    """Threads by name, each started when first used, that run their jobs in the order of submission."""

    def __init__(self) -> None:
        self._queues: dict[str, SimpleQueue[tuple[Job, Sequence[Step]] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, *steps: Step) -> Job:
        """Start a job.

        Args:
            steps: the steps, at least one, each with the name of its worker thread.
        """
        job = Job()
        self._put(job, steps)
        return job

    def _put(self, job: Job, steps: Sequence[Step]) -> None:
        """Let the thread of the first step run it."""
        name = steps[0][0]
        with self._lock:
            if name not in self._queues:
                self._queues[name] = SimpleQueue()
                thread = threading.Thread(target=self._run, args=(name,), name=f"dadplug-{name}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queues[name].put((job, steps))

    def _run(self, name: str) -> None:
        queue = self._queues[name]
        while (item := queue.get()) is not None:
            job, steps = item
            try:
                steps[0][1]()
            except BaseException as error:
                job.set_exception(error)
            else:
                if len(steps) > 1:
                    self._put(job, steps[1:])
                else:
                    job.set_result(None)
            del item, job, steps  # they hold the transport, which is collected when it is not used any more

    def close(self, seconds: float) -> bool:
        """End the threads once they have run what has been submitted.

        Args:
            seconds: time to wait at most.

        Returns:
            Whether they have ended.
        """
        for queue in self._queues.values():
            queue.put(None)
        deadline = Deadline(seconds)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline.left)
        return not any(thread.is_alive() for thread in self._threads)


# Seconds that worker threads have to end, before and after their connections are closed.
_SHORT, _LONG = 0.2, 3.0
_CHECK_SECONDS = 0.5  # after which a waiting site reads the reports of the others


class NodeMessages(Transport):
    """Part of a transport with several processes on a node: messages by rank and tag, and waits for them.

    Attributes:
        nodes: the processes of each node.
        workers: threads that pass messages on in the order in which they were sent.
    """

    nodes: Nodes
    workers: WorkerThreads
    _tags = 0

    @abstractmethod
    def wait(self, work: Work, peer: int | None = None) -> None:
        """Wait for an operation of torch.distributed.

        Args:
            work: the operation.
            peer: rank of the site at the other end, if there is one only.

        Raises:
            SiteError: if a site is gone or silent.
        """

    @abstractmethod
    def _start(self, tensor: Tensor, rank: int, tag: int, sends: bool) -> Work:
        """Start to send or to receive a flat tensor of bytes.

        Raises:
            RuntimeError: if the connection is closed.
        """

    def _end_workers(self, peers: Iterable[int]) -> None:
        """End the worker threads, and what they wait for: one that waits inside gloo at the end aborts the interpreter.

        Args:
            peers: ranks of the sites at the other ends of connections.
        """
        if not self.workers.close(_SHORT):
            self._close_connections(peers)
            self.workers.close(_LONG)

    def _close_connections(self, peers: Iterable[int]) -> None:
        """End what the worker threads wait for.

        gloo has no call for it, but a wait that times out closes all connections of a group; a wait for a site that is
        gone does not.
        """
        for rank in peers:
            with suppress(RuntimeError):
                nothing = self._start(torch.zeros(1), rank, MAX_TAGS + 1, sends=False)
                if nothing is not None:
                    nothing.wait(timedelta(milliseconds=1))

    def tags(self, count: int) -> int:
        """Reserve consecutive tags, and return the first; all sites must reserve theirs in the same order."""
        if self._tags + count > MAX_TAGS:
            self._tags = 0
        first = self._tags + 1
        self._tags += count
        return first

    def send(self, tensor: Tensor, rank: int, tag: int) -> list[tuple[Work, int]]:
        """Start to send a contiguous tensor; return the operations to wait for, each with the rank of the other end."""
        if not tensor.numel():
            return []
        self.traffic.add(tensor.numel() * tensor.element_size(), inside=rank in self.nodes.own)
        return self._begin(tensor, rank, tag, sends=True)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> list[tuple[Work, int]]:
        """Start to receive into a contiguous tensor; return as `send` does."""
        return self._begin(tensor, rank, tag, sends=False) if tensor.numel() else []

    def _begin(self, tensor: Tensor, rank: int, tag: int, sends: bool) -> list[tuple[Work, int]]:
        try:
            return [(self._start(tensor.view(torch.uint8), rank, tag, sends), rank)]
        except MismatchError:
            raise
        except RuntimeError as error:
            raise self.lost(error, rank) from None

    def wait_all(self, works: list[tuple[Work, int]]) -> None:
        """Wait for operations on the main thread, and count the time as waiting.

        Raises:
            SiteError: if a site is gone or silent.
        """
        for work, peer in works:
            self.wait(work, peer)
        works.clear()

    def wait_for(self, job: Job) -> None:
        """Wait for a job of the worker threads.

        Raises:
            SiteError: if a site is gone or silent.
        """
        try:
            with self.traffic.waiting():
                while not wait([job], _CHECK_SECONDS).done:
                    # The site that forwards may be alive, and have nothing to forward any more.
                    if (found := self.sites.found_lost()) is not None:
                        raise found
                job.result()
        except _Lost as lost:
            deadline = Deadline(_CHECK_SECONDS)
            while lost.peer is None and not deadline.over:  # the reports of others name it
                if (found := self.sites.found_lost()) is not None:
                    raise found from lost.error
                time.sleep(_CHECK_SECONDS / 10)
            raise self.lost(lost.error, lost.peer) from None

    def arrive(self, works: Sequence[tuple[Work, int]], origin: int | None = None, *, sums: bool = False) -> None:
        """Wait for operations on a worker thread.

        Args:
            works: the operations, each with the rank of the other end.
            origin: the site whose payload the other end forwards; after a timeout, that site is silent.
            sums: whether the other end sends a sum; after a timeout, any of its addends may be missing.

        Raises:
            _Lost: if an operation fails.
        """
        for work, peer in works:
            try:
                work.wait()
            except MismatchError:
                raise
            except RuntimeError as error:
                culprit: int | None = peer
                if "imed out" in str(error):
                    culprit = None if sums else peer if origin is None else origin
                raise _Lost(error, culprit) from error


class _Lost(Exception):
    """A worker thread has lost a peer; the main thread, which looks for the reason, gets it from its job."""

    def __init__(self, error: RuntimeError, peer: int | None) -> None:
        super().__init__(error, peer)
        self.error = error
        self.peer = peer


Messages = TypeVar("Messages", bound=NodeMessages)


class Forwarding(Generic[Messages]):
    """Messages of one exchange that worker threads pass on inside a node: what is sent, and the jobs that receive.

    Args:
        transport: the transport.
        tag: first of its tags.
    """

    def __init__(self, transport: Messages, tag: int) -> None:
        self._transport = transport
        self._tag = tag
        self._sends: list[tuple[Work, int]] = []
        self._jobs: list[Job] = []

    def _receive_all(self, places: Iterable[Tensor], ranks: Iterable[int], tag: int) -> list[tuple[Work, int]]:
        """Start to receive a tensor from each of some ranks."""
        pairs = zip(places, ranks, strict=True)
        return [work for place, rank in pairs for work in self._transport.receive(place, rank, tag)]

    def finish(self) -> None:
        """Wait until all has been received and sent.

        Raises:
            SiteError: if a site is gone or silent.
        """
        for job in self._jobs:
            self._transport.wait_for(job)
        self._jobs.clear()
        self._transport.wait_all(self._sends)


NodeMessage = tuple[list[int], Tensor]
"""Integers, and a flat tensor of values."""


class NodeGather(Forwarding[NodeMessages]):
    """Messages of varying length from the processes of a node to their owner, step after step.

    Args:
        transport: the transport.
        owner: index of the owner among the processes of its node.
        integers: number of integers in a message.
        dtype: type of the values.
        values: returns the number of values of a message from its integers, None if no message has such integers.
            What a process announces is compared with it before memory is allocated.
    """

    def __init__(
        self,
        transport: NodeMessages,
        owner: int,
        integers: int,
        dtype: torch.dtype,
        values: Callable[[Sequence[int]], int | None],
    ) -> None:
        super().__init__(transport, transport.tags(2))
        self._integers = integers
        self._dtype = dtype
        self._values = values
        nodes = transport.nodes
        self.is_owner = nodes.index == owner
        self._owner = nodes.own[owner]
        self._headers: list[Tensor] = []
        self._bodies: list[Tensor] = []

    def post(self) -> None:
        """Prepare to receive, at the owner; do nothing when called again before `wait`."""
        if not self.is_owner or self._jobs:
            return
        transport = self._transport
        peers = transport.nodes.peers
        self._headers = [torch.zeros(1 + self._integers, dtype=torch.int64) for _ in peers]
        arriving = self._receive_all(self._headers, peers, self._tag)
        self._jobs = [transport.workers.submit(("up", lambda: self._receive(arriving)))]

    def _receive(self, arriving: list[tuple[Work, int]]) -> None:
        transport = self._transport
        transport.arrive(arriving)
        peers = transport.nodes.peers
        sizes = [self._checked_size(header, peer) for header, peer in zip(self._headers, peers, strict=True)]
        self._bodies = [torch.empty(size, dtype=self._dtype) for size in sizes]
        for body, peer in zip(self._bodies, peers, strict=True):
            transport.arrive(transport.receive(body, peer, self._tag + 1))

    def _checked_size(self, header: Tensor, peer: int) -> int:
        """Return the number of values that a process announces.

        Raises:
            MismatchError: if its integers do not give the same number.
        """
        size, *integers = header.tolist()
        expected = self._values(integers)
        if size != expected:
            sites = self._transport.sites
            due = "does not fit the model" if expected is None else f"should have {expected} values"
            raise MismatchError(
                f"{sites[peer]} announces a message of {size} values to {sites[self._transport.rank]}, which {due}: do "
                "both run the same model and the same version of dadplug?"
            )
        return int(size)

    def send(self, integers: Sequence[int], values: Tensor) -> None:
        """Send this process's message to the owner.

        Args:
            integers: the integers.
            values: a contiguous flat tensor, which must not change until `wait`.
        """
        header = torch.tensor([values.numel(), *integers], dtype=torch.int64)
        self._sends += self._transport.send(header, self._owner, self._tag)
        self._sends += self._transport.send(values, self._owner, self._tag + 1)
        self._kept = header, values

    @property
    def over(self) -> bool:
        """Whether all messages have arrived, at the owner; true for the other processes, which receive none."""
        return not self.is_owner or (bool(self._jobs) and self._jobs[0].done())

    def wait(self) -> list[NodeMessage]:
        """Wait for the messages.

        Returns:
            At the owner, the messages of the other processes in the order of their ranks; elsewhere none.

        Raises:
            SiteError: if a site is gone or silent.
            MismatchError: if a site announces a message of another size than its integers give.
        """
        self.post()
        self.finish()
        return [(header[1:].tolist(), body) for header, body in zip(self._headers, self._bodies, strict=True)]


class HierarchicalTransport(GroupTransport, NodeMessages):
    """Transport for nodes with several processes each.

    Args:
        group: the process group, of backend gloo; its processes are the sites.
        sites: the sites by name.
        traffic: the meter; it counts messages inside a node separately.
        timeout: seconds after which a silent site counts as lost.
        nodes: the processes of each node.
    """

    has_all_to_all = False  # payloads are forwarded to all processes of a node

    def __init__(
        self, group: dist.ProcessGroup, sites: PeerNames, traffic: Traffic, timeout: float, nodes: Nodes
    ) -> None:
        self.workers = WorkerThreads()
        super().__init__(group, sites, traffic, torch.device("cpu"), timeout)
        self.nodes = nodes
        self.copies = nodes.count - 1
        works = nodes.index < nodes.owners
        self.ring = 2 * (nodes.count - 1) / nodes.count / nodes.owners if works else 0.0

    def close(self) -> None:
        if self._process != os.getpid():
            return
        self._end_workers(rank for rank in range(self.world_size) if rank != self.rank)
        super().close()

    def _close_connections(self, peers: Iterable[int]) -> None:
        if self._sockets is None:
            super()._close_connections(peers)
        else:
            self._sockets.shut_down()

    def gather(self, sizes: Sequence[int], dtype: torch.dtype, **use: Any) -> Gather:
        return _HierarchicalGather(self, sizes, dtype, self.tags(self.world_size))

    def all_reduce(self, tensor: Tensor) -> PendingSum:
        return PendingSum(_HierarchicalReduction(self, tensor.view(-1), self.tags(4)).finish)

    def tags(self, count: int) -> int:
        self._open_sockets()
        return super().tags(count)

    def _start(self, tensor: Tensor, rank: int, tag: int, sends: bool) -> Work:
        return self.start(bytes_of(tensor), rank, tag, sends)


class _HierarchicalGather(Forwarding[HierarchicalTransport], Gather):
    """Gather that sends each payload to every other node once, and forwards payloads of other nodes inside."""

    def __init__(self, transport: HierarchicalTransport, sizes: Sequence[int], dtype: torch.dtype, tag: int) -> None:
        super().__init__(transport, tag)
        nodes = transport.nodes
        self._payloads = [torch.zeros(size, dtype=dtype) for size in sizes]
        self.payload = self._payloads[transport.rank]
        remote = [rank for rank in range(transport.world_size) if rank not in nodes.own]
        self._forwarded = [rank for rank in remote if nodes.receiver(rank) == transport.rank]
        relayed = [(rank, nodes.receiver(rank)) for rank in remote if rank not in self._forwarded]
        # Sites whose payloads come from inside the node, each with the rank that sends it.
        self._inside = [*((rank, rank) for rank in nodes.peers), *relayed]

    def post(self) -> None:
        if self._jobs:
            return
        remote, inside = self._receive((rank, rank) for rank in self._forwarded), self._receive(self._inside)
        submit = self._transport.workers.submit
        self._jobs = [
            submit(("relay", lambda: self._forward(remote))),
            submit(("arrive", lambda: self._receive_inside(inside))),
        ]

    def _receive(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, list[tuple[Work, int]]]]:
        receive = self._transport.receive
        return [(rank, receive(self._payloads[rank], through, self._tag + rank)) for rank, through in pairs]

    def _forward(self, arriving: Sequence[tuple[int, list[tuple[Work, int]]]]) -> None:
        for rank, works in arriving:
            self._transport.arrive(works)
            for peer in self._transport.nodes.peers:
                self._sends += self._transport.send(self._payloads[rank], peer, self._tag + rank)

    def _receive_inside(self, arriving: Sequence[tuple[int, list[tuple[Work, int]]]]) -> None:
        for rank, works in arriving:
            self._transport.arrive(works, origin=rank)

    def launch(self) -> None:
        self.post()
        nodes = self._transport.nodes
        for rank in (*nodes.partners(nodes.index), *nodes.peers):
            self._sends += self._transport.send(self.payload, rank, self._tag + self._transport.rank)

    def wait(self) -> list[Tensor]:
        self.finish()
        return self._payloads


class _HierarchicalReduction(Forwarding[HierarchicalTransport]):
    """Sum in four hops: to the part's owner inside the node, to the piece's owner between nodes, and back."""

    def __init__(self, transport: HierarchicalTransport, flat: Tensor, tag: int) -> None:
        super().__init__(transport, tag)
        nodes = transport.nodes
        parts = flat.tensor_split(nodes.owners)
        self._receives: list[tuple[Work, int]] = []
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
        back = "back", lambda: transport.arrive(self._receives, sums=True)
        self._jobs = [transport.workers.submit(*steps, back)]

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
