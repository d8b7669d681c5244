"""Local steps: sites train alone for some steps and then agree on their parameters (local SGD, DiLoCo).

What an agreement sends, and when, may be changed here without reading the step of gradients.
"""

from .local_sgd import LocalSGD
from .options import LocalOptions

__all__ = ["LocalOptions", "LocalSGD"]
