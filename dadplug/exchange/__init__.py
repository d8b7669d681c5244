"""Exchange between sites: transports, payloads, wire formats and the traffic meter."""

from .factory import open_transport
from .objects import gather_objects
from .rendezvous import DEFAULT_TIMEOUT, connect
from .sites import Sites
from .topology import Hierarchy
from .traffic import Traffic
from .transport import Gather, Reduction, Transport

__all__ = [
    "DEFAULT_TIMEOUT",
    "Gather",
    "Hierarchy",
    "Reduction",
    "Sites",
    "Traffic",
    "Transport",
    "connect",
    "gather_objects",
    "open_transport",
]
