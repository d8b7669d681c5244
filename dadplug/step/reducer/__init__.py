"""The exchange of one step: a reducer, and the bucket handlers of the paths."""

from . import factors, summed  # noqa: F401  (each registers its handlers)
from .handler import BucketHandler, handler_type, register_handler
from .summed import SummedHandler

__all__ = ["BucketHandler", "SummedHandler", "handler_type", "register_handler"]
