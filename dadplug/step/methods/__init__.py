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

for _name in ("powersgd", "rankdad", "topk"):  # few runs need more than one of them
    METHODS.defer(f"{__name__}.{_name}", _name)

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
