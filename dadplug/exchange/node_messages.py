"""Messages between pairs of processes, some of which worker threads forward while the main thread computes."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MismatchError
from .topology import Nodes
from .transport import Transport
from .worker_threads import Job, WorkerThreads

MAX_TAGS = 2**30  # tags have 32 bits, and are reused
# Seconds that worker threads have to end, before and after their connections are closed.
_SHORT, _LONG = 0.2, 3.0
_CHECK_SECONDS = 0.5  # after which a waiting site reads the reports of the others


class NodeMessages(Transport):
    """Part of a transport that knows which processes share a node: messages by rank and tag, and waits for them.

    Attributes:
        nodes: the processes of each node.
        workers: threads that pass messages on in the order in which they were sent.
    """

    nodes: Nodes
    workers: WorkerThreads
    _tags = 0

    @abstractmethod
    def wait(self, work: dist.Work, peer: int | None = None) -> None:
        """Wait for an operation of torch.distributed.

        Args:
            work: the operation.
            peer: rank of the site at the other end, if there is one only.

        Raises:
            SiteError: if a site is gone or silent.
        """

    @abstractmethod
    def _start(self, tensor: Tensor, rank: int, tag: int, sends: bool) -> dist.Work:
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

    def send(self, tensor: Tensor, rank: int, tag: int) -> list[tuple[dist.Work, int]]:
        """Start to send a contiguous tensor; return the operations to wait for, each with the rank of the other end."""
        if not tensor.numel():
            return []
        self.traffic.add(tensor.numel() * tensor.element_size(), inside=rank in self.nodes.own)
        return self._begin(tensor, rank, tag, sends=True)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> list[tuple[dist.Work, int]]:
        """Start to receive into a contiguous tensor; return as `send` does."""
        return self._begin(tensor, rank, tag, sends=False) if tensor.numel() else []

    def _begin(self, tensor: Tensor, rank: int, tag: int, sends: bool) -> list[tuple[dist.Work, int]]:
        try:
            return [(self._start(tensor.view(torch.uint8), rank, tag, sends), rank)]
        except MismatchError:
            raise
        except RuntimeError as error:
            raise self.lost(error, rank) from error

    def wait_all(self, works: list[tuple[dist.Work, int]]) -> None:
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
                while not job.wait(_CHECK_SECONDS):
                    # The site that forwards may be alive, and have nothing to forward any more.
                    if (found := self.sites.found_lost()) is not None:
                        raise found
        except _Lost as lost:
            deadline = time.monotonic() + _CHECK_SECONDS
            while lost.peer is None and time.monotonic() < deadline:  # the reports of others name it
                if (found := self.sites.found_lost()) is not None:
                    raise found from lost.error
                time.sleep(_CHECK_SECONDS / 10)
            raise self.lost(lost.error, lost.peer) from lost.error

    def arrive(self, works: Sequence[tuple[dist.Work, int]], origin: int | None = None, *, sums: bool = False) -> None:
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
    """A worker thread has lost a peer; the main thread, which looks for the reason, gets it from `Job.wait`."""

    def __init__(self, error: RuntimeError, peer: int | None) -> None:
        super().__init__(error, peer)
        self.error = error
        self.peer = peer
