"""Classes for Catalyst's runners, and the import of what needs Catalyst."""

from __future__ import annotations

import importlib
from typing import Any


def from_catalyst(name: str, module: str) -> Any:
    """Import a class that needs Catalyst.

    Args:
        name: name of the class.
        module: name of its module.

    Raises:
        ImportError: if Catalyst is not installed.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in ("catalyst", "accelerate"):
            raise ImportError(
                f"{name} needs Catalyst, which is not installed: pip install 'dadplug[catalyst]' "
                "(with pip below 24.1, since newer ones refuse Catalyst's metadata)"
            ) from error
        raise
