"""Training of one model by several processes of one machine, on parameters in shared memory (Hogwild!).

A loader's batches are dealt to the processes: each batch of an epoch to one of them.
"""

from __future__ import annotations

import itertools
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
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import ProcessFailedError
from ..exchange import DEFAULT_TIMEOUT
from ..step.model_sync.structure import before_update, refuse_attached
from ..support.loaders import DrawnBatches, WrappedLoader, check_loader, with_batches
from ..support.processes import Child, handling
from ..support.schedules import available_cores
from ..support.signature import OptionSet, check_choice, check_seconds, option, whole_number
from .layout import Layout, check_model, check_optimizer, coalesce_gradients, create_state, divides_by_state, keep_state
from .memory import Board, Progress, SharedMemory, check_equal, check_system, connected, share

# Dealing of batches


class DealtLoader(WrappedLoader):
    """Loader that yields those batches of another loader that this process is dealt.

    The processes take batches on demand, so that a slow one takes fewer. Each batch is used once an epoch. An epoch
    begins for all processes together. The order is the one that the loader of process 0 draws.

    All other attributes are those of the other loader. There is no length: it is not known before the epoch is over.

    Args:
        loader: a DataLoader over a data set with a length, the same in all processes.
        board: the control block.
        ahead: number of batches that the caller takes before it trains on the first of them.
        limit: number of batches of an epoch, at most; all if None.

    Raises:
        TypeError: if it is no DataLoader.
        ValueError: if its batches cannot be dealt.
    """

    def __init__(self, loader: Any, board: Board, ahead: int = 0, limit: int | None = None) -> None:
        check_loader(loader)
        super().__init__(loader)
        self._board, self._ahead, self._limit = board, ahead, limit
        self._taken = 0  # batches that the caller has taken and that are not reported as finished
        self._drawn: deque[int] = deque()
        self._running = False
        self._dealt = with_batches(loader, DrawnBatches(self._draw))

    @property
    def batches(self) -> int:
        """Number of batches of an epoch, of all processes together."""
        batches = len(self._loader.batch_sampler)
        return batches if self._limit is None else min(batches, self._limit)

    def __iter__(self) -> Generator[Any, None, None]:
        if self._running:
            raise RuntimeError("this loader is being read already: finish the epoch before the next one begins")
        self._drawn.clear()
        self._taken, self._running = 0, True
        try:
            for batch in self._dealt:
                self._taken += 1
                yield batch
                self.finish(self._ahead)
        finally:
            self._running = False

    def _draw(self) -> Iterator[list[int]]:
        self._board.begin_epoch(self._draw_order)
        while (batch := self._board.draw()) is not None:
            self._drawn.append(batch)
            yield self._board.indices(batch)

    def _draw_order(self) -> list[list[int]]:
        batches = [list(map(int, batch)) for batch in itertools.islice(self._loader.batch_sampler, self._limit)]
        if not batches:
            raise ValueError("the loader has no batches")
        return batches

    def finish(self, left: int = 0) -> None:
        """Report that the batches that were taken are finished.

        Args:
            left: number of batches, the last ones, that are not.
        """
        while self._taken > left:
            self._taken -= 1
            self._board.finish_batch(self._drawn.popleft())


# Processes

_PROBE = 3.0  # seconds for a forked process to show that it can train
_POLL = 0.2  # seconds between two looks at processes that report nothing
_END = 5.0  # seconds for a process to end whose pipe is closed
_PROGRAM = "import sys; sys.path[:] = {path!r}; from dadplug.hogwild.training import main; main({pipe}, {payload})"


class _Interpreter(subprocess.Popen[bytes]):
    """Process in a new interpreter, which is waited for as those of multiprocessing are."""

    @property
    def exitcode(self) -> int | None:
        """Exit status; None while it runs."""
        return self.poll()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, for some seconds at most."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


class _Spawned(Child):
    """Process in a new interpreter, with the pipe for its result.

    Args:
        rank: its number.
        training: object whose copy trains in it.
        payload: the file that `_pack` has written.
    """

    def __init__(self, rank: int, training: Hogwild, payload: SharedMemory) -> None:
        self.pipe, pipe = multiprocessing.Pipe(duplex=False)
        threads = str(training.threads)
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "DADPLUG_HOGWILD_RANK": str(rank)}
        with pipe:
            self.process = _Interpreter(
                [sys.executable, "-c", _PROGRAM.format(path=sys.path, pipe=pipe.fileno(), payload=payload.descriptor)],
                env=os.environ | environment,
                pass_fds=(pipe.fileno(), payload.descriptor, training._descriptor),
                stdin=subprocess.DEVNULL,
            )


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
    with quiet_fork():
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


