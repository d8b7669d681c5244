"""Structure of a model, compared step by step: layers and parameters are added, removed and frozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_MANAGED = "_dadplug_managed"  # attribute of a parameter


class ModelStructure:
    """The modules and parameters of a model at one time, without those that are managed elsewhere.

    Args:
        model: the model.

    Attributes:
        parameters: the parameters by `id`.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._tables: list[dict[str, Any]] = [module._modules for module in modules]
        self._tables += [module._parameters for module in modules]
        self._place, self._content = self._places(), self._contents()
        self.parameters = {id(each): each for each in model.parameters() if not is_managed(each)}
        self._training = self._trainings()

    def _places(self) -> list[tuple[str, int]]:
        return [(name, id(value)) for table in self._tables for name, value in table.items()]

    def _contents(self) -> list[tuple[str, int]]:
        items = (item for table in self._tables for item in table.items())
        return [(name, id(value)) for name, value in items if not (isinstance(value, Tensor) and is_managed(value))]

    def _trainings(self) -> list[Any]:
        return [(each.requires_grad, each.dtype, each.shape) for each in self.parameters.values()]

    def same_tensors(self) -> bool:
        """Return whether the model still has the same modules and parameters, each in its place."""
        return self._places() == self._place or self._contents() == self._content

    def same_training(self) -> bool:
        """Return whether the parameters are trained or frozen, typed and shaped as they were."""
        return self._trainings() == self._training


def mark_managed(parameter: nn.Parameter, managed: bool) -> None:
    """Mark a parameter as managed elsewhere: a `GradientReduction` of its model does not send its gradients.

    Args:
        parameter: the parameter.
        managed: whether it is managed elsewhere.
    """
    setattr(parameter, _MANAGED, managed)


def is_managed(parameter: Any) -> bool:
    """Return whether a parameter is managed elsewhere."""
    return getattr(parameter, _MANAGED, False) is True


@contextmanager
def without_managed(model: nn.Module) -> Iterator[None]:
    """Take the parameters that are managed elsewhere out of a model, inside a ``with`` block."""
    hidden = []
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if is_managed(parameter):
                hidden.append((module, name, module._parameters.pop(name)))
    try:
        yield
    finally:
        for module, name, parameter in hidden:
            module._parameters[name] = parameter
