"""The handlers of an exchange, one kind a file; each kind registers the paths that it serves."""

from . import dense, factors, hierarchical, powersgd, topk  # noqa: F401  (each registers itself)
from .dense import DenseHandler
from .handler import BucketHandler, handler_type, register_handler, write_gradient

__all__ = ["DenseHandler", "BucketHandler", "register_handler", "handler_type", "write_gradient"]
