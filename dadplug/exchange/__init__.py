"""Exchange between sites: transports, payloads, wire formats and the traffic meter.

Its files load when first used, so that the hub's server, which needs few of them, loads neither layers nor kernels. A
transport or a format may be changed here without reading the methods; other bytes need another `codec.SITES_VERSION`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .codec import gather_objects
    from .factory import open_transport
    from .rendezvous import DEFAULT_TIMEOUT, connect
    from .status import PeerNames
    from .traffic import Traffic
    from .transport import Gather, Hierarchy, PendingSum, Transport

_LAZY = {
    "DEFAULT_TIMEOUT": "rendezvous",
    "Gather": "transport",
    "Hierarchy": "transport",
    "PeerNames": "status",
    "PendingSum": "transport",
    "Traffic": "traffic",
    "Transport": "transport",
    "connect": "rendezvous",
    "gather_objects": "codec",
    "open_transport": "factory",
}

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


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
