"""Low-rank factors of gradients, ``left, right = compress(deltas, activations, rank=8)``; table rows in `sparse`.

A kernel may be changed here without reading another room: `portable` states what each one computes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .dispatch import dequantise, orthonormalise, quantise, sum_of_products, sum_one_by_one, top_k, warmup

if TYPE_CHECKING:
    from . import sparse
    from .compression import Carry, Compressed, compress, compress_matrix, squared_norm

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "sparse":
        return importlib.import_module(f"{__name__}.sparse")
    return getattr(importlib.import_module(f"{__name__}.compression"), name)  # not in runs that compress nothing
