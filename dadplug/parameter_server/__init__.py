"""Parameter server: asynchronous training by one log of gradients that every site applies."""

from __future__ import annotations

from .options import ServerOptions
from .server import ParameterServer

__all__ = ["ParameterServer", "ServerOptions"]
