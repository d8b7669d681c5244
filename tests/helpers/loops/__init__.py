"""Training loops as users write them, each run with `GradientReduction` and with gradients averaged by hand."""

from . import adversarial, basic, features, optimisation, structure
from .compare import LOOPS

__all__ = ["LOOPS", "adversarial", "basic", "features", "optimisation", "structure"]