@contextmanager
def quiet_fork() -> Iterator[None]:
    """Return a context without the warning of Python 3.12 that this process has threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded.*")
        yield


def run_workers(
    training: Hogwild, start: str, board: Board, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Start the processes and wait for their results.

    Args:
        training: object whose copy trains in each process.
        start: ``"fork"`` or ``"spawn"``.
        board: the control block.
        function: called as ``function(training, *args)``.
        args: its further arguments.

    Returns:
        Results by process, and the states of the optimizers of process 0.

    Raises:
        ProcessFailedError: if a process has failed; the others have been ended.
        TypeError: if the function or its arguments cannot be copied to a new interpreter.
    """
    payload = _pack(training, function, args) if start == "spawn" else None
    workers: list[Child] = []
    try:
        for rank in range(training.processes):
            if payload is None:
                with quiet_fork():
                    workers.append(Child(_train, rank, training, function, args, method="fork"))
            else:
                workers.append(_Spawned(rank, training, payload))
        return _collect(workers, board)
    finally:
        with handling(signal.SIG_IGN, signal.SIGINT):
            for worker in workers:
                worker.process.kill()
            for worker in workers:
                worker.process.join()
                worker.pipe.close()
        if payload is not None:
            payload.close()


def _pack(training: Hogwild, function: Callable[..., Any], args: tuple[Any, ...]) -> SharedMemory:
    """Write everything that a new interpreter needs into a file without a name."""
    from numba import cloudpickle  # functions and classes of a script or a notebook travel by value

    try:
        content = cloudpickle.dumps((torch.get_rng_state(), training, function, args), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"the function or its arguments cannot be copied to a new process: {error}; start the processes before "
            'this one runs a backward pass, with threads=1, so that they can be forked (start="fork")'
        ) from error
    memory = SharedMemory.create(8)
    memory.write_behind(0, len(content).to_bytes(8, "little") + content)
    return memory


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
    try:
        generator, training, function, args = pickle.loads(content)
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        return
    del content
    torch.set_rng_state(generator)
    _train(connection, int(os.environ["DADPLUG_HOGWILD_RANK"]), training, function, args)


