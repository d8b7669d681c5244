"""What crosses the network between sites."""

from .rendezvous import DEFAULT_TIMEOUT, connect
from .sites import Sites
from .traffic import Traffic
from .transport import Gather, Reduction, Transport, open_transport

__all__ = ["DEFAULT_TIMEOUT", "Gather", "Reduction", "Sites", "Traffic", "Transport", "connect", "open_transport"]
