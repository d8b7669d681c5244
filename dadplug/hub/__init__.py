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

_MOVED = {
    "key_agreement": "secure.key_agreement",
    "kits": "pki.kits",
    "provision": "pki.provision",
    "sealing": "secure.sealing",
    "tls": "secure.tls",
}


class _MovedModule(ModuleType):
    """Documented module by its former name, which works for one version."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system asks for
            raise AttributeError(name)
        new = f"{__package__}.{_MOVED[self.__name__.rpartition('.')[2]]}"
        warnings.warn(f"{self.__name__} is deprecated: use {new}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(new), name)


for _name in _MOVED:
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _MovedModule(f"{__name__}.{_name}")
