"""Factors of `nn.Linear`: ``Y = A W^T + b`` has ``grad W = D^T A`` and ``grad b = D^T 1``.

Linear layers of other libraries are registered by the names of their classes, so that no library is imported. What a
class of such a name computes is compared once with the linear layer that it is taken for: a release of the library that
computes something else is all-reduced, and the plan says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .factor import LINEAR, Form
from .products import linear, product, thread
from .registry import LayerFamily, Recorder, gradient_use, register_family

_LARGE = 1 << 26  # multiplications for the gradient of an input; they take about a millisecond


class _LinearWithFactors(torch.autograd.Function):
    """`F.linear` whose backward records the factors, and forms the weight gradient only on request."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        record: Recorder,
        weight_gradients: bool,
        form: Form,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.record = record
        ctx.weight_gradients = weight_gradients
        ctx.form = form
        ctx.fast = thread.fastest
        return linear(inputs, weight.T if form.transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, deltas: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        matrix = weight.T if ctx.form.transposed else weight
        parameters = _parameter_gradients(ctx, inputs, matrix, deltas)
        grad_inputs = None
        if ctx.needs_input_grad[0]:  # under autocast the deltas come in a narrower type than weight or input
            matrix = matrix.to(deltas.dtype)
            grad_inputs = (product(deltas, matrix) if ctx.fast else deltas @ matrix).to(inputs.dtype)
        return grad_inputs, *parameters, None, None, None


class _LinearOfInput(torch.autograd.Function):
    """`F.linear` that leaves the gradient of its input to `_InputOfLinear`.

    Between the two, autograd runs the hooks of the weight, which send the factors: they travel while the gradient of
    the input is computed.
    """

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, weight: Tensor, bias: Tensor | None, record: Recorder, inputs: tuple[Tensor]
    ) -> Tensor:
        ctx.save_for_backward(*inputs, weight)
        ctx.record = record
        ctx.weight_gradients = False
        ctx.form = LINEAR
        return linear(*inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, deltas: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        return deltas, *_parameter_gradients(ctx, inputs, weight, deltas), None, None


class _InputOfLinear(torch.autograd.Function):
    """Input of a layer, as a tensor without memory of the shape of its output, whose gradient is the deltas."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: tuple[Tensor]) -> Tensor:
        ctx.save_for_backward(*weight)  # in a tuple, since the weight's gradient does not wait for this node
        ctx.fast = thread.fastest
        return inputs.new_zeros(()).expand(*inputs.shape[:-1], weight[0].shape[0])

    @staticmethod
    def backward(ctx: Any, deltas: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return product(deltas, weight) if ctx.fast else deltas @ weight, None


def _parameter_gradients(
    ctx: Any, inputs: Tensor, matrix: Tensor, deltas: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Record the factors, or form the gradients of weight and bias, as the running backward pass needs them.

    Args:
        ctx: context of the layer's `torch.autograd.Function`.
        inputs: of shape (..., in).
        matrix: the weight as a matrix of shape (out, in).
        deltas: of shape (..., out).
    """
    use = gradient_use(ctx, ctx.weight_gradients)
    rows_in, rows_out = inputs.reshape(-1, matrix.shape[1]), deltas.reshape(-1, matrix.shape[0])
    if use.record:
        ctx.record(rows_in.detach(), rows_out.detach(), ctx.form)
    grad_weight = ctx.form.gradient(rows_out.to(matrix.dtype), rows_in.to(matrix.dtype)) if use.weight else None
    grad_bias = rows_out.sum(0).to(matrix.dtype) if use.bias else None
    return grad_weight, grad_bias


linear_with_factors: Callable[..., Tensor] = _LinearWithFactors.apply
_linear_of_input: Callable[..., Tensor] = _LinearOfInput.apply
_input_of_linear: Callable[..., Tensor] = _InputOfLinear.apply


@register_family(nn.Linear)
class Linear(LayerFamily):
    """Family of fully connected layers; inputs may have any number of leading dimensions."""

    def known_form(self, module: nn.Module) -> Form:
        return LINEAR

    def forward(self, module: nn.Module, record: Recorder, weight_gradients: bool, input: Tensor) -> Tensor:
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        return linear_with_factors(input, weight, bias, record, weight_gradients, LINEAR)

    def forward_untraced(
        self, module: nn.Module, record: Recorder, weight_gradients: bool, *args: Tensor, **kwargs: Tensor
    ) -> Tensor:
        if type(self) is not Linear:
            return self.forward(module, record, weight_gradients, *args, **kwargs)
        (inputs,) = (*args, *kwargs.values())
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        splits = (
            not weight_gradients
            and weight is not None
            and inputs.requires_grad
            and type(inputs) is Tensor
            and inputs.dtype == weight.dtype
            and inputs.shape[:-1].numel() * weight.numel() >= _LARGE  # factors had better be sent before that
            and not torch.is_autocast_enabled(inputs.device.type)
        )
        if not splits:
            return linear_with_factors(inputs, weight, bias, record, weight_gradients, LINEAR)
        return _linear_of_input(_input_of_linear(inputs, (weight,)), weight, bias, record, (inputs,))


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
