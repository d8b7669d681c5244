"""The table of models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from ..registry import Registry

if TYPE_CHECKING:
    from ..data import DataPair

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


def build_for(data: DataPair, name: str, *args: Any, **kwargs: Any) -> tuple[nn.Module, DataPair]:
    """Builds a model for a data set: with its classes and channels, unless the arguments say otherwise.

    Args:
        data: the data set.
        name: name of the model, in any case.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.

    Returns:
        The model, and the data set in the size that the model is for.

    Raises:
        ValueError: as `build_model`.
    """
    channels, height, width = data.train.shape
    known = {"classes": data.classes, "channels": channels, "in_features": channels * height * width}
    accepted = list(inspect.signature(MODELS[name]).parameters)
    own = {key: value for key, value in known.items() if key in accepted[len(args) :]}
    model = build_model(name, *args, **(own | kwargs))
    size = getattr(model, "image_size", None)
    return model, data if size is None else data.resized(size)
