"""Control block of the processes that train together: batches, steps, barriers, and the progress of each process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ProcessFailedError
from .memory import SharedMemory

_DEALT, _STEPS, _EPOCH, _ORDER, _BATCHES = range(5)  # places in the head
_PID, _ARRIVALS, _DONE, _SAMPLES, _LEFT, _PROCESS_STEPS, _FAILED = range(7)  # places in the row of a process
_ROW = 8  # numbers; a cache line for each process
_POLL = 0.002  # seconds
_CHECK = 0.2  # seconds between two looks at the other processes
_NUMBER = 8  # bytes
_INDICES_SHOWN = 8
_REASON = 512  # bytes of the reason why a process has failed


class Progress(NamedTuple):
    """Progress of one process.

    Attributes:
        pid: its process id.
        epoch: epoch of its batch.
        steps: its steps of optimizers.
        batches: batches that it has finished.
        samples: samples of these batches.
        unfinished: batches of this epoch that were dealt to it and that it has not finished.
    """

    pid: int
    epoch: int
    steps: int
    batches: int
    samples: int
    unfinished: list[int]


class Board:
    """Control block in shared memory.

    Batches are dealt by a counter over one order of the epoch, which process 0 draws. The order lies behind the mapped
    memory, since its length is known only then: starts of the batches (batches + 1 numbers), the state of each batch
    (0: not dealt; n: dealt to process n - 1; -n: finished there), and the indices of the samples.

    Args:
        memory: the shared memory.
        offset: first byte of the control block.
        processes: number of processes.
    """

    def __init__(self, memory: SharedMemory, offset: int, processes: int) -> None:
        self._memory = memory
        rows = memory.tensor(offset, (1 + processes) * _ROW, torch.int64).view(1 + processes, _ROW)
        self._head, self._rows = rows[0].numpy(), rows[1:].numpy()
        behind = offset + _NUMBER * (1 + processes) * _ROW
        self._reasons = memory.tensor(behind, processes * _REASON, torch.uint8).view(processes, _REASON).numpy()
        self.processes = processes
        self.rank = 0
        self.parent: int | None = None
        self._starts: list[int] = []
        self._reserved: int | None = None
        self._checked = time.monotonic()

    @staticmethod
    def numbers(processes: int) -> int:
        """Return the size of a control block, in numbers of eight bytes."""
        return (1 + processes) * _ROW + processes * _REASON // _NUMBER

    def join(self, rank: int, parent: int | None) -> None:
        """Enter this process.

        Args:
            rank: its number.
            parent: id of the process that has started it; None if it was started by others.
        """
        self.rank, self.parent = rank, parent
        self._rows[rank, _PID] = os.getpid()

    def leave(self) -> None:
        """Report that this process takes no further part."""
        self._rows[self.rank, _LEFT] = 1

    def fail(self, reason: str) -> None:
        """Report that this process has failed; the others raise an error when they next take a batch or wait.

        Args:
            reason: the reason, for their messages.
        """
        content = reason.encode()[: _REASON - 1]
        self._reasons[self.rank, : len(content)] = list(content)
        self._rows[self.rank, _FAILED] = 1

    # Steps

    @property
    def steps(self) -> int:
        """Steps of all processes."""
        return int(self._head[_STEPS])

    def count_step(self) -> int:
        """Count a step; the caller holds the lock. Return its number, from 0."""
        step = int(self._head[_STEPS])
        self._head[_STEPS] = step + 1
        self._rows[self.rank, _PROCESS_STEPS] += 1
        return step

    # Barriers

    def barrier(self) -> None:
        """Wait until all processes have called it.

        Raises:
            ProcessFailedError: if a process is lost, or has finished.
        """
        with self._memory.lock():
            self._rows[self.rank, _ARRIVALS] += 1
        arrivals = int(self._rows[self.rank, _ARRIVALS])
        self._wait(lambda: bool((self._rows[:, _ARRIVALS] >= arrivals).all()), arrivals)
        with self._memory.lock():  # orders the memory of processors: what others wrote before is visible now
            pass

    def _wait(self, ready: Callable[[], bool], arrivals: int) -> None:
        delay, checked = _POLL / 32, time.monotonic()
        while not ready():
            time.sleep(delay)
            delay = min(2 * delay, _POLL)
            if time.monotonic() - checked > _CHECK:
                self.check_others(arrivals)
                checked = time.monotonic()

    def check_others(self, arrivals: int = 0) -> None:
        """Check that the others are there.

        Args:
            arrivals: number of barriers that every process must reach.

        Raises:
            ProcessFailedError: if a process is lost or has failed, or has finished before it has reached them.
        """
        self._check_parent()
        for rank in range(self.processes):
            row = self._rows[rank]
            pid, finished = int(row[_PID]), bool(row[_LEFT])
            if rank == self.rank:
                continue
            if row[_FAILED]:
                reason = bytes(self._reasons[rank]).rstrip(b"\0").decode(errors="replace")
                raise ProcessFailedError(f"process {rank} (pid {pid}) has failed: {reason}{self.describe(rank)}")
            if finished and row[_ARRIVALS] < arrivals:
                raise ProcessFailedError(
                    f"process {rank} (pid {pid}) has finished, and process {self.rank} waits for it: all processes "
                    "must train for the same number of epochs, and pause equally often"
                )
            if self.parent is None and pid and not finished and not _alive(pid):
                raise ProcessFailedError(f"process {rank} (pid {pid}) is gone{self.describe(rank)}")

    def _check_parent(self) -> None:
        if self.parent is not None and os.getppid() != self.parent:
            raise ProcessFailedError("the process that has started this one is gone")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context that all processes enter and leave together."""
        self.barrier()
        yield
        self.barrier()

    # Batches

    def begin_epoch(self, draw: Callable[[], list[list[int]]]) -> None:
        """Begin an epoch with the order that process 0 draws; all processes must call it.

        Args:
            draw: returns the batches as lists of indices; called by process 0.
        """
        self.barrier()
        if self.rank == 0:
            self._publish(draw())
        self.barrier()
        batches = int(self._head[_BATCHES])
        self._starts = _numbers(self._memory.read_behind(0, _NUMBER * (batches + 1))).tolist()
        self._reserved = self.rank if batches >= self.processes else None

    def _publish(self, batches: list[list[int]]) -> None:
        sizes = torch.tensor([0, *map(len, batches)], dtype=torch.int64)
        indices = torch.tensor([index for batch in batches for index in batch], dtype=torch.int64)
        parts = (sizes.cumsum(0), torch.zeros(len(batches), dtype=torch.int64), indices)
        self._memory.write_behind(0, b"".join(part.numpy().tobytes() for part in parts))
        self._head[_DEALT] = self.processes if len(batches) >= self.processes else 0  # the first ones are reserved
        self._head[_BATCHES] = len(batches)
        self._head[_EPOCH] += 1

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0; -1 before the first."""
        return int(self._head[_EPOCH]) - 1

    @property
    def batches(self) -> int:
        """Batches of the epoch, of all processes together."""
        return int(self._head[_BATCHES])

    def draw(self) -> int | None:
        """Take the next batch; return its number, or None if all have been dealt.

        The first batches are reserved, one for each process, so that none is without a batch of an epoch.

        Raises:
            ProcessFailedError: if another process is lost or has failed.
        """
        self._check_parent()
        if time.monotonic() - self._checked > _CHECK:
            self._checked = time.monotonic()
            self.check_others()
        batch, self._reserved = self._reserved, None
        if batch is None:
            with self._memory.lock():
                batch = int(self._head[_DEALT])
                if batch >= self._head[_BATCHES]:
                    return None
                self._head[_DEALT] = batch + 1
        self._mark(batch, self.rank + 1)
        return batch

    def stop_dealing(self) -> None:
        """Leave out the batches of this epoch that have not been dealt yet."""
        with self._memory.lock():
            self._head[_DEALT] = self._head[_BATCHES]

    def indices(self, batch: int) -> list[int]:
        """Return the indices of the samples of a batch."""
        first, last = self._starts[batch], self._starts[batch + 1]
        begin = _NUMBER * (2 * len(self._starts) - 1)
        content = self._memory.read_behind(begin + _NUMBER * first, _NUMBER * (last - first))
        return memoryview(content).cast("q").tolist()

    def finish_batch(self, batch: int) -> None:
        """Report that this process has finished a batch."""
        self._mark(batch, -self.rank - 1)
        self._rows[self.rank, _DONE] += 1
        self._rows[self.rank, _SAMPLES] += self._starts[batch + 1] - self._starts[batch]

    def _mark(self, batch: int, state: int) -> None:
        place = _NUMBER * (len(self._starts) + batch)
        self._memory.write_behind(place, state.to_bytes(_NUMBER, "little", signed=True))

    # Progress

    def progress(self, rank: int) -> Progress:
        """Return the progress of a process."""
        row, unfinished = self._rows[rank], []
        if batches := self.batches:
            states = _numbers(self._memory.read_behind(_NUMBER * (batches + 1), _NUMBER * batches))
            unfinished = (states == rank + 1).nonzero()[:, 0].tolist()
        pid, steps, done, samples = (int(row[place]) for place in (_PID, _PROCESS_STEPS, _DONE, _SAMPLES))
        return Progress(pid, self.epoch, steps, done, samples, unfinished)

    def describe(self, rank: int) -> str:
        """Describe which batches a process has left unfinished, for messages."""
        found = self.progress(rank)
        text = f", in epoch {found.epoch} after {found.steps} steps" if found.epoch >= 0 else ", before its first epoch"
        if not found.unfinished:
            return f"{text}; it had no unfinished batch"
        self._starts = _numbers(self._memory.read_behind(0, _NUMBER * (self.batches + 1))).tolist()
        parts = []
        for batch in found.unfinished:
            indices = self.indices(batch)
            shown = ", ".join(map(str, indices[:_INDICES_SHOWN])) + (", ..." if len(indices) > _INDICES_SHOWN else "")
            parts.append(f"batch {batch} of {self.batches} (samples {shown})")
        return f"{text}; not finished: {'; '.join(parts)}, whose update may be missing or applied in part"


def _numbers(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.int64) if content else torch.zeros(0, dtype=torch.int64)


def _alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return not os.path.isdir("/proc/self")
