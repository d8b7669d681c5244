"""The hub that sites of different institutions dial: kits, local policies, encrypted connections, membership."""

from __future__ import annotations

from .pki.project import HUB, Policy, Project, Roster

__all__ = ["HUB", "Policy", "Project", "Roster"]
