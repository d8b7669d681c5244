"""Exchange between sites: transports, payloads, wire formats and the traffic meter."""

import warnings
from typing import Any

from .codec import gather_objects
from .factory import open_transport
from .rendezvous import DEFAULT_TIMEOUT, connect
from .status import PeerNames
from .traffic import Traffic
from .transport import Gather, Hierarchy, PendingSum, Transport

__all__ = [
    "DEFAULT_TIMEOUT",
    "Gather",
    "Hierarchy",
    "PeerNames",
    "PendingSum",
    "Traffic",
    "Transport",
    "connect",
    "gather_objects",
    "open_transport",
]

_RENAMED = {"Reduction": "PendingSum", "Sites": "PeerNames"}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"dadplug.exchange.{name} is now {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]
