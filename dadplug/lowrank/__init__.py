"""Low-rank factors of gradients, ``left, right = compress(deltas, activations, rank=8)``; table rows in `sparse`.

A kernel may be changed here without reading another room: `portable` states what each one computes.
"""

from . import sparse
from .compress import Carry, Compressed, compress, compress_matrix, squared_norm
from .dispatch import dequantise, orthonormalise, quantise, sum_of_products, sum_one_by_one, top_k, warmup

__all__ = [
    "Carry",
    "Compressed",
    "compress",
    "compress_matrix",
    "dequantise",
    "orthonormalise",
    "quantise",
    "sparse",
    "squared_norm",
    "sum_of_products",
    "sum_one_by_one",
    "top_k",
    "warmup",
]
