"""Tuner: measures on this machine which constants kernels and served models are fastest with, and keeps them."""

from .result import Row, Tuning
from .tune import tune

__all__ = ["Row", "Tuning", "tune"]
