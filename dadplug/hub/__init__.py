"""The hub that sites of different institutions dial: kits, local policies, encrypted connections, membership.

Each of the rooms `pki`, `secure`, `wire`, `site` and `server` says in its first line what may be changed there without
reading the others; `check` and `torch` are rooms of one file.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from .pki.project import HUB, Policy, Project, Roster

__all__ = ["HUB", "Policy", "Project", "Roster"]

_MOVED = {
    "key_agreement": "secure.key_agreement",
    "kits": "pki.kits",
    "provision": "pki.provision",
    "sealing": "secure.sealing",
    "tls": "secure.tls",
}


class _MovedModules(MetaPathFinder, Loader):
    """Finder of documented modules by their former names, which work for one version."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package == __name__ and name in _MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = f"{__name__}.{_MOVED[old.rpartition('.')[2]]}"
        warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)


sys.meta_path.append(_MovedModules())
