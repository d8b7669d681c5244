"""The hub that sites of different institutions dial: kits, local policies, encrypted connections, membership."""

from __future__ import annotations

from .policy import Policy
from .project import HUB, Project, Roster

__all__ = ["HUB", "Policy", "Project", "Roster"]
