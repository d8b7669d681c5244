"""Ways to train that are raced, one family a file."""

from __future__ import annotations

from . import alone, ddp, gradients, hogwild, local_steps, parameter_server
from .base import WAYS, Place, Trainer, Way

__all__ = ["WAYS", "Place", "Trainer", "Way", "alone", "ddp", "gradients", "hogwild", "local_steps", "parameter_server"]
