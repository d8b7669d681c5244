"""Races of the ways to train a model, on the user's own model and data."""

from __future__ import annotations

from .compare import compare
from .result import Comparison
from .row import Row

__all__ = ["Comparison", "Row", "compare"]
