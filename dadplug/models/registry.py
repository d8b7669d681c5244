"""The table of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..registry import Registry

MODELS: Registry[Callable[..., nn.Module]] = Registry("model")


def build_model(name: str, *args: Any, **kwargs: Any) -> nn.Module:
    """Builds a model by name.

    Args:
        name: name of the model, in any case.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.

    Raises:
        ValueError: if there is no such model, or if it does not take these arguments.
    """
    model = MODELS[name]
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"model {name!r} does not take these arguments: {error}") from error
