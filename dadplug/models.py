"""Models by name: ``build_model("MNISTNet", classes=10)``. The models are in ``examples/zoo``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from .examples.zoo.images import DataPair
from .examples.zoo.models import GCN, SMALL, MNISTNet, ViT, WideDeep
from .support.registry import Registry

__all__ = ["GCN", "MODELS", "MNISTNet", "ViT", "WideDeep", "build_for", "build_model"]

MODELS: Registry[str, Callable[..., nn.Module]] = Registry("model")
MODELS.register("GCN")(GCN)
MODELS.register("MNISTNet", "mnist_net")(MNISTNet)
MODELS.register("vit")(ViT)
MODELS.register("vit-small")(partial(ViT, **SMALL))
MODELS.register("wide_deep")(WideDeep)


def build_model(name: str, *args: Any, **kwargs: Any) -> nn.Module:
    """Build a model by name.

    Args:
        name: name of the model, in upper or lower case.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.

    Raises:
        ValueError: if there is no such model, or it does not take these arguments.

    Example:
        >>> from dadplug.models import build_model
        >>> build_model("mnist_net", classes=3).last.out_features
        3
    """
    model = MODELS[name]
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"model {name!r} does not take these arguments: {error}") from error


def build_for(data: DataPair, name: str, *args: Any, **kwargs: Any) -> tuple[nn.Module, DataPair]:
    """Build a model with the number of classes and channels of a data set; arguments take precedence.

    Args:
        data: the data set.
        name: name of the model, in upper or lower case.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.

    Returns:
        The model, and the data set in the image size of the model.

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
