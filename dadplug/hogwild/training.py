"""Training of one model by several processes of one machine, on parameters in shared memory (Hogwild!)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..cores import available_cores
from ..signature import check_choice
from .board import Board, Progress
from .dealing import DealtLoader
from .join import check_equal, connected, share
from .layout import Layout, check_model
from .memory import SharedMemory, check_system
from .optimizer_state import check_optimizer, coalesce_gradients, create_state, divides_by_state, keep_state
from .workers import Assignment, choose_start, run_workers

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
                self._hooks += keep_state(optimizer, layout.give_counts)
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
            self._layout.take_step_numbers(optimizer)
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
            self._layout.take_counts()

    def worker_states(self) -> list[dict[str, Any]]:
        """Return the states of the optimizers that their own process alone knows: all of it, or the groups alone."""
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
