"""Low-rank factors of gradients, ``left, right = compress(deltas, activations, rank=8)``; table rows in `sparse`."""

from . import sparse
from .compress import Carry, Compressed, compress, compress_matrix, squared_norm
from .dispatch import warmup

__all__ = ["Carry", "Compressed", "compress", "compress_matrix", "sparse", "squared_norm", "warmup"]
