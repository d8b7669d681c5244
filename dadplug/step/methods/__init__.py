"""Methods of gradient agreement: the exact ones in `base`, each other one in a file of its own."""

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

METHODS.defer(f"{__name__}.powersgd", "powersgd")
METHODS.defer(f"{__name__}.rankdad", "rankdad")
METHODS.defer(f"{__name__}.topk", "topk")

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
