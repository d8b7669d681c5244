"""Processes of this machine that train together, one call after the other."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from ...errors import RunFailedError
from ...support.processes import Child, answer, free_port
from .link import ADDRESS, Link, Relay, enter

_GRACE = 20.0  # seconds for the others to return after one has failed


class Pool:
    """Processes of this machine that train together, started when they are first needed and kept from call to call.

    Args:
        shared: what all calls get as their first argument; it is sent to each process once.
        link: the link between the processes; loopback if None.

    Raises:
        ValueError: if `shared` cannot be sent to another process.
    """

    def __init__(self, shared: object, link: Link | None = None) -> None:
        try:
            self._shared = pickle.dumps(shared)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                "build and dataset have to reach other processes: define build, and the classes of the data set, at "
                f"the top level of a module ({error})"
            ) from error
        self._link = link
        self._relay: Relay | None = None
        self._children: list[Child] = []

    def run(self, function: Callable[..., Any], count: int, threads: int, *arguments: Any) -> list[Any]:
        """Call ``function(shared, rank, count, *arguments)`` in several processes that have a common process group.

        Args:
            function: the function, at the top level of a module.
            count: number of processes; with one there is no process group.
            threads: number of torch's threads in each.
            arguments: further arguments.

        Returns:
            The results by rank.

        Raises:
            RunFailedError: if one has raised an error, or died. The processes are started again for the next call.
            ValueError: if the link cannot be made.
        """
        try:
            while (site := len(self._children)) < count:
                self._children.append(Child(_serve_calls, self._shared, None if self._link is None else site))
                if self._link is not None:
                    self._relay = self._relay or Relay(self._link)
                    self._relay.receive(self._children[site], site)
            address = f"tcp://{'127.0.0.1' if self._link is None else ADDRESS.format(1)}:{free_port()}"
            for rank, child in enumerate(self._children[:count]):
                child.pipe.send((function, rank, count, threads, address, arguments))
            return _results(self._children[:count])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes. May be called twice."""
        for child in self._children:
            child.pipe.close()  # all at once, before the first is waited for
        for child in self._children:
            child.end()
        self._children = []
        if self._relay is not None:
            self._relay.end()
            self._relay = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _results(children: Sequence[Child]) -> list[Any]:
    """Return the results of children, in their order; after an error the others have some time to return.

    Raises:
        RunFailedError: if one has failed.
    """
    results: dict[int, Any] = {}
    errors: list[str] = []
    while len(results) < len(children):
        waiting: dict[Any, int] = {child.pipe: rank for rank, child in enumerate(children) if rank not in results}
        ready = wait(list(waiting), _GRACE if errors else None)
        if not ready:
            break
        for pipe in ready:
            rank = waiting[pipe]
            results[rank], error = children[rank].receive()
            if error:
                errors.append(f"process {rank}: {error}")
    if errors:
        raise RunFailedError(errors[0])
    return [results[rank] for rank in range(len(children))]


def _serve_calls(pipe: Connection, shared: bytes, site: int | None) -> None:
    """Carry out calls of a pool until the other end of the pipe is closed; on a link as one of its sites."""
    if site is not None:
        enter(pipe, site)
    content = pickle.loads(shared)  # from this program's own parent process, by a pipe of its own
    while True:
        try:
            call = pipe.recv()
            answer(pipe, _call, content, *call)
        except (EOFError, OSError, KeyboardInterrupt):
            return


def _call(
    content: object,
    function: Callable[..., Any],
    rank: int,
    count: int,
    threads: int,
    address: str,
    arguments: Sequence[Any],
) -> Any:
    import torch
    import torch.distributed as dist

    from ...hub.connect import connect

    torch.set_num_threads(threads)
    if count > 1:
        connect(rank, count, address)
    try:
        return function(content, rank, count, *arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
