"""Local steps: sites train alone for some steps and then agree on their parameters (local SGD, DiLoCo)."""

from .local_sgd import LocalSGD
from .options import LocalOptions

__all__ = ["LocalOptions", "LocalSGD"]
