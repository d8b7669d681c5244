"""Exchange between sites: transports, payloads, wire formats and the traffic meter."""

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
