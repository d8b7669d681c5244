"""Models from builders, and the weights that are loaded into them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..errors import LoadError
from ..models import MODELS
from .backends import Array
from .schema import Schema


class Loaded(NamedTuple):
    """A model that can compute.

    Attributes:
        run: function of an array of shape (samples, ...) that returns a tensor or an array.
        schema: schema of one input.
    """

    run: Callable[[Array], Any]
    schema: Schema


def build(description: Mapping[str, Any], arguments: Mapping[str, Any], state: Mapping[str, Tensor]) -> nn.Module:
    """Return the model of a builder, or without one a model of dadplug that the state dict fits.

    Raises:
        LoadError: if there is no such model.
    """
    if description["builder"] is None:
        return _known_model(state, description["path"])
    builder = import_builder(description["builder"])
    given = description["arguments"]
    if given is None:
        given = _accepted(builder, arguments)
    model = builder(**given)
    if not isinstance(model, nn.Module):
        raise LoadError(f"{description['builder']} returns {type(model).__name__}, not a torch.nn.Module")
    return model


def import_builder(name: str) -> Callable[..., Any]:
    """Import a class or function by FILE.py:NAME or MODULE:NAME.

    Raises:
        LoadError: if it cannot be found.
    """
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        path = Path(place)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise LoadError(f"there is no file {place}")
        sys.path.insert(0, str(path.parent))  # for the modules beside it
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise LoadError(f"{name}: {error}") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise LoadError(f"{place} has no {attribute}")
        found = getattr(found, part)
    builder: Callable[..., Any] = found
    return builder


def _accepted(builder: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that a builder takes."""
    try:
        parameters = inspect.signature(builder).parameters.values()
    except ValueError:  # a class of an extension module
        return {}
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return dict(arguments)
    return {each.name: arguments[each.name] for each in parameters if each.name in arguments}


def _known_model(state: Mapping[str, Tensor], path: str) -> nn.Module:
    for name in MODELS:
        try:
            model = MODELS[name]()
        except TypeError:  # it needs arguments
            continue
        shapes = {key: value.shape for key, value in model.state_dict().items()}
        prefix = prefix_of(state, shapes)
        if prefix is not None and all(state[prefix + key].shape == shape for key, shape in shapes.items()):
            return model
    raise LoadError(
        f"{path} holds weights and no code: name the class, or a function that builds the model, as builder"
    )


def load_state(model: nn.Module, state: Mapping[str, Tensor], path: Path, assign: bool = False) -> None:
    """Load a state dict; the model may be a part of the module that was saved.

    Raises:
        LoadError: if the weights do not fit.
    """
    prefix = prefix_of(state, model.state_dict())
    part = (
        state
        if prefix is None
        else {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    )
    try:
        model.load_state_dict(part, strict=True, assign=assign)
    except RuntimeError as error:
        raise LoadError(f"the weights in {path} do not fit the builder's model: {error}") from None


def prefix_of(state: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Return the prefix under which a state dict has a model's keys; None if there is not exactly one."""
    if set(state) == set(own):
        return ""
    first = next(iter(own), "")
    prefixes = {key[: len(key) - len(first)] for key in state if key.endswith(first)} - {""}
    found = [each for each in prefixes if {key[len(each) :] for key in state if key.startswith(each)} == set(own)]
    return found[0] if len(found) == 1 and first else None
