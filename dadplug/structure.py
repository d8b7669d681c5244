"""What a model is made of, to be compared step by step: layers and parameters come, go and are frozen."""

from __future__ import annotations

from typing import Any

from torch import nn


class ModelStructure:
    """The modules and parameters of a model at one time.

    Args:
        model: the model.

    Attributes:
        parameters: the parameters by `id`.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._tables: list[dict[str, Any]] = [module._modules for module in modules]
        self._tables += [module._parameters for module in modules]
        self._content = self._contents()
        self.parameters = {id(parameter): parameter for parameter in model.parameters()}
        self._training = self._trainings()

    def _contents(self) -> list[int]:
        return [id(value) for table in self._tables for value in table.values()]

    def _trainings(self) -> list[Any]:
        return [(each.requires_grad, each.dtype, each.shape) for each in self.parameters.values()]

    def same_tensors(self) -> bool:
        """Return whether the model still has the same modules and parameters, each in its place."""
        return self._contents() == self._content

    def same_training(self) -> bool:
        """Return whether the parameters are trained or frozen, typed and shaped as they were."""
        return self._trainings() == self._training
