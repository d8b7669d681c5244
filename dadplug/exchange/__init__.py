"""What crosses the network between sites."""

from .machines import Hierarchy
from .objects import gather_objects
from .opening import open_transport
from .rendezvous import DEFAULT_TIMEOUT, connect
from .sites import Sites
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
