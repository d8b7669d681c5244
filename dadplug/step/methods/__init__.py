"""Methods of gradient agreement: the exact ones in `base`, each other one in a file of its own."""

from . import powersgd, rankdad, topk  # noqa: F401  (each registers itself)
from .base import (
    METHODS,
    Method,
    MethodOptions,
    Quality,
    Traits,
    check_allowed,
    decode,
    decode_bias,
    is_product,
    make_method,
    method_names,
    on_registration,
    register_method,
)

__all__ = [
    "METHODS",
    "Method",
    "MethodOptions",
    "Quality",
    "Traits",
    "check_allowed",
    "decode",
    "decode_bias",
    "is_product",
    "make_method",
    "method_names",
    "on_registration",
    "register_method",
]
