"""Low-rank factors of gradients: ``left, right = compress(deltas, activations, rank=8)``."""

from .compress import Compressed, compress, squared_norm
from .dispatch import warmup

__all__ = ["Compressed", "compress", "squared_norm", "warmup"]
