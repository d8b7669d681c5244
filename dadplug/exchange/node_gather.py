"""What the processes of a machine hand to one of them, which works for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .hierarchy import HierarchicalTransport
from .worker_threads import Job

Collected = tuple[list[int], Tensor]
"""A message: integers, and numbers."""


class Collection:
    """Messages of any length from a machine's processes to their owner, step after step.

    Args:
        transport: the transport.
        owner: place of the owner among the processes of its machine.
        integers: number of integers in a message.
        dtype: type of the numbers.
    """

    def __init__(self, transport: HierarchicalTransport, owner: int, integers: int, dtype: torch.dtype) -> None:
        self._transport = transport
        self._tag = transport.tags(2)
        self._integers = integers
        self._dtype = dtype
        machines = transport.machines
        self.is_owner = machines.index == owner
        self._owner = machines.own[owner]
        self._heads: list[Tensor] = []
        self._bodies: list[Tensor] = []
        self._job: Job | None = None
        self._sends: list[tuple[dist.Work, int]] = []

    def post(self) -> None:
        """Makes ready to receive, at the owner; does nothing when called again before `wait`."""
        if not self.is_owner or self._job is not None:
            return
        transport = self._transport
        peers = transport.machines.peers
        self._heads = [torch.zeros(1 + self._integers, dtype=torch.int64) for _ in peers]
        arriving = [
            work
            for head, peer in zip(self._heads, peers, strict=True)
            for work in transport.receive(head, peer, self._tag)
        ]
        self._job = transport.lanes.submit(("up", lambda: self._receive(arriving)))

    def _receive(self, arriving: list[tuple[dist.Work, int]]) -> None:
        transport = self._transport
        transport.arrive(arriving)
        self._bodies = [torch.empty(int(head[0]), dtype=self._dtype) for head in self._heads]
        for body, peer in zip(self._bodies, transport.machines.peers, strict=True):
            transport.arrive(transport.receive(body, peer, self._tag + 1))

    def send(self, integers: Sequence[int], numbers: Tensor) -> None:
        """Hands this process's message to the owner.

        Args:
            integers: the integers.
            numbers: a contiguous vector, left alone until `wait`.
        """
        head = torch.tensor([numbers.numel(), *integers], dtype=torch.int64)
        self._sends += self._transport.send(head, self._owner, self._tag)
        self._sends += self._transport.send(numbers, self._owner, self._tag + 1)
        self._kept = head, numbers

    @property
    def over(self) -> bool:
        """Whether all has come, at the owner; elsewhere there is nothing to come."""
        return not self.is_owner or (self._job is not None and self._job.over)

    def wait(self) -> list[Collected]:
        """Waits for the other processes' messages, in the order of their ranks; there are none but at the owner.

        Raises:
            SiteError: if a site is gone or silent.
        """
        self.post()
        if self._job is not None:
            self._transport.wait_for(self._job)
            self._job = None
        self._transport.wait_all(self._sends)
        return [(head[1:].tolist(), body) for head, body in zip(self._heads, self._bodies, strict=True)]
