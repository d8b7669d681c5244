"""Which processes run on which machine: the layout of hierarchical groups."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Hierarchy = str | int | Sequence[Sequence[int]] | None

# What launchers call a machine's number: torchrun, Lightning, SLURM.
_NUMBERS = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")


@dataclass(frozen=True)
class Machines:
    """The processes of each machine, and the place of one of them.

    Attributes:
        members: ranks by machine, each machine's in order.
        machine: number of this process's machine.
        index: place of this process among its machine's.
    """

    members: tuple[tuple[int, ...], ...]
    machine: int
    index: int

    @classmethod
    def of(cls, members: Sequence[Sequence[int]], rank: int) -> Machines:
        """Finds a process's place."""
        sorted_members = tuple(tuple(sorted(ranks)) for ranks in members)
        machine = next(number for number, ranks in enumerate(sorted_members) if rank in ranks)
        return cls(sorted_members, machine, sorted_members[machine].index(rank))

    @property
    def count(self) -> int:
        """Number of machines M."""
        return len(self.members)

    @property
    def own(self) -> tuple[int, ...]:
        """Ranks of this machine's processes."""
        return self.members[self.machine]

    @property
    def peers(self) -> list[int]:
        """Ranks of the other processes of this machine."""
        return [rank for index, rank in enumerate(self.own) if index != self.index]

    @property
    def owners(self) -> int:
        """Number of processes on every machine that can work for it: what the smallest machine has."""
        return min(map(len, self.members))

    def partners(self, index: int) -> list[int]:
        """Ranks of the processes of the other machines that take what comes from the one at this place."""
        return [ranks[index % len(ranks)] for number, ranks in enumerate(self.members) if number != self.machine]

    def receiver(self, rank: int) -> int:
        """Rank of the process of this machine that takes what comes from a process of another machine."""
        (index,) = (ranks.index(rank) for ranks in self.members if rank in ranks)
        return self.own[index % len(self.own)]


def own_place() -> tuple[str, str]:
    """Tells where this process runs: the machine's number, if its launcher gives it one, and its name."""
    number = next((os.environ[name] for name in _NUMBERS if name in os.environ), "0")
    return number, socket.gethostname()


def check_hierarchy(hierarchy: Any) -> None:
    """Refuses what is no hierarchy.

    Raises:
        ValueError: with what it may be.
    """
    whole = isinstance(hierarchy, int) and not isinstance(hierarchy, bool) and hierarchy >= 1
    lists = isinstance(hierarchy, (list, tuple)) and all(isinstance(ranks, (list, tuple)) for ranks in hierarchy)
    if hierarchy is not None and hierarchy != "auto" and not whole and not lists:
        raise ValueError(
            "hierarchy must be None, 'auto', a number of processes on each machine, or the ranks by machine like "
            f"[[0, 1], [2, 3]], got {hierarchy!r}"
        )


def members_of(hierarchy: Hierarchy, places: Sequence[Any]) -> list[list[int]]:
    """Finds the processes of each machine.

    Args:
        hierarchy: ``"auto"``: those that are in one place; a number of processes on each machine, which have
            neighbouring ranks; or ranks by machine.
        places: by rank, what `own_place` says there.

    Returns:
        Ranks by machine.

    Raises:
        ValueError: if the numbers do not fit the number of processes.
    """
    count = len(places)
    if hierarchy == "auto":
        return [[rank for rank in range(count) if places[rank] == place] for place in dict.fromkeys(places)]
    if isinstance(hierarchy, int):
        if count % hierarchy:
            raise ValueError(
                f"hierarchy={hierarchy} processes on each machine do not divide {count} processes: where machines "
                "have different numbers, give the ranks by machine, like [[0, 1, 2], [3]]"
            )
        return [list(range(first, first + hierarchy)) for first in range(0, count, hierarchy)]
    assert not isinstance(hierarchy, str)
    members = [list(ranks) for ranks in hierarchy or ()]
    if sorted(rank for ranks in members for rank in ranks) != list(range(count)) or not all(members):
        raise ValueError(f"hierarchy must name each of the ranks 0 to {count - 1} once, got {members}")
    return members
