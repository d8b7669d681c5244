"""Linear layers of other libraries, registered by the names of their classes, so that no library is imported.

What a class of such a name computes is compared once with the linear layer that it is taken for: a release of the
library that computes something else is all-reduced, and the plan says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from .factor import LINEAR, Form
from .linear import Linear, linear_with_factors
from .registry import LayerFamily, Recorder, register_family


class LibraryLinear(LayerFamily):
    """Family of linear layers that are recognised by the name of their class.

    Attributes:
        in_dimension: dimension of the weight that has the width of the input.
    """

    in_dimension = 1

    def __init__(self) -> None:
        self._refusals: dict[type[nn.Module], str] = {}

    def refuses(self, module: nn.Module) -> str:
        kind = type(module)
        if kind not in self._refusals and not getattr(module, self.weight).is_meta:
            same = self._computes_the_same(module)
            self._refusals[kind] = "" if same else f"{kind.__name__} of this release is not a plain linear layer"
        return self._refusals.get(kind, "")

    @torch.no_grad()
    def _computes_the_same(self, module: nn.Module) -> bool:
        """Return whether the module's own forward agrees with the family's on two rows."""
        weight = getattr(module, self.weight)
        width = weight.shape[self.in_dimension]
        rows = torch.arange(2 * width, device=weight.device).cos().to(weight.dtype).view(2, width)
        try:
            found = type(module).forward(module, rows)
            expected = self.forward(module, _no_factors, False, rows)
            error, size = (found - expected).double().norm(), expected.double().norm()
            return bool(error <= torch.finfo(found.dtype).eps ** 0.5 * size)
        except (AttributeError, TypeError, RuntimeError):
            return False


def _no_factors(activations: Tensor, deltas: Tensor, form: Form = LINEAR) -> None:
    """Ignore factors; the comparison runs no backward pass."""


@register_family(
    "mmcv.cnn.bricks.wrappers.Linear",
    "timm.layers.linear.Linear",
    "timm.models.layers.linear.Linear",
    "torch_geometric.nn.dense.linear.Linear",
    "transformers.models.falcon.modeling_falcon.FalconLinear",
)
class NamedLinear(LibraryLinear, Linear):
    """Family of fully connected layers whose forward is not that of `nn.Linear`, but computes the same."""

    def forward(
        self, module: nn.Module, record: Recorder, weight_gradients: bool, *args: Tensor, **kwargs: Tensor
    ) -> Tensor:
        (rows,) = (*args, *kwargs.values())
        return super().forward(module, record, weight_gradients, rows)


@dataclass(frozen=True)
class TransposedForm(Form):
    """Form of linear layers whose weight has the shape (in, out)."""

    transposed: ClassVar[bool] = True

    def widths(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape[1], shape[0]

    def gradient(self, deltas: Tensor, activations: Tensor) -> Tensor:
        return activations.T @ deltas

    def add_to(self, gradient: Tensor, deltas: Tensor, activations: Tensor) -> Tensor:
        return gradient.addmm_(activations.T, deltas)

    def unfold(self, deltas: Tensor, activations: Tensor) -> tuple[Tensor, Tensor]:
        return activations, deltas


TRANSPOSED = TransposedForm()


@register_family("transformers.pytorch_utils.Conv1D")
class TransposedLinear(LibraryLinear):
    """Family of linear layers with a weight of shape (in, out)."""

    in_dimension = 0

    def known_form(self, module: nn.Module) -> Form:
        return TRANSPOSED

    def forward(self, module: nn.Module, record: Recorder, weight_gradients: bool, x: Tensor) -> Tensor:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        return linear_with_factors(x, weight, bias, record, weight_gradients, TRANSPOSED)
