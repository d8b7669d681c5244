"""The hub that sites of different institutions connect to: kits, local policies, encrypted connections, membership.

Each of the rooms `pki`, `secure`, `wire`, `site` and `server` says in its first line what may be changed there without
reading the others; `check` and `torch` are rooms of one file.
"""

from __future__ import annotations

from typing import Any

from .pki.project import HUB, Policy, Project, Roster

__all__ = ["HUB", "Policy", "Project", "Roster"]

LOOPBACK = "127.0.0.1"
# Environment variable with the number of processes of a site, of which the leader starts all others.
STARTED_PROCESSES = "DADPLUG_STARTED_PROCESSES"

connections: list[Any] = []
"""Connections of this process, the current one last: each is a `SiteRuntime`, which needs the extra `hub`."""


def current_connection() -> Any:
    """Return the `SiteRuntime` of this process; None where it is not connected by a kit."""
    return connections[-1] if connections else None
