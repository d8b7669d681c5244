"""Factor pairs: activations and deltas, the form in which they make the gradient of a weight, and what follows a layer.

A chain of layers may contain elementwise functions whose derivative is a function of their output: for ``y = phi(z)``
of these, autograd's own backward kernel gives ``gradient * phi'(z)`` from y, so that what a site recomputes for others
has the bits that autograd had there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..support.registry import Registry


@dataclass(frozen=True)
class Form:
    """Form of fully connected layers, ``grad W = D^T A``; the other forms derive from it.

    In every form the gradient is linear in the deltas and adds up over rows, so that rows of several calls, batches
    and sites may be stacked. Forms are values: two layers' rows may be stacked if their forms are equal.

    Attributes:
        encoded: whether a method may encode the rows in its own way; otherwise they are sent as they are.
        table_rows: where activations are row numbers of a table: its number of rows; else 0.
        sparse: whether the gradient is a sparse tensor.
        transposed: whether the gradient is ``A^T D``, since the weight has the shape (in, out).
    """

    encoded: ClassVar[bool] = True
    table_rows: ClassVar[int] = 0
    sparse: ClassVar[bool] = False
    transposed: ClassVar[bool] = False

    def widths(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the widths of a row of deltas and of a row of activations.

        Args:
            shape: shape of the weight as a matrix, (out, in).
        """
        return shape

    @property
    def may_be_dense(self) -> bool:
        """Whether the gradient is all-reduced if it has fewer bytes than the rows."""
        return False

    @property
    def positions(self) -> int:
        """Number of rows of the matrices that `unfold` returns for one row."""
        return 1

    @property
    def unfolding(self) -> int:
        """Cost of a row that `unfold` returns, relative to a row from which the gradient is computed."""
        return 1

    def gradient(self, deltas: Tensor, activations: Tensor) -> Tensor:
        """Form the weight's gradient, in the weight's shape.

        Args:
            deltas: D of shape (rows, out).
            activations: A of shape (rows, in).
        """
        return deltas.T @ activations

    def add_to(self, gradient: Tensor, deltas: Tensor, activations: Tensor) -> Tensor:
        """Add the gradient of further rows to a formed gradient, in place if possible; return the sum.

        Args:
            gradient: the formed gradient, which may be changed.
            deltas: D of shape (rows, out).
            activations: A of shape (rows, in).
        """
        return gradient.addmm_(deltas.T, activations)

    def bias_gradient(self, deltas: Tensor) -> Tensor:
        """Form the bias's gradient ``D^T 1``, of shape (out,).

        Args:
            deltas: D of shape (rows, out).
        """
        return deltas.sum(0)

    def bias_rows(self, deltas: Tensor) -> Tensor:
        """Return what each row adds to the bias's gradient, of shape (rows, out).

        Args:
            deltas: D of shape (rows, out).
        """
        return deltas

    def by_row(self, deltas: Tensor, activations: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return for each row the matrices whose products are its part of the gradient, block by block.

        Args:
            deltas: D of shape (rows, out).
            activations: A of shape (rows, in).

        Returns:
            D of shape (rows, blocks, positions, ·) and A of shape (rows, blocks, positions, ·): the blocks of the
            gradient are ``D^T A``. None if rows are not parts of samples.
        """
        return deltas[:, None, None], activations[:, None, None]

    def unfold(self, deltas: Tensor, activations: Tensor) -> tuple[Tensor, Tensor]:
        """Return matrices D and A such that ``D^T A`` is the gradient as a matrix of height ``weight.shape[0]``.

        Args:
            deltas: D of shape (rows, out).
            activations: A of shape (rows, in).
        """
        return deltas, activations

    def merge(self, deltas: Tensor, activations: Tensor) -> tuple[Tensor, Tensor]:
        """Return fewer rows with the same gradient, if there are such rows.

        Args:
            deltas: D of shape (rows, out).
            activations: A of shape (rows, in).
        """
        return deltas, activations


LINEAR = Form()


@dataclass(frozen=True)
class Flattened(Form):
    """Form of matrices whose product is the gradient of a weight with any number of dimensions.

    Attributes:
        shape: shape of the weight.
    """

    shape: tuple[int, ...]

    def gradient(self, deltas: Tensor, activations: Tensor) -> Tensor:
        return (deltas.T @ activations).view(self.shape)

    def add_to(self, gradient: Tensor, deltas: Tensor, activations: Tensor) -> Tensor:
        return gradient.add_(self.gradient(deltas, activations))


# Functions between layers

Backward = Callable[..., Tensor]


class _Kind(NamedTuple):
    backward: Backward
    constants: tuple[str, ...]
    fits: Callable[..., bool]
    rounds: bool


_KINDS: Registry[str, _Kind] = Registry("elementwise function", exact=True)
# Nodes that leave numbers and their order as they are.
_SAME_ROWS = {
    *("AliasBackward0", "CloneBackward0", "ReshapeAliasBackward0", "ToCopyBackward0", "UnsafeViewBackward0"),
    *("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "ViewBackward0"),
}


@dataclass(frozen=True)
class Elementwise:
    """Function between two layers; by default the identity. Two of them are equal if they compute the same function.

    Attributes:
        kind: name of the function's node in autograd's graph.
        constants: its constants.
    """

    kind: str = ""
    constants: tuple[float, ...] = ()

    def backward(self, gradient: Tensor, output: Tensor) -> Tensor:
        """Compute ``gradient * phi'(z)``.

        Args:
            gradient: the loss's gradient at the output.
            output: ``phi(z)``, of the same shape.
        """
        return _KINDS[self.kind].backward(gradient, output, *self.constants) if self.kind else gradient

    @property
    def rounds(self) -> bool:
        """Whether the rounding of `backward` may differ from that of autograd, which may have used z."""
        return bool(self.kind) and _KINDS[self.kind].rounds

    @staticmethod
    def of(node: Any) -> Elementwise | None:
        """Return the function of a node of autograd's graph; None for unknown functions.

        Args:
            node: the node, a tensor's ``grad_fn``.
        """
        name = node.name()
        if name in _SAME_ROWS:
            return IDENTITY
        kind = _KINDS.get(name)
        if kind is None:
            return None
        constants = tuple(float(getattr(node, f"_saved_{constant}")) for constant in kind.constants)
        return Elementwise(name, constants) if kind.fits(*constants) else None


IDENTITY = Elementwise()


def register_elementwise(
    nodes: Sequence[str],
    backward: Backward,
    constants: Sequence[str] = (),
    fits: Callable[..., bool] = lambda *constants: True,
    rounds: bool = False,
) -> None:
    """Register an elementwise function.

    Args:
        nodes: names of its nodes in autograd's graph, such as ``"ReluBackward0"``.
        backward: function from the gradient at the output, the output, and the constants to the gradient at the input.
        constants: names of the constants, as the node saves them (``_saved_…``).
        fits: function that returns whether, for given constants, the derivative is a function of the output.
        rounds: whether the rounding of `backward` may differ from that of autograd.
    """
    for node in nodes:
        _KINDS.register(node)(_Kind(backward, tuple(constants), fits, rounds))


_aten = torch.ops.aten
register_elementwise(["ReluBackward0"], lambda gradient, output: _aten.threshold_backward(gradient, output, 0))
register_elementwise(["TanhBackward0"], _aten.tanh_backward)
register_elementwise(["SigmoidBackward0"], _aten.sigmoid_backward)
register_elementwise(
    ["LeakyReluBackward0", "LeakyReluBackward1"],
    lambda gradient, output, slope: _aten.leaky_relu_backward(gradient, output, slope, True),
    ["negative_slope"],
    lambda slope: slope > 0,
)
register_elementwise(
    ["EluBackward0", "EluBackward1"],
    lambda gradient, output, alpha, scale, inner: _aten.elu_backward(gradient, alpha, scale, inner, True, output),
    ["alpha", "scale", "input_scale"],
    lambda alpha, scale, inner: alpha > 0 and scale > 0 and inner > 0,
    rounds=True,
)


@dataclass(frozen=True)
class Trace:
    """The use of the output of one call of a layer.

    Attributes:
        key: number of the call, counted over all layers in the order of the backward pass.
        follower: name of the only layer that used the output as its input; empty if there is none.
        function: elementwise function between the two layers.
        follower_key: number of the follower's call; -1 if there is none.
        chain_break: reason why a layer behind the output cannot continue the chain; empty if there is none.
    """

    key: int
    follower: str = ""
    function: Elementwise = IDENTITY
    follower_key: int = -1
    chain_break: str = ""


Write = Callable[[slice, Tensor, "Tensor | None", float], None]
"""Writes some rows of a gradient as a matrix into a block: all rows once, one block after the other.

It takes the rows, the block, which is contiguous, and a matrix of its shape or None of which a share is added, and the
share.
"""


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
        whole: the gradient as a matrix, if it has been formed: one of the factors is it, or its transpose, beside an
            identity.
        write: forms the gradient, if it has not been formed; see `Write`. The factors then have the shapes of `whole`
            and of an identity, and hold NaN.

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
    whole: Tensor | None = None
    write: Write | None = None

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
        if self.write is not None:
            settled = self.settled().whole
            assert settled is not None
            assert isinstance(self.form, Flattened)
            return settled.view(self.form.shape)
        return self.form.gradient(self.deltas, self.activations)

    def bias_gradient(self) -> Tensor:
        """Form the bias gradient, of shape (out,)."""
        return self.form.bias_gradient(self.deltas) if self.bias is None else self.bias

    def matrix(self, shape: Sequence[int], with_bias: bool = True) -> Factor:
        """Return factors of the same gradient that are matrices, ``grad = deltas.T @ activations``.

        A convolution's rows are unfolded: a row a position (and group), with all the inputs that the kernel sees
        there. Where these are many beside the smaller side of the gradient, the gradient itself is formed, and is
        one of the factors beside an identity: to unfold takes longer, and what is compressed would not be smaller.

        Args:
            shape: shape of the weight.
            with_bias: whether the gradient of a bias is wanted, too.

        Returns:
            A factor with deltas of shape (rows, shape[0]) and activations of shape (rows, product of the others).
        """
        if self.whole is not None or self.form is LINEAR or self.form == LINEAR:
            return self
        if self.form.transposed:
            bias = self.bias_gradient() if with_bias else None
            return Factor(self.deltas, self.activations, LINEAR, bias, exchanged=True)
        flat = Flattened(tuple(shape))
        out, width = flat.shape[0], math.prod(flat.shape[1:])
        bias = self.bias_gradient() if with_bias and not self.form.table_rows else None
        if self.rows * self.form.positions * self.form.unfolding <= min(out, width):
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
        identity = _identity(min(out, width), gradient.dtype, gradient.device)
        pair = (flat, identity) if out <= width else (identity, flat.T)
        return Factor(*pair, Flattened(tuple(gradient.shape)), whole=flat)

    @staticmethod
    def unformed(shape: Sequence[int], like: Tensor, write: Write) -> Factor:
        """Return a factor of a gradient that is formed block by block.

        Args:
            shape: shape of the weight.
            like: a tensor of its type and device.
            write: see `write`.
        """
        out, width = shape[0], math.prod(shape[1:])
        nothing, least = like.new_full((1,), math.nan), min(out, width)
        pair = nothing.expand(least, width), nothing.expand(least, out)
        return Factor(*pair, Flattened(tuple(shape)), write=write)

    def settled(self) -> Factor:
        """Return factors of the same gradient, which is formed now if it has not been."""
        if self.write is None:
            return self
        assert isinstance(self.form, Flattened)
        whole = self.deltas.new_empty(self.deltas.shape[1], self.activations.shape[1])
        self.write(slice(None), whole, None, 1.0)
        return Factor.formed(whole.view(self.form.shape))

    def to(self, dtype: torch.dtype) -> Factor:
        """Convert the floating-point tensors to a dtype; return the factor itself if none changes.

        Args:
            dtype: a floating-point type.
        """
        if self._has(dtype):
            return self
        activations = self.activations.to(dtype) if self.activations.is_floating_point() else self.activations
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, activations=activations, deltas=self.deltas.to(dtype), bias=bias, whole=None)

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


_identities: dict[tuple[torch.dtype, torch.device], Tensor] = {}  # the largest so far


def _identity(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an identity matrix, which must not be changed: filling it takes as long as a product with few rows."""
    found = _identities.get((dtype, device))
    if found is None or len(found) < size:
        found = _identities[dtype, device] = torch.eye(size, dtype=dtype, device=device)
    return found[:size, :size]
