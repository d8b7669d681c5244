"""Parameter server: asynchronous training by one log of gradients that every site applies."""

from __future__ import annotations

from .experiment import Outcome, launch_ps_and_workers
from .options import ServerOptions
from .server import ParameterServer

__all__ = ["Outcome", "ParameterServer", "ServerOptions", "launch_ps_and_workers"]
