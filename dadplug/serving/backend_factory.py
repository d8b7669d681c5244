"""Choice of a model's backend."""

from __future__ import annotations

from typing import Any

from ..errors import LoadError
from .backends import Backend, ObjectBackend
from .model import Model
from .process import ProcessBackend


def backend_of(model: Any, **settings: Any) -> Backend:
    """Return the backend of a model.

    Args:
        model: a `dadplug.serving.Model`, a path, a module or a function.
        settings: arguments of `ProcessBackend` besides the model.

    Raises:
        LoadError: if it is none of these.
    """
    if isinstance(model, Model):
        return ProcessBackend(model, **settings)
    if isinstance(model, str) or hasattr(model, "__fspath__"):
        return ProcessBackend(Model(model), **settings)
    if callable(model):
        return ObjectBackend(model)
    raise LoadError(f"a model is a path, a dadplug.serving.Model, a module or a function, not {type(model).__name__}")
