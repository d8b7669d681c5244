"""Low-rank factors of gradients, ``left, right = compress(deltas, activations, rank=8)``; table rows in `sparse`."""

from . import sparse
from .compress import Compressed, compress, squared_norm
from .dispatch import warmup

__all__ = ["Compressed", "compress", "sparse", "squared_norm", "warmup"]
