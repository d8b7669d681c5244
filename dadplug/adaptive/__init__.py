"""Trainings that are restarted, also with another number of sites: epochs, loaders, accumulators.

Epochs and goodput may be changed here without reading another room; `noise` reads the units of `step`.
"""

from __future__ import annotations

from .adaptive_loader import AdaptiveDataLoader
from .epochs import Epochs, remaining_epochs_until
from .loader import ElasticDataLoader, ElasticSampler
from .progress import Accumulator, reset_progress

__all__ = [
    "Accumulator",
    "AdaptiveDataLoader",
    "ElasticDataLoader",
    "ElasticSampler",
    "Epochs",
    "remaining_epochs_until",
    "reset_progress",
]
