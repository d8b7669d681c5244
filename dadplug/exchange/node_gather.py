"""Gather of messages from the processes of a node at one of them, which sends for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MismatchError
from .node_messages import NodeMessages
from .worker_threads import Job

NodeMessage = tuple[list[int], Tensor]
"""Integers, and a flat tensor of values."""


class NodeGather:
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
        self._transport = transport
        self._tag = transport.tags(2)
        self._integers = integers
        self._dtype = dtype
        self._values = values
        nodes = transport.nodes
        self.is_owner = nodes.index == owner
        self._owner = nodes.own[owner]
        self._headers: list[Tensor] = []
        self._bodies: list[Tensor] = []
        self._job: Job | None = None
        self._sends: list[tuple[dist.Work, int]] = []

    def post(self) -> None:
        """Prepare to receive, at the owner; do nothing when called again before `wait`."""
        if not self.is_owner or self._job is not None:
            return
        transport = self._transport
        peers = transport.nodes.peers
        self._headers = [torch.zeros(1 + self._integers, dtype=torch.int64) for _ in peers]
        arriving = [
            work
            for header, peer in zip(self._headers, peers, strict=True)
            for work in transport.receive(header, peer, self._tag)
        ]
        self._job = transport.workers.submit(("up", lambda: self._receive(arriving)))

    def _receive(self, arriving: list[tuple[dist.Work, int]]) -> None:
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
        return not self.is_owner or (self._job is not None and self._job.over)

    def wait(self) -> list[NodeMessage]:
        """Wait for the messages.

        Returns:
            At the owner, the messages of the other processes in the order of their ranks; elsewhere none.

        Raises:
            SiteError: if a site is gone or silent.
            MismatchError: if a site announces a message of another size than its integers give.
        """
        self.post()
        if self._job is not None:
            self._transport.wait_for(self._job)
            self._job = None
        self._transport.wait_all(self._sends)
        return [(header[1:].tolist(), body) for header, body in zip(self._headers, self._bodies, strict=True)]
