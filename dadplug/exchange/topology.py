"""Layout of hierarchical groups: the processes of each node."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Hierarchy = str | int | Sequence[Sequence[int]] | None

# Environment variables with the number of a node: torchrun, Lightning, SLURM.
_NODE_VARIABLES = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")


@dataclass(frozen=True)
class Nodes:
    """Processes of each node, and the position of this process among them.

    Attributes:
        members: ranks by node, ascending in each node.
        node: number of this process's node.
        index: index of this process among those of its node.
    """

    members: tuple[tuple[int, ...], ...]
    node: int
    index: int

    @classmethod
    def of(cls, members: Sequence[Sequence[int]], rank: int) -> Nodes:
        """Make the layout as one process sees it.

        Args:
            members: ranks by node.
            rank: rank of the process.
        """
        sorted_members = tuple(tuple(sorted(ranks)) for ranks in members)
        node = next(number for number, ranks in enumerate(sorted_members) if rank in ranks)
        return cls(sorted_members, node, sorted_members[node].index(rank))

    @property
    def count(self) -> int:
        """Number of nodes M."""
        return len(self.members)

    @property
    def own(self) -> tuple[int, ...]:
        """Ranks of this node's processes."""
        return self.members[self.node]

    @property
    def peers(self) -> list[int]:
        """Ranks of the other processes of this node."""
        return [rank for index, rank in enumerate(self.own) if index != self.index]

    @property
    def owners(self) -> int:
        """Number of processes that exchange with other nodes, on every node: as many as the smallest node has."""
        return min(map(len, self.members))

    def partners(self, index: int) -> list[int]:
        """Return the ranks on the other nodes that receive from the process with this index."""
        return [ranks[index % len(ranks)] for number, ranks in enumerate(self.members) if number != self.node]

    def receiver(self, rank: int) -> int:
        """Return the rank on this node that receives from a process of another node."""
        (index,) = (ranks.index(rank) for ranks in self.members if rank in ranks)
        return self.own[index % len(self.own)]


def node_id() -> tuple[str, str]:
    """Return what identifies this process's node: its number, if the launcher gives it one, and its host name."""
    number = next((os.environ[name] for name in _NODE_VARIABLES if name in os.environ), "0")
    return number, socket.gethostname()


def check_hierarchy(hierarchy: Any) -> None:
    """Check a value of the option ``hierarchy``.

    Raises:
        ValueError: if it is not valid; the message lists the valid values.
    """
    whole = isinstance(hierarchy, int) and not isinstance(hierarchy, bool) and hierarchy >= 1
    lists = isinstance(hierarchy, (list, tuple)) and all(isinstance(ranks, (list, tuple)) for ranks in hierarchy)
    if hierarchy is not None and hierarchy != "auto" and not whole and not lists:
        raise ValueError(
            "hierarchy must be None, 'auto', a number of processes on each node, or the ranks by node like "
            f"[[0, 1], [2, 3]], got {hierarchy!r}"
        )


def members_of(hierarchy: Hierarchy, ids: Sequence[Any]) -> list[list[int]]:
    """Find the processes of each node.

    Args:
        hierarchy: ``"auto"``: processes with the same `node_id`; a number of processes on each node, with consecutive
            ranks; or ranks by node.
        ids: the `node_id` of each process, by rank.

    Returns:
        Ranks by node.

    Raises:
        ValueError: if the hierarchy does not fit the number of processes.
    """
    count = len(ids)
    if hierarchy == "auto":
        return [[rank for rank in range(count) if ids[rank] == each] for each in dict.fromkeys(ids)]
    if isinstance(hierarchy, int):
        if count % hierarchy:
            raise ValueError(
                f"hierarchy={hierarchy} processes on each node do not divide {count} processes: where nodes "
                "have different numbers, give the ranks by node, like [[0, 1, 2], [3]]"
            )
        return [list(range(first, first + hierarchy)) for first in range(0, count, hierarchy)]
    assert not isinstance(hierarchy, str)
    members = [list(ranks) for ranks in hierarchy or ()]
    if sorted(rank for ranks in members for rank in ranks) != list(range(count)) or not all(members):
        raise ValueError(f"hierarchy must name each of the ranks 0 to {count - 1} once, got {members}")
    return members
