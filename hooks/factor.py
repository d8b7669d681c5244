"""Factor pair: activations and deltas, whose product is the gradient of a weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .form import LINEAR, Flattened, Form
from .trace import Trace


@dataclass(frozen=True)
class Factor:
    """The two factors of a weight gradient; for `nn.Linear`, ``grad W = deltas.T @ activations``.

    Other layers have other forms. A convolution's rows are whole samples of input and output deltas, which are smaller
    than the matrices whose product is the gradient; `matrix` returns those. An embedding's activations are the numbers
    of the rows that were looked up.

    Attributes:
        activations: input of the layer, ``A`` of shape (rows, in). Leading dimensions are flattened into rows.
        deltas: gradient of the loss at the layer's output, ``D`` of shape (rows, out).
        form: function from the two to the gradient.
        bias: gradient of the bias, if it does not follow from the deltas.
        trace: trace of the layer's output, if chains are traced.
        exchanged: whether the two have exchanged their roles, since the weight has the shape (in, out).

    Example:
        >>> factor = Factor(activations=torch.randn(16, 784), deltas=torch.randn(16, 10))
        >>> factor.gradient().shape, factor.bias_gradient().shape
        (torch.Size([10, 784]), torch.Size([10]))
    """

    activations: Tensor
    deltas: Tensor
    form: Form = LINEAR
    bias: Tensor | None = None
    trace: Trace | None = None
    exchanged: bool = False

    @property
    def inputs(self) -> Tensor:
        """Rows that come from the layer's input."""
        return self.deltas if self.exchanged else self.activations

    @property
    def rows(self) -> int:
        """Number of rows N: for fully connected layers the batch times all other leading dimensions, over all calls."""
        return self.deltas.shape[0]

    @property
    def numel(self) -> int:
        """Number of elements of both factors."""
        return self.activations.numel() + self.deltas.numel()

    def gradient(self) -> Tensor:
        """Form the weight gradient, in the weight's shape."""
        return self.form.gradient(self.deltas, self.activations)

    def bias_gradient(self) -> Tensor:
        """Form the bias gradient, of shape (out,)."""
        return self.form.bias_gradient(self.deltas) if self.bias is None else self.bias

    def matrix(self, shape: Sequence[int]) -> Factor:
        """Return factors of the same gradient that are matrices, ``grad = deltas.T @ activations``.

        A convolution's rows are unfolded: a row a position (and group), with all the inputs that the kernel sees
        there. Where that is more rows than the smaller side of the gradient has, the gradient itself is formed, and is
        one of the factors beside an identity. So what is compressed is never larger than it need be.

        Args:
            shape: shape of the weight.

        Returns:
            A factor with deltas of shape (rows, shape[0]) and activations of shape (rows, product of the others).
        """
        if self.form is LINEAR or self.form == LINEAR:
            return self
        if self.form.transposed:
            return Factor(self.deltas, self.activations, LINEAR, self.bias_gradient(), exchanged=True)
        flat = Flattened(tuple(shape))
        out, width = flat.shape[0], math.prod(flat.shape[1:])
        bias = None if self.form.table_rows else self.bias_gradient()
        if self.rows * self.form.positions <= min(out, width):
            deltas, activations = self.form.unfold(self.deltas, self.activations)
            return Factor(activations, deltas, flat, bias)
        return replace(Factor.formed(self.gradient()), bias=bias)

    @staticmethod
    def formed(gradient: Tensor) -> Factor:
        """Return factors of a gradient that has been formed: the gradient as a matrix, and an identity matrix.

        Args:
            gradient: the gradient, in the shape of its weight.
        """
        flat = gradient.reshape(gradient.shape[0], -1)
        out, width = flat.shape
        identity = torch.eye(min(out, width), dtype=gradient.dtype, device=gradient.device)
        pair = (flat, identity) if out <= width else (identity, flat.T)
        return Factor(*pair, Flattened(tuple(gradient.shape)))

    def to(self, dtype: torch.dtype) -> Factor:
        """Convert the floating-point tensors to a dtype; return the factor itself if none changes.

        Args:
            dtype: a floating-point type.
        """
        if self._has(dtype):
            return self
        activations = self.activations.to(dtype) if self.activations.is_floating_point() else self.activations
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, activations=activations, deltas=self.deltas.to(dtype), bias=bias)

    def _has(self, dtype: torch.dtype) -> bool:
        activations, bias = self.activations, self.bias
        if self.deltas.dtype != dtype or (bias is not None and bias.dtype != dtype):
            return False
        return activations.dtype == dtype or not activations.is_floating_point()

    @staticmethod
    def stack(factors: Sequence[Factor]) -> Factor:
        """Stack the rows of several factors of one form, whose gradients add up.

        Args:
            factors: at least one factor, all of the same form and widths.
        """
        if len(factors) == 1:
            return factors[0]
        form = factors[0].form
        deltas, activations = form.merge(
            torch.cat([factor.deltas for factor in factors]), torch.cat([factor.activations for factor in factors])
        )
        bias = None
        if any(factor.bias is not None for factor in factors):
            bias = torch.stack([factor.bias_gradient() for factor in factors]).sum(0)
        return Factor(activations, deltas, form, bias, exchanged=factors[0].exchanged)


def stack_by_form(factors: Sequence[Factor]) -> list[Factor]:
    """Stack the factors of each form.

    Args:
        factors: factors of one weight.

    Returns:
        One factor for each form among them, in the order of their first occurrence.
    """
    if len(factors) == 1:
        return [factors[0]]
    groups: dict[Form, list[Factor]] = {}
    for factor in factors:
        groups.setdefault(factor.form, []).append(factor)
    return [Factor.stack(group) for group in groups.values()]
