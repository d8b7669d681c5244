"""Processes that are started for a training: start, results, failures, end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import ProcessFailedError
from .board import Board
from .memory import SharedMemory

_PROBE = 3.0  # seconds for a forked process to show that it can train
_POLL = 0.2  # seconds between two looks at processes that report nothing
_END = 5.0  # seconds for a process to end by itself
_PROGRAM = "import sys; sys.path[:] = {path!r}; from dadplug.hogwild.workers import main; main({pipe}, {payload})"


class Assignment(NamedTuple):
    """Facts that a process needs to take part.

    Attributes:
        processes: number of processes.
        threads: threads of each.
        descriptor: descriptor of the shared memory.
        parent: id of the process that starts the others.
    """

    processes: int
    threads: int
    descriptor: int
    parent: int


class _Training(Protocol):
    """Interface of the object that trains, as its processes use it; see `dadplug.Hogwild`."""

    def become(self, rank: int, assignment: Assignment) -> None: ...

    def finish(self) -> None: ...

    def worker_states(self) -> list[dict[str, Any]]: ...


class _Worker:
    """One started process.

    Args:
        pid: its process id.
        pipe: pipe for its result.
        poll: returns the exit status, or None while it runs.
        close: called after its end.
    """

    def __init__(
        self,
        pid: int,
        pipe: Connection,
        poll: Callable[[], int | None],
        close: Callable[[], object] | None = None,
    ) -> None:
        self.pid, self.pipe, self.poll = pid, pipe, poll
        self._close = close

    def end(self) -> None:
        """End the process and wait for it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)
            deadline = time.monotonic() + _END
            while self.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
        self.pipe.close()
        if self._close is not None:
            self._close()


def choose_start(threads: int) -> str:
    """Choose how to start processes.

    A forked process is there at once and shares the memory of libraries and data. It cannot use several threads if this
    process has used several (OpenMP's threads do not survive a fork), nor train if autograd has started threads of its
    own here, as it does for GPUs. A forked process finds out.

    Args:
        threads: threads of a process.

    Returns:
        ``"fork"`` or ``"spawn"``.
    """
    return "fork" if sys.platform == "linux" and _fork_trains(threads) else "spawn"


def _fork_trains(threads: int) -> bool:
    """Return whether a forked process can run a backward pass on a number of threads."""
    with _quiet_fork():
        pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(threads)
            weight = torch.ones(256, 256, requires_grad=True)  # large enough for several threads
            ((weight @ weight).exp() @ weight).sum().backward()
            os._exit(0)
        except BaseException:
            os._exit(1)
    deadline = time.monotonic() + _PROBE
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status == 0
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """Return a context without the warning of Python 3.12 that this process has threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded.*")
        yield


def run_workers(
    assignment: Assignment,
    start: str,
    board: Board,
    training: _Training,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Start the processes and wait for their results.

    Args:
        assignment: what they have to know.
        start: ``"fork"`` or ``"spawn"``.
        board: the control block.
        training: object whose copy trains in each process.
        function: called as ``function(training, *args)``.
        args: its further arguments.

    Returns:
        Results by process, and the states of the optimizers of process 0.

    Raises:
        ProcessFailedError: if a process has failed; the others have been ended.
        TypeError: if the function or its arguments cannot be copied to a new interpreter.
    """
    payload = _pack(assignment, training, function, args) if start == "spawn" else None
    workers: list[_Worker] = []
    try:
        for rank in range(assignment.processes):
            if payload is None:
                workers.append(_fork(rank, assignment, training, function, args))
            else:
                workers.append(_spawn(rank, assignment, payload))
        return _collect(workers, board)
    finally:
        with _uninterrupted():
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    if worker.poll() is None:
                        os.kill(worker.pid, signal.SIGTERM)
            for worker in workers:
                worker.end()
        if payload is not None:
            os.close(payload)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Return a context in which Ctrl-C is ignored, where this thread may decide so."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _fork(
    rank: int, assignment: Assignment, training: _Training, function: Callable[..., Any], args: tuple[Any, ...]
) -> _Worker:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_train, args=(rank, theirs, assignment, training, function, args), name=f"hogwild-{rank}"
    )
    with _quiet_fork():
        process.start()
    theirs.close()
    assert process.pid is not None
    return _Worker(process.pid, ours, lambda: process.exitcode, process.close)


