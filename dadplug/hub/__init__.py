"""The hub that sites of different institutions connect to: kits, local policies, encrypted connections, membership.

Each of the rooms `pki`, `secure`, `wire`, `site` and `server` says in its first line what may be changed there without
reading the others; `check` and `torch` are rooms of one file.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
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


_MOVED = {
    "key_agreement": "secure.key_agreement",
    "kits": "pki.kits",
    "provision": "pki.provision",
    "sealing": "secure.sealing",
    "secure.link_sealing": "secure.epochs",
    "secure.rate_limit": "secure.secure_socket",
    "tls": "secure.tls",
}


class _MovedModule(ModuleType):
    """Documented module by its former name, which works for one version."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system asks for
            raise AttributeError(name)
        new = f"{__package__}.{_MOVED[self.__name__.removeprefix(f'{__package__}.')]}"
        warnings.warn(f"{self.__name__} is deprecated: use {new}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(new), name)


for _name in _MOVED:
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _MovedModule(f"{__name__}.{_name}")
