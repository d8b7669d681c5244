"""Processes of this machine that a race uses, kept from run to run."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from ..errors import RunFailedError
from ..exchange.handshake import free_port

_GRACE = 20.0  # seconds for the other processes to return after one has failed


class Pool:
    """Processes of this machine, started when they are first needed.

    Args:
        shared: what all calls get as their first argument; it is sent to each process once.

    Raises:
        ValueError: if `shared` cannot be sent to another process.
    """

    def __init__(self, shared: object) -> None:
        try:
            self._shared = pickle.dumps(shared)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                "build and dataset have to reach other processes: define build, and the classes of the data set, at "
                f"the top level of a module ({error})"
            ) from error
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

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
        """
        self._start(count)
        job = (function, count, threads, free_port(), arguments)
        try:
            for rank in range(count):
                self._pipes[rank].send((rank, *job))
            return self._results(count)
        except BaseException:
            self.close()
            raise

    def _results(self, count: int) -> list[Any]:
        results: dict[int, Any] = {}
        errors: list[str] = []
        while len(results) < count:
            waiting = [self._pipes[rank] for rank in range(count) if rank not in results]
            ready = wait(waiting, _GRACE if errors else None)
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    results[rank], error = self._pipes[rank].recv()
                except (EOFError, ConnectionError):
                    self._processes[rank].join()
                    results[rank], error = None, f"a process has exited with status {self._processes[rank].exitcode}"
                if error:
                    errors.append(error)
        if errors:
            raise RunFailedError(errors[0])
        return [results[rank] for rank in range(count)]

    def _start(self, count: int) -> None:
        """Start processes until there are enough of them."""
        context = multiprocessing.get_context("spawn")
        while len(self._processes) < count:
            own, other = context.Pipe()
            process = context.Process(target=_work, args=(other, self._shared))
            process.start()
            other.close()
            self._processes.append(process)
            self._pipes.append(own)

    def close(self) -> None:
        """End the processes. May be called twice."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _work(pipe: Connection, shared: bytes) -> None:
    """Carry out jobs until the other end of the pipe is closed."""
    content = pickle.loads(shared)  # from this program's own parent process, by a pipe of its own
    while True:
        try:
            rank, function, count, threads, port, arguments = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            outcome = _call(function, content, rank, count, threads, port, arguments), ""
        except Exception as error:
            outcome = None, f"{type(error).__name__}: {error}"
        try:
            pipe.send(outcome)
        except OSError:
            return


def _call(
    function: Callable[..., Any],
    content: object,
    rank: int,
    count: int,
    threads: int,
    port: int,
    arguments: Sequence[Any],
) -> Any:
    import torch
    import torch.distributed as dist

    from ..hub.join import connect

    torch.set_num_threads(threads)
    if count > 1:
        connect(rank, count, f"tcp://127.0.0.1:{port}")
    try:
        return function(content, rank, count, *arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
