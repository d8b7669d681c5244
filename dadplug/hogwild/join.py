"""Shared memory of processes that a launcher has started and connected."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from ..errors import MismatchError
from ..exchange.codec import gather_objects
from .memory import SharedMemory


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
