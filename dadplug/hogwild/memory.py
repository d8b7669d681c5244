"""Memory without a name that all processes of one machine read and write."""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MismatchError, ProcessFailedError
from ..exchange.codec import gather_objects

try:
    import fcntl

    _LOCKS = True
except ImportError:  # Windows
    _LOCKS = False

ALIGNMENT = 64  # bytes; a cache line
_EXCLUSIVE = 1  # byte of the lock of exclusive parts; byte 0 is that of `SharedMemory.lock`
_TOKEN = 16  # bytes


class SharedMemory:
    """Mapped file without a name, so that nothing is left of it when its processes are gone, however they end.

    The file is anonymous memory (memfd) where the system has it, which needs no /dev/shm, and a deleted file of the
    temporary folder elsewhere. What is written behind the mapped part makes the file longer.

    Args:
        descriptor: descriptor of the open file, owned by this object.
        path: path of the file as long as it has a name.

    Attributes:
        descriptor: descriptor of the open file.
        path: path of the file as long as it has a name; empty otherwise.
        size: number of bytes that are mapped.
    """

    def __init__(self, descriptor: int, path: str = "") -> None:
        self.descriptor = descriptor
        self.path = path
        self.size = int.from_bytes(os.pread(descriptor, 8, _TOKEN), "little")
        self._mapped = mmap.mmap(descriptor, self.size)

    @classmethod
    def create(cls, size: int, *, named: bool = False) -> SharedMemory:
        """Create memory, filled with zeros but for its head.

        Args:
            size: number of bytes behind the head.
            named: whether the file has a name, by which other processes open it, until `remove_name` is called.

        Raises:
            OSError: if there is not enough memory or space.
        """
        total = ALIGNMENT + size
        path = ""
        if not named and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("dadplug-hogwild", os.MFD_CLOEXEC)
        else:
            descriptor, path = tempfile.mkstemp(prefix="dadplug-hogwild-")
        try:
            if not named and path:
                os.unlink(path)
                path = ""
            if hasattr(os, "posix_fallocate"):  # reserved now: a full file system would kill a process later
                os.posix_fallocate(descriptor, 0, total)
            else:
                os.ftruncate(descriptor, total)
            os.pwrite(descriptor, secrets.token_bytes(_TOKEN) + total.to_bytes(8, "little"), 0)
            return cls(descriptor, path)
        except OSError as error:
            os.close(descriptor)
            if path:
                os.unlink(path)
            raise OSError(error.errno, f"no shared memory of {total:,} bytes: {error.strerror}") from error

    @classmethod
    def open(cls, path: str, token: bytes) -> SharedMemory:
        """Open the memory that another process has created.

        Args:
            path: what `address` has returned there.
            token: the token of that memory.

        Raises:
            OSError: if it cannot be opened, or is another file.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(descriptor, _TOKEN, 0) != token:
            os.close(descriptor)
            raise OSError(f"{path} is not the memory that was shared")
        return cls(descriptor)

    @property
    def token(self) -> bytes:
        """Random bytes that identify the memory."""
        return os.pread(self.descriptor, _TOKEN, 0)

    @property
    def address(self) -> str:
        """Path by which other processes of this user open the memory."""
        return self.path or f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def remove_name(self) -> None:
        """Delete the file's name; the processes that have opened it keep it."""
        if self.path:
            os.unlink(self.path)
            self.path = ""

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return a part of the memory as a tensor with a storage of its own.

        Args:
            offset: first byte, behind the head.
            count: number of elements.
            dtype: type of the elements.
        """
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=ALIGNMENT + offset)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other processes from a context; a process that is killed inside leaves the lock open."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX, 1)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1)

    def begin_exclusive(self) -> None:
        """Wait until no other process is in its exclusive part, and begin this process's; its death ends it, too."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX, 1, _EXCLUSIVE)

    def end_exclusive(self) -> None:
        """End this process's exclusive part; do nothing if it has not begun."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, _EXCLUSIVE)

    def write_behind(self, offset: int, content: bytes) -> None:
        """Write bytes behind the mapped part.

        Args:
            offset: first byte, counted from the end of the mapped part.
            content: the bytes.
        """
        view, place = memoryview(content), self.size + offset
        while view:
            written = os.pwrite(self.descriptor, view, place)
            view, place = view[written:], place + written

    def read_behind(self, offset: int, length: int) -> bytes:
        """Read bytes behind the mapped part; the arguments are as in `write_behind`."""
        parts: list[bytes] = []
        place = self.size + offset
        while length:
            part = os.pread(self.descriptor, length, place)
            if not part:
                raise OSError("the shared memory is shorter than expected")
            parts.append(part)
            length, place = length - len(part), place + len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close the descriptor; tensors keep the mapped part."""
        if self.descriptor >= 0:
            self.remove_name()
            os.close(self.descriptor)
            self.descriptor = -1


