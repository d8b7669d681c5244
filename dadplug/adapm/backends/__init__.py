"""What a parameter manager runs on, by name: ``ParameterManager(backend="adapm")``."""

from __future__ import annotations

import importlib

from ...registry import Registry

# The module and the class of each.
BACKENDS: Registry[str, tuple[str, str]] = Registry("backend")
BACKENDS.register("builtin")(("dadplug.adapm.manager", "ParameterManager"))
BACKENDS.register("adapm")(("dadplug.adapm.backends.bindings", "BindingsManager"))


def manager_class(name: str) -> type:
    """Finds the manager of a backend.

    Raises:
        ValueError: if there is no such backend; the message lists the valid ones.
    """
    module, kind = BACKENDS[name]
    found: type = getattr(importlib.import_module(module), kind)
    return found


__all__ = ["BACKENDS", "manager_class"]