def _spawn(rank: int, assignment: Assignment, payload: int) -> _Worker:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    program = _PROGRAM.format(path=sys.path, pipe=theirs.fileno(), payload=payload)
    threads = str(assignment.threads)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "DADPLUG_HOGWILD_RANK": str(rank)},
        pass_fds=(theirs.fileno(), payload, assignment.descriptor),
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    return _Worker(process.pid, ours, process.poll)


def _pack(assignment: Assignment, training: _Training, function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Write everything that a new interpreter needs into a file without a name; return its descriptor."""
    from numba import cloudpickle  # functions and classes of a script or a notebook travel by value

    item = (assignment, torch.get_rng_state(), training, function, args)
    try:
        content = cloudpickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"the function or its arguments cannot be copied to a new process: {error}; start the processes before "
            'this one runs a backward pass, with threads=1, so that they can be forked (start="fork")'
        ) from error
    memory = SharedMemory.create(8)
    memory.write_behind(0, len(content).to_bytes(8, "little") + content)
    descriptor = os.dup(memory.descriptor)
    memory.close()
    return descriptor


def main(pipe: int, payload: int) -> None:
    """Run a process in a new interpreter.

    Args:
        pipe: descriptor of the pipe for the result.
        payload: descriptor of the file that `_pack` has written.
    """
    connection = Connection(pipe, readable=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    memory = SharedMemory(payload)
    content = memory.read_behind(8, int.from_bytes(memory.read_behind(0, 8), "little"))
    memory.close()
    rank = int(os.environ["DADPLUG_HOGWILD_RANK"])
    try:
        assignment, generator, training, function, args = pickle.loads(content)
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        return
    del content
    torch.set_rng_state(generator)
    _train(rank, connection, assignment, training, function, args)


def _train(
    rank: int,
    pipe: Connection,
    assignment: Assignment,
    training: _Training,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Call the function in a started process, and send its result or its traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        torch.set_num_threads(assignment.threads)
        if rank:
            _seed(torch.initial_seed() + rank)
        training.become(rank, assignment)
        value = function(training, *args)
        states = training.worker_states() if rank == 0 else []
        training.finish()
        report = pickle.dumps(("ok", (value, states)))
    except BaseException:
        report = pickle.dumps(("failed", traceback.format_exc()))
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(report)
    pipe.close()


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed % 2**63)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _collect(workers: list[_Worker], board: Board) -> tuple[list[Any], list[dict[str, Any]]]:
    results: dict[int, Any] = {}
    while len(results) < len(workers):
        waiting = {rank: worker for rank, worker in enumerate(workers) if rank not in results}
        wait([worker.pipe for worker in waiting.values()], _POLL)
        for rank, worker in waiting.items():
            ended = worker.poll()
            if worker.pipe.poll():
                kind, value = _receive(rank, worker, board)
                if kind == "failed":
                    raise ProcessFailedError(
                        f"process {rank} (pid {worker.pid}) of {len(workers)} has failed; the others were ended.\n"
                        f"{value}"
                    )
                results[rank] = value
            elif ended is not None:
                raise ProcessFailedError(_killed(rank, worker, board))
    return [results[rank][0] for rank in range(len(workers))], results[0][1]


def _receive(rank: int, worker: _Worker, board: Board) -> Any:
    try:
        return worker.pipe.recv()
    except EOFError:
        deadline = time.monotonic() + _END
        while worker.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        raise ProcessFailedError(_killed(rank, worker, board)) from None


def _killed(rank: int, worker: _Worker, board: Board) -> str:
    status = worker.poll()
    if status is not None and status < 0:
        cause = f"was killed by {signal.Signals(-status).name}"
    else:
        cause = "is gone without a result" if status is None else f"has exited with status {status}"
    return (
        f"process {rank} (pid {worker.pid}) of {board.processes} {cause}{board.describe(rank)}. The others were ended"
    )
