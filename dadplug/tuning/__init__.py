"""Tuner: measures on this machine which constants kernels and served models are fastest with, and keeps them."""

from .tuner import Row, Tuning, tune

__all__ = ["Row", "Tuning", "tune"]