def _train(pipe: Connection, rank: int, training: Hogwild, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Call the function in a started process, and send its result or its traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        torch.set_num_threads(training.threads)
        if rank:
            seed = torch.initial_seed() + rank
            torch.default_generator.manual_seed(seed % 2**63)
            random.seed(seed)
            np.random.seed(seed % 2**32)
        training.become(rank)
        value = function(training, *args)
        states = training.worker_states() if rank == 0 else []
        training.finish()
        report = pickle.dumps(("ok", (value, states)))
    except BaseException:
        report = pickle.dumps(("failed", traceback.format_exc()))
    with suppress(BrokenPipeError):
        pipe.send_bytes(report)
    pipe.close()


def _collect(workers: list[Child], board: Board) -> tuple[list[Any], list[dict[str, Any]]]:
    results: dict[int, Any] = {}
    while len(results) < len(workers):
        waiting = {rank: worker for rank, worker in enumerate(workers) if rank not in results}
        wait([worker.pipe for worker in waiting.values()], _POLL)
        for rank, worker in waiting.items():
            process, pipe = worker.process, worker.pipe
            ended = process.exitcode is not None
            if pipe.poll():
                try:
                    kind, results[rank] = pipe.recv()
                except EOFError:
                    process.join(_END)
                    raise ProcessFailedError(_killed(rank, process, board)) from None
                if kind == "failed":
                    raise ProcessFailedError(
                        f"process {rank} (pid {process.pid}) of {len(workers)} has failed; the others were ended.\n"
                        f"{results[rank]}"
                    )
            elif ended:
                raise ProcessFailedError(_killed(rank, process, board))
    return [results[rank][0] for rank in range(len(workers))], results[0][1]


def _killed(rank: int, process: Any, board: Board) -> str:
    status = process.exitcode
    if status is not None and status < 0:
        cause = f"was killed by {signal.Signals(-status).name}"
    else:
        cause = "is gone without a result" if status is None else f"has exited with status {status}"
    return (
        f"process {rank} (pid {process.pid}) of {board.processes} {cause}{board.describe(rank)}. The others were ended"
    )


# Training

STATES = ("shared", "own")
STARTS = ("auto", "fork", "spawn")
_check_number = whole_number(1, "or None", lambda value: value is None)


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
        given: Sequence[Any] = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self.optimizers: list[torch.optim.Optimizer] = [*given]
        self._state, self._start = state, start
        self._connected = connected()
        self._layout: Layout | None = None  # attached to the shared memory, while processes train
        self._trains = False  # whether this process is one of them
        self._descriptor = -1  # of the memory, for new interpreters
        self._parent: int | None = None  # process that has started this one
        self._hooks: list[Any] = []
        self.processes = self._connected or processes or available_cores()
        problem = self._problem(processes, threads)
        if self._connected:
            names = [type(each).__name__ for each in self.optimizers]
            signature = "" if problem else f"{names} {self._state} {self._create_layout().signature}"
            check_equal(problem, signature)
        if problem is not None:
            raise problem
        self.threads = threads or max(1, available_cores() // self.processes)
        if self._connected:
            self._join()

    def _problem(self, processes: int | None, threads: int | None) -> Exception | None:
        """Return the first error of the arguments."""
        try:
            check_system()
            _check_number("processes", processes)
            _check_number("threads", threads)
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
            refuse_attached(self.model)
        except (TypeError, ValueError, NotImplementedError) as error:
            return error
        return None

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
            name = getattr(function, "__name__", type(function).__name__)
            raise RuntimeError(
                f"{self._connected} processes are connected already: call {name}(hogwild, ...) in each of them instead "
                "of run()"
            )
        if self._layout is not None:
            raise RuntimeError("this Hogwild is running already")
        start = choose_start(self.threads) if self._start == "auto" else self._start
        layout = self._create_layout()
        memory = SharedMemory.create(layout.size)
        self._layout, self._descriptor, self._parent = layout, memory.descriptor, os.getpid()
        try:
            layout.attach(memory, fill=True)
            results, states = run_workers(self, start, layout.board, function, args)
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

    def become(self, rank: int) -> None:
        """Turn this copy of the object into the one of a started process; called by it alone."""
        self.rank = rank
        layout = self._layout
        if layout is None:  # in a new interpreter
            layout = self._create_layout()
            layout.attach(SharedMemory(self._descriptor), fill=False)
        self._enter(layout)

    def _join(self) -> None:
        """Share memory with the other connected processes."""
        layout = self._create_layout()
        self.rank, memory = share(layout.size, lambda memory: layout.attach(memory, fill=True))
        if self.rank:
            layout.attach(memory, fill=False)
        torch.set_num_threads(self.threads)
        self._enter(layout)
        layout.board.barrier()

    def _enter(self, layout: Layout) -> None:
        """Take part in the training on a model that is in the shared memory."""
        self._layout, self._trains = layout, True
        layout.board.join(self.rank, self._parent)
        self._hooks.append(self.model.register_load_state_dict_post_hook(layout.give_counters))
        for optimizer in self.optimizers:
            self._hooks.append(before_update(optimizer, partial(self._count, optimizer)))
            if self._state == "shared":
                self._hooks += keep_state(optimizer, layout.counts.give)
            if self._state == "shared" and divides_by_state(optimizer):
                self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def finish(self) -> None:
        """Wait for all processes, and give model and optimizer memory of their own; all processes must call it.

        `run` does so by itself.
        """
        layout = self._layout
        if layout is None or not self._trains:
            return
        with layout.board.paused():
            layout.merge()
            layout.check()
        layout.merge()
        layout.board.leave()
        if self._parent is None:
            self._release()

    def abort(self, reason: str = "it has given up") -> None:
        """Give model and optimizer memory of their own after an error, without waiting for the other processes.

        Args:
            reason: the reason, which the errors of the other processes quote.
        """
        if self._layout is not None and self._trains:
            self._layout.board.fail(reason)
        self._release()

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._layout is not None:
            self._layout.release()
        self._layout, self._trains = None, False

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
        return DealtLoader(loader, self._required().board, ahead, limit)

    def step(self) -> None:
        """Step all optimizers; the same as a call of their ``step()``."""
        for optimizer in self.optimizers:
            optimizer.step()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which no process trains, for evaluation and checkpoints; all processes must enter it.

        Parameters, buffers and optimizer state are consistent in it, and numbers of steps are those of all processes.
        """
        layout = self._required()
        layout.merge()
        with layout.board.paused():
            layout.merge()
            layout.check()
            yield

    def stop_epoch(self) -> None:
        """Leave out the batches of this epoch that have not been dealt yet."""
        self._required().board.stop_dealing()

    @property
    def running(self) -> bool:
        """Whether this process is one of those that train, up to `finish` or `abort`."""
        return self._trains

    @property
    def steps(self) -> int:
        """Steps of the optimizers in all processes so far."""
        return self._required().board.steps

    def progress(self, rank: int | None = None) -> Progress:
        """Return the progress of a process: its steps, finished batches and samples, and unfinished batches.

        Args:
            rank: number of the process; this one if None.
        """
        return self._required().board.progress(self.rank if rank is None else rank)

    def _required(self) -> Layout:
        if self._layout is None or not self._trains:
            raise RuntimeError("no training runs: call this in a function that Hogwild.run() calls in each process")
        return self._layout

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the numbers of a step."""
        layout = self._required()
        turns = self._state == "shared" and divides_by_state(optimizer)
        if turns:
            coalesce_gradients(optimizer)
        with layout.memory.lock():
            self.last_step = layout.board.count_step()
            layout.counts.take_next(optimizer)
            layout.share_counters()
        if turns:
            layout.memory.begin_exclusive()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._layout is not None:
            self._layout.memory.end_exclusive()

    def worker_states(self) -> list[dict[str, Any]]:
        """Return the states of the optimizers that only their own process has: all of it, or the groups alone."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return states if self._state == "own" else [state | {"state": {}} for state in states]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_layout": None, "_trains": False, "_hooks": []}


@dataclass(frozen=True)
class HogwildOptions(OptionSet):
    """Options of Hogwild!'s strategy and runner.

    Raises:
        ValueError: if a value is not valid; the message lists the valid ones.
    """

    state: str = option("shared", "shared: one state of the optimizer; own: each process has its own", choices=STATES)
    threads: int | None = option(
        None, "threads of each process; None: the cores are divided among the processes", _check_number
    )
    timeout: float = option(
        DEFAULT_TIMEOUT, "seconds after which a process that sends no metrics counts as lost", check_seconds
    )
