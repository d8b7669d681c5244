"""Training of one model by several processes of one machine, on parameters in shared memory (Hogwild!)."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch import nn

from ..cores import available_cores
from ..errors import ProcessFailedError
from ..exchange import DEFAULT_TIMEOUT
from ..exchange.deadline import check_seconds
from ..signature import OptionSet, check_choice, option
from .dealing import DealtLoader
from .layout import Layout, check_model, check_optimizer, coalesce_gradients, create_state, divides_by_state, keep_state
from .memory import Board, Progress, SharedMemory, check_equal, check_system, connected, share

_PROBE = 3.0  # seconds for a forked process to show that it can train
_POLL = 0.2  # seconds between two looks at processes that report nothing
_END = 5.0  # seconds for a process to end by itself
_PROGRAM = "import sys; sys.path[:] = {path!r}; from dadplug.hogwild.training import main; main({pipe}, {payload})"


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
    training: Hogwild,
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
    rank: int, assignment: Assignment, training: Hogwild, function: Callable[..., Any], args: tuple[Any, ...]
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


def _pack(assignment: Assignment, training: Hogwild, function: Callable[..., Any], args: tuple[Any, ...]) -> int:
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
    training: Hogwild,
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


STATES = ("shared", "own")
STARTS = ("auto", "fork", "spawn")


class Hogwild:
    """Training without waiting: processes of one machine update one model in shared memory, without locks.

    Every process runs the same loop over its own batches. Its optimizer updates the parameters in place, for all
    processes at once. There are two ways to start the processes:

    - `run` starts them and calls a function in each;
    - a launcher such as torchrun has started and connected them (`dadplug.connect`): then each process builds the
      object, which must be done before the first step, runs the loop itself, and calls `finish` at the end.

    Args:
        model: model on the CPU.
        optimizer: optimizer of the model, or several; its ``step()`` is called as ever.
        processes: number of processes; by default those that are connected, or else one for each core.
        state: ``"shared"``: all processes update one optimizer state, with one number of steps; ``"own"``: each process
            has its own, as in PyTorch's example.
        threads: threads of each process; by default the cores are divided among the processes.
        start: start of the processes by `run`: ``"fork"``, ``"spawn"`` (a new interpreter each), or ``"auto"``: fork
            where it is safe.

    Attributes:
        model: the model.
        optimizer: the optimizer, or the sequence of them.
        optimizers: the optimizers as a list.
        last_step: number of this process's last step among the steps of all, from 0; -1 before the first.
        rank: number of this process.
        processes: number of processes.
        threads: threads of each process.

    Raises:
        TypeError: if model or optimizer are of another type.
        ValueError: for a model on another device, L-BFGS, an optimizer whose state cannot be shared, processes on
            several machines, or wrong arguments. Nothing has been changed then.
        MismatchError: if the connected processes have different models, optimizers or options.

    Example:
        >>> def train(hogwild, loader):
        ...     for epoch in range(2):
        ...         for inputs, targets in hogwild.deal(loader):
        ...             hogwild.optimizer.zero_grad()
        ...             criterion(hogwild.model(inputs), targets).backward()
        ...             hogwild.optimizer.step()
        >>> Hogwild(model, optimizer, processes=2).run(train, loader)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        processes: int | None = None,
        state: str = "shared",
        *,
        threads: int | None = None,
        start: str = "auto",
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.rank = 0
        self.last_step = -1
        self.optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._state, self._start = state, start
        self._connected = connected()
        self._memory: SharedMemory | None = None
        self._board: Board | None = None
        self._layout: Layout | None = None
        self._hooks: list[Any] = []
        self.processes = self._connected or processes or available_cores()
        problem = self._problem(processes, threads)
        if self._connected:
            check_equal(problem, self._signature(problem))
        if problem is not None:
            raise problem
        self.threads = threads or max(1, available_cores() // self.processes)
        if self._connected:
            self._join()

    def _problem(self, processes: int | None, threads: int | None) -> Exception | None:
        """Return the first error of the arguments."""
        try:
            check_system()
            check_number("processes", processes)
            check_number("threads", threads)
            check_choice("state", self._state, STATES)
            check_choice("start", self._start, STARTS)
            if self._connected and processes not in (None, self._connected):
                raise ValueError(
                    f"{self._connected} processes are connected, and processes={processes} asks for others: leave "
                    "processes out, or start the script as one process"
                )
            for optimizer in self.optimizers:
                check_optimizer(optimizer, self.model, self._state)
            check_model(self.model, self.optimizers)
        except (TypeError, ValueError, NotImplementedError) as error:
            return error
        return None

    def _signature(self, problem: Exception | None) -> str:
        if problem is not None:
            return ""
        names = [type(optimizer).__name__ for optimizer in self.optimizers]
        return f"{names} {self._state} {self._create_layout().signature}"

    # Start and end

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Start the processes, call a function in each, and wait for all of them.

        While they run, model and optimizer of this process lie in the shared memory, too. Afterwards they hold the
        result in memory of their own. Process 0 continues the random numbers of this process, and the others have
        seeds of their own.

        Args:
            function: called as ``function(hogwild, *args)`` in each process.
            args: its further arguments; inherited with fork, and copied with spawn.

        Returns:
            What the function has returned, by process.

        Raises:
            ProcessFailedError: if a process has raised an error or was killed; the others have been ended. The
                message holds its traceback, or its unfinished batch. The model holds what was trained until then.
            RuntimeError: if the processes were started by a launcher, or training runs already.
        """
        if self._connected:
            raise RuntimeError(
                f"{self._connected} processes are connected already: call {_name(function)}(hogwild, ...) in each of "
                "them instead of run()"
            )
        if self._memory is not None:
            raise RuntimeError("this Hogwild is running already")
        start = choose_start(self.threads) if self._start == "auto" else self._start
        layout = self._create_layout()
        self._layout, self._memory = layout, SharedMemory.create(layout.size)
        assignment = Assignment(self.processes, self.threads, self._memory.descriptor, os.getpid())
        try:
            layout.attach(self._memory, fill=True)
            board = layout.board(self._memory)
            results, states = run_workers(assignment, start, board, self, function, args)
        finally:
            self._release()
        for optimizer, state in zip(self.optimizers, states, strict=True):
            if self._state == "own":
                optimizer.load_state_dict(state)
            for group, trained in zip(optimizer.param_groups, state["param_groups"], strict=True):
                group.update({name: value for name, value in trained.items() if name != "params"})
        return results

    def _create_layout(self) -> Layout:
        if self._state == "shared":
            for optimizer in self.optimizers:
                create_state(optimizer, self.model)
        return Layout(self.model, self.optimizers, self._state, self.processes)

    def become(self, rank: int, assignment: Assignment) -> None:
        """Turn this copy of the object into the one of a started process; called by it alone."""
        self.rank = rank
        layout = self._layout
        if layout is None:  # in a new interpreter
            layout = self._layout = self._create_layout()
            self._memory = SharedMemory(assignment.descriptor)
            layout.attach(self._memory, fill=False)
        assert self._memory is not None
        self._enter(layout, layout.board(self._memory), assignment.parent)

    def _join(self) -> None:
        """Share memory with the other connected processes."""
        layout = self._create_layout()
        self.rank, self._memory = share(layout.size, lambda memory: layout.attach(memory, fill=True))
        if self.rank:
            layout.attach(self._memory, fill=False)
        self._layout = layout
        torch.set_num_threads(self.threads)
        self._enter(layout, layout.board(self._memory), None)
        assert self._board is not None
        self._board.barrier()

    def _enter(self, layout: Layout, board: Board, parent: int | None) -> None:
        self._board = board
        board.join(self.rank, parent)
        self._hooks.append(self.model.register_load_state_dict_post_hook(layout.give_counters))
        for optimizer in self.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            if self._state == "shared":
                self._hooks += keep_state(optimizer, layout.counts.give)
            if self._state == "shared" and divides_by_state(optimizer):
                self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def finish(self) -> None:
        """Wait for all processes, and give model and optimizer memory of their own; all processes must call it.

        `run` does so by itself.
        """
        board = self._board
        if board is None or self._layout is None:
            return
        with board.paused():
            self._merge()
            self._layout.check()
        self._merge()
        board.leave()
        if board.parent is None:
            self._release()

    def abort(self, reason: str = "it has given up") -> None:
        """Give model and optimizer memory of their own after an error, without waiting for the other processes.

        Args:
            reason: the reason, which the errors of the other processes quote.
        """
        if self._board is not None:
            self._board.fail(reason)
        self._release()

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._layout is not None:
            self._layout.release()
        if self._memory is not None:
            self._memory.close()
        self._memory = self._board = self._layout = None

    # In each process

    def deal(self, loader: Any, *, ahead: int = 0, limit: int | None = None) -> DealtLoader:
        """Return a loader that yields this process's share of a loader's batches; each batch is dealt once an epoch.

        Args:
            loader: DataLoader over the whole data set, the same in all processes.
            ahead: number of batches that the caller takes before it trains on the first of them; for reports of
                unfinished batches.
            limit: number of batches of an epoch, of all processes together, at most; all if None.

        Raises:
            TypeError: if it is no DataLoader.
            ValueError: if its batches cannot be dealt, as those of an IterableDataset.
            RuntimeError: outside of the processes that train.
        """
        return DealtLoader(loader, self._required(), ahead, limit)

    def step(self) -> None:
        """Step all optimizers; the same as a call of their ``step()``."""
        for optimizer in self.optimizers:
            optimizer.step()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which no process trains, for evaluation and checkpoints; all processes must enter it.

        Parameters, buffers and optimizer state are consistent in it, and numbers of steps are those of all processes.
        """
        board = self._required()
        self._merge()
        with board.paused():
            self._merge()
            if self._layout is not None:
                self._layout.check()
            yield

    def stop_epoch(self) -> None:
        """Leave out the batches of this epoch that have not been dealt yet."""
        self._required().stop_dealing()

    @property
    def running(self) -> bool:
        """Whether this process is one of those that train, up to `finish` or `abort`."""
        return self._board is not None

    @property
    def steps(self) -> int:
        """Steps of the optimizers in all processes so far."""
        return self._required().steps

    def progress(self, rank: int | None = None) -> Progress:
        """Return the progress of a process: its steps, finished batches and samples, and unfinished batches.

        Args:
            rank: number of the process; this one if None.
        """
        return self._required().progress(self.rank if rank is None else rank)

    def _required(self) -> Board:
        if self._board is None:
            raise RuntimeError("no training runs: call this in a function that Hogwild.run() calls in each process")
        return self._board

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Take the numbers of a step, before it or, with a closure, after the gradients have been computed."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._count(optimizer)
            return None

        def counted() -> Any:
            loss = closure()
            self._count(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], counted, *args[2:]), kwargs
        return args, kwargs | {"closure": counted}

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._memory is not None
        assert self._layout is not None
        assert self._board is not None
        turns = self._state == "shared" and divides_by_state(optimizer)
        if turns:
            coalesce_gradients(optimizer)
        with self._memory.lock():
            self.last_step = self._board.count_step()
            self._layout.counts.take_next(optimizer)
            self._layout.share_counters()
        if turns:
            self._memory.begin_exclusive()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._memory is not None:
            self._memory.end_exclusive()

    def _merge(self) -> None:
        """Exchange the counters of all processes."""
        if self._memory is not None and self._layout is not None:
            with self._memory.lock():
                self._layout.share_counters()
            self._layout.counts.take()

    def worker_states(self) -> list[dict[str, Any]]:
        """Return the states of the optimizers that only their own process has: all of it, or the groups alone."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return states if self._state == "own" else [state | {"state": {}} for state in states]

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        return state | {"_memory": None, "_board": None, "_layout": None, "_hooks": []}


def check_number(name: str, value: object) -> None:
    """Raise ValueError if a value is neither None nor a whole number from 1 on."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


@dataclass(frozen=True)
class HogwildOptions(OptionSet):
    """Options of Hogwild!'s strategy and runner.

    Raises:
        ValueError: if a value is not valid; the message lists the valid ones.
    """

    state: str = option("shared", "shared: one state of the optimizer; own: each process has its own", choices=STATES)
    threads: int | None = option(
        None, "threads of each process; None: the cores are divided among the processes", check_number
    )
    timeout: float = option(
        DEFAULT_TIMEOUT, "seconds after which a process that sends no metrics counts as lost", check_seconds
    )
