"""Differentially private gradients: per-sample clipping, noise, sampling and accounting at each site."""

from .differential_privacy import DifferentialPrivacy
from .poisson import PoissonLoader

__all__ = ["DifferentialPrivacy", "PoissonLoader"]
