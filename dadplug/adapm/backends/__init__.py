"""Backends of a parameter manager by name: ``ParameterManager(backend="adapm")``."""

from .base import BACKENDS, Backend, TableSpec
from .bindings import BindingsBackend
from .builtin import BuiltinBackend

BACKENDS.register("builtin")(BuiltinBackend)
BACKENDS.register("adapm")(BindingsBackend)

__all__ = ["BACKENDS", "Backend", "BindingsBackend", "BuiltinBackend", "TableSpec"]
