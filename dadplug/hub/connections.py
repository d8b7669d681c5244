"""The connection of this process to a hub, for trainers, which need not have the extra `hub` to ask for it."""

from __future__ import annotations

from typing import Any, Protocol

LOOPBACK = "127.0.0.1"
# Environment variable with the number of processes of a site, of which the leader starts all others.
STARTED_PROCESSES = "DADPLUG_STARTED_PROCESSES"


class Connection(Protocol):
    """Part of `SiteRuntime` that trainers use."""

    kit: Any

    @property
    def processes(self) -> int:
        """Number of processes of this site."""

    @property
    def local_rank(self) -> int:
        """Number of this process among those of its site."""

    @property
    def elastic(self) -> bool:
        """Whether training goes on without a site that leaves."""

    @property
    def is_lost(self) -> bool:
        """Whether the connection is closed, or a site or a process of this one is lost."""

    def meet_processes(self, count: int, port: int, timeout: float) -> None:
        """Agree with all other processes on their number."""

    def close_transports(self) -> None:
        """Close the connections to the hub."""


connections: list[Connection] = []  # the current one last


def current_connection() -> Connection | None:
    """Return the connection of this process; None where it is not connected by a kit."""
    return connections[-1] if connections else None