def aligned(size: int) -> int:
    """Round a number of bytes up to a whole number of cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def check_system() -> None:
    """Raise NotImplementedError where processes cannot share memory in this way."""
    if not _LOCKS:
        raise NotImplementedError("Hogwild! needs Linux or macOS: this system has no locks on parts of files")


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
    """Control block, at the beginning of the shared memory.

    Batches are dealt by a counter over one order of the epoch, which process 0 draws. The order lies behind the mapped
    memory, since its length is known only then: starts of the batches (batches + 1 numbers), the state of each batch
    (0: not dealt; n: dealt to process n - 1; -n: finished there), and the indices of the samples.

    Args:
        memory: the shared memory.
        processes: number of processes.
    """

    def __init__(self, memory: SharedMemory, processes: int) -> None:
        self._memory = memory
        rows = memory.tensor(0, (1 + processes) * _ROW, torch.int64).view(1 + processes, _ROW)
        self._head, self._rows = rows[0].numpy(), rows[1:].numpy()
        behind = _NUMBER * (1 + processes) * _ROW
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


def connected() -> int:
    """Return the number of connected processes; 0 if this process is alone."""
    ready = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.get_world_size() if ready else 0


def check_equal(problem: Exception | None, signature: str) -> None:
    """Compare the processes before anything is shared; all of them must call it.

    Args:
        problem: error that this process has found.
        signature: what must be equal in all processes.

    Raises:
        ValueError: if another process has found an error, or the processes are on several machines.
        MismatchError: if the signatures differ.
    """
    facts = gather_objects((_machine(), platform.node(), signature, "" if problem is None else str(problem)))
    if problem is not None:
        return
    for rank, (*_, other) in enumerate(facts):
        if other:
            raise ValueError(f"process {rank} cannot train: {other}")
    machines = {machine: name for machine, name, *_ in facts}
    if len(machines) > 1:
        raise ValueError(
            f"the {len(facts)} connected processes are on {len(machines)} machines ({', '.join(machines.values())}), "
            "and Hogwild! needs one memory: use LocalSGD, ParameterServer or GradientReduction between machines"
        )
    different = [rank for rank, fact in enumerate(facts) if fact[2] != facts[0][2]]
    if different:
        raise MismatchError(
            f"process {different[0]} has another model, optimizer or option than process 0: {facts[different[0]][2]} "
            f"and {facts[0][2]}"
        )


def _machine() -> str:
    """Return what identifies the running system of this machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return boot.read_text().strip()
    except OSError:
        return platform.node()


def share(size: int, fill: Callable[[SharedMemory], None]) -> tuple[int, SharedMemory]:
    """Create memory in process 0 and open it in the others; all processes must call it.

    Args:
        size: bytes that are needed.
        fill: writes the initial values; called in process 0 before the others open the memory.

    Returns:
        The number of this process, and the memory.

    Raises:
        OSError: in all processes, if one cannot open the memory.
    """
    rank = dist.get_rank()
    problems: list[str] = []
    for named in (False, True):
        if not named and not os.path.isdir("/proc/self/fd"):
            continue
        memory, problem = _try(rank, size, named)
        problems = [f"process {place}: {text}" for place, text in enumerate(gather_objects(problem)) if text]
        if not problems:
            assert memory is not None
            memory.remove_name()
            if rank == 0:
                fill(memory)
            gather_objects(None)
            return rank, memory
        if memory is not None:
            memory.close()
    raise OSError(f"the processes cannot share memory: {'; '.join(problems)}")


def _try(rank: int, size: int, named: bool) -> tuple[SharedMemory | None, str]:
    """Create or open the memory; return it and the error of this process, if any."""
    memory, problem = None, ""
    if rank == 0:
        try:
            memory = SharedMemory.create(size, named=named)
        except OSError as error:
            problem = str(error)
    address, token = gather_objects((memory.address, memory.token) if memory is not None else ("", b""))[0]
    if rank and address:
        try:
            memory = SharedMemory.open(address, token)
        except OSError as error:
            problem = str(error)
    return memory, problem
