"""Hierarchical groups: what crosses the link between machines crosses it once, and spreads inside from there.

A gather sends a process's payload to its machine's other processes, and to one process of each other machine, which
passes it on. A sum is divided among the processes at the same places of all machines: each sums its part inside its
machine, then between machines, and hands it on inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .membership import Sites
from .topology import Machines
from .traffic import Traffic
from .transport import Gather, Reduction, Transport
from .worker_threads import Job, Lanes

_LOOK = 0.5  # seconds after which a site that waits looks at what others have found out
_SHORT, _LONG = 0.2, 3.0  # seconds that lanes have to end, of themselves and once they have been broken off
_MOST_TAGS = 2**30  # tags are 32 bits wide, and used over and over


class HierarchicalTransport(Transport):
    """A transport that knows which processes are on one machine.

    Args:
        group: the process group, of backend gloo; its processes are the sites.
        sites: the sites by name.
        traffic: the meter; what stays inside a machine is counted apart.
        timeout: seconds after which a silent site counts as lost.
        machines: the processes of each machine.
    """

    machines: Machines

    def __init__(
        self, group: dist.ProcessGroup, sites: Sites, traffic: Traffic, timeout: float, machines: Machines
    ) -> None:
        super().__init__(group, sites, traffic, torch.device("cpu"), timeout)
        self.machines = machines
        self.lanes = Lanes()
        self._global = dist.get_process_group_ranks(group)
        self.copies = machines.count - 1
        works = machines.index < machines.owners
        self.ring = 2 * (machines.count - 1) / machines.count / machines.owners if works else 0.0

    def close(self) -> None:
        if "lanes" in vars(self) and not self.lanes.close(_SHORT):
            self._break_off()
            self.lanes.close(_LONG)
        super().close()

    def _break_off(self) -> None:
        """Ends what the lanes wait for: an interpreter that ends while a thread waits inside of gloo is aborted.

        There is no call for it, but a wait that times out closes all of a group's connections; one for a site that is
        gone does not.
        """
        for rank in range(self.world_size):
            if rank != self.rank:
                with suppress(RuntimeError):
                    nothing = dist.irecv(torch.zeros(1), self._global[rank], group=self.group, tag=_MOST_TAGS + 1)
                    if nothing is not None:
                        nothing.wait(timedelta(milliseconds=1))

    def gather(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        return _HierarchicalGather(self, sizes, dtype, self.tags(self.world_size))

    def all_reduce(self, tensor: Tensor) -> Reduction:
        return _HierarchicalReduction(self, tensor.view(-1), self.tags(4))

    def tags(self, count: int) -> int:
        """Sets tags aside, so many from the one that is returned on; all sites ask for theirs in the same order."""
        if self._tags + count > _MOST_TAGS:
            self._tags = 0
        first = self._tags + 1
        self._tags += count
        return first

    def send(self, tensor: Tensor, rank: int, tag: int) -> list[tuple[dist.Work, int]]:
        """Starts to send a contiguous tensor; returns what there is to wait for, with the rank on the other end."""
        if not tensor.numel():
            return []
        self.traffic.add(tensor.numel() * tensor.element_size(), inside=rank in self.machines.own)
        return self._start(dist.isend, tensor, rank, tag)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> list[tuple[dist.Work, int]]:
        """Starts to receive into a contiguous tensor; returns as `send` does."""
        return self._start(dist.irecv, tensor, rank, tag) if tensor.numel() else []

    def _start(self, start, tensor: Tensor, rank: int, tag: int) -> list[tuple[dist.Work, int]]:  # type: ignore[no-untyped-def]  # noqa: ANN001
        try:
            return [(start(tensor.view(torch.uint8), self._global[rank], group=self.group, tag=tag), rank)]
        except RuntimeError as error:
            raise self.lost(error, rank) from error

    def wait_all(self, works: list[tuple[dist.Work, int]]) -> None:
        """Waits for works, on the main thread, where waiting is counted.

        Raises:
            SiteError: if a site is gone or silent.
        """
        for work, peer in works:
            self.wait(work, peer)
        works.clear()

    def wait_for(self, job: Job) -> None:
        """Waits for a job on the lanes.

        Raises:
            SiteError: if a site is gone or silent.
        """
        try:
            with self.traffic.waiting():
                while not job.wait(_LOOK):
                    # What passes on may be alive, and have nothing to pass on any more.
                    if (found := self.sites.found_lost()) is not None:
                        raise found
        except _Lost as lost:
            deadline = time.monotonic() + _LOOK
            while lost.peer is None and time.monotonic() < deadline:  # others know better
                if (found := self.sites.found_lost()) is not None:
                    raise found from lost.error
                time.sleep(_LOOK / 10)
            raise self.lost(lost.error, lost.peer) from lost.error

    def arrive(self, works: Sequence[tuple[dist.Work, int]], origin: int | None = None, *, sums: bool = False) -> None:
        """Waits for works, on a lane.

        Args:
            works: the works.
            origin: the site whose payload the other end passes on; if nothing comes, that one is silent.
            sums: whether the other end sends a sum; if nothing comes, any of its addends may be missing.
        """
        for work, peer in works:
            try:
                work.wait()
            except RuntimeError as error:
                culprit: int | None = peer
                if "imed out" in str(error):
                    culprit = None if sums else peer if origin is None else origin
                raise _Lost(error, culprit) from error


class _Lost(Exception):
    """A lane has lost a peer; the main thread, which looks for the reason, hears of it where it waits."""

    def __init__(self, error: RuntimeError, peer: int | None) -> None:
        self.error = error
        self.peer = peer


class _HierarchicalGather:
    """Each payload goes to every other machine once; what comes from other machines is passed on inside."""

    def __init__(self, transport: HierarchicalTransport, sizes: Sequence[int], dtype: torch.dtype, tag: int) -> None:
        self._transport = transport
        self._tag = tag
        machines = transport.machines
        self._payloads = [torch.zeros(size, dtype=dtype) for size in sizes]
        self.payload = self._payloads[transport.rank]
        remote = [rank for rank in range(transport.world_size) if rank not in machines.own]
        self._passed_on = [rank for rank in remote if machines.receiver(rank) == transport.rank]
        self._relayed = [(rank, machines.receiver(rank)) for rank in remote if rank not in self._passed_on]
        self._sends: list[tuple[dist.Work, int]] = []
        self._jobs: list[Job] = []

    def post(self) -> None:
        if self._jobs:
            return
        remote, inside = self._receive((rank, rank) for rank in self._passed_on), self._receive(self._inside())
        submit = self._transport.lanes.submit
        self._jobs = [submit(("relay", lambda: self._pass_on(remote))), submit(("arrive", lambda: self._take(inside)))]

    def _inside(self) -> list[tuple[int, int]]:
        """Whose payloads come from inside the machine, and by whom."""
        return [*((rank, rank) for rank in self._transport.machines.peers), *self._relayed]

    def _receive(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, list[tuple[dist.Work, int]]]]:
        receive = self._transport.receive
        return [(rank, receive(self._payloads[rank], through, self._tag + rank)) for rank, through in pairs]

    def _pass_on(self, arriving: Sequence[tuple[int, list[tuple[dist.Work, int]]]]) -> None:
        for rank, works in arriving:
            self._transport.arrive(works)
            for peer in self._transport.machines.peers:
                self._sends += self._transport.send(self._payloads[rank], peer, self._tag + rank)

    def _take(self, arriving: Sequence[tuple[int, list[tuple[dist.Work, int]]]]) -> None:
        for rank, works in arriving:
            self._transport.arrive(works, origin=rank)

    def launch(self) -> None:
        self.post()
        machines = self._transport.machines
        for rank in (*machines.partners(machines.index), *machines.peers):
            self._sends += self._transport.send(self.payload, rank, self._tag + self._transport.rank)

    def wait(self) -> list[Tensor]:
        transport = self._transport
        for job in self._jobs:
            transport.wait_for(job)
        self._jobs.clear()
        transport.wait_all(self._sends)
        return self._payloads


class _HierarchicalReduction:
    """A sum in four hops: to the part's owner inside, to its piece's owner between machines, and back both ways."""

    def __init__(self, transport: HierarchicalTransport, flat: Tensor, tag: int) -> None:
        self._transport = transport
        self._tag = tag
        machines = transport.machines
        parts = flat.tensor_split(machines.owners)
        self._sends: list[tuple[dist.Work, int]] = []
        self._receives: list[tuple[dist.Work, int]] = []
        steps: list[tuple[str, Callable[[], None]]] = []
        if machines.index < machines.owners:
            self._part = parts[machines.index]
            self._pieces = self._part.tensor_split(machines.count)
            self._addends = [torch.empty_like(self._part) for _ in machines.peers]
            self._arriving = self._receive_all(self._addends, machines.peers, tag)
            steps = [("up", self._sum_inside), ("between", self._sum_between), ("down", self._hand_on)]
        for index, part in enumerate(parts):
            if index != machines.index:
                owner = machines.own[index]
                self._receives += transport.receive(part, owner, tag + 3)
                self._sends += transport.send(part, owner, tag)
        self._job = transport.lanes.submit(*steps, ("back", lambda: transport.arrive(self._receives, sums=True)))

    def _receive_all(self, places: Sequence[Tensor], ranks: Sequence[int], tag: int) -> list[tuple[dist.Work, int]]:
        pairs = zip(places, ranks, strict=True)
        return [work for place, rank in pairs for work in self._transport.receive(place, rank, tag)]

    def _sum_inside(self) -> None:
        transport, machines = self._transport, self._transport.machines
        transport.arrive(self._arriving)
        for addend in self._addends:
            self._part.add_(addend)
        partners, own = machines.partners(machines.index), self._pieces[machines.machine]
        self._addends = [torch.empty_like(own) for _ in partners]
        self._arriving = self._receive_all(self._addends, partners, self._tag + 1)
        for piece, rank in zip(self._others(), partners, strict=True):
            self._sends += transport.send(piece, rank, self._tag + 1)

    def _sum_between(self) -> None:
        transport, machines = self._transport, self._transport.machines
        transport.arrive(self._arriving, sums=True)
        own = self._pieces[machines.machine]
        for addend in self._addends:
            own.add_(addend)
        partners = machines.partners(machines.index)
        self._arriving = self._receive_all(self._others(), partners, self._tag + 2)
        for rank in partners:
            self._sends += transport.send(own, rank, self._tag + 2)

    def _hand_on(self) -> None:
        self._transport.arrive(self._arriving, sums=True)
        for rank in self._transport.machines.peers:
            self._sends += self._transport.send(self._part, rank, self._tag + 3)

    def _others(self) -> list[Tensor]:
        """The pieces of the other machines."""
        machine = self._transport.machines.machine
        return [piece for number, piece in enumerate(self._pieces) if number != machine]

    def wait(self) -> None:
        self._transport.wait_for(self._job)
        self._transport.wait_all(self._sends)
