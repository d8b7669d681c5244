"""Parameter server: asynchronous training by one log of gradients that every site applies.

The hub imports the sequencer only, so that what a site needs loads when it is first used. The sequencer
may be changed here without reading another room.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connect import ServerOptions
    from .experiment import Outcome, launch_ps_and_workers
    from .server import ParameterServer

__all__ = ["Outcome", "ParameterServer", "ServerOptions", "launch_ps_and_workers"]

_LAZY = {
    "Outcome": "experiment",
    "ParameterServer": "server",
    "ServerOptions": "connect",
    "launch_ps_and_workers": "experiment",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
