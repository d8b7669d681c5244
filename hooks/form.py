"""How two blocks of rows make a weight's gradient: a form for each kind of layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Form:
    """The form of fully connected layers, ``grad W = D^T A``; others derive from it.

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
        """Widths of a row of deltas and of one of activations, for a weight that as a matrix has this shape."""
        return shape

    @property
    def may_be_dense(self) -> bool:
        """Whether the gradient is all-reduced where that is fewer bytes than the rows are."""
        return False

    @property
    def positions(self) -> int:
        """Rows of the matrices that `unfold` makes of one row."""
        return 1

    def gradient(self, deltas: Tensor, activations: Tensor) -> Tensor:
        """Forms the weight's gradient, in the weight's shape."""
        return deltas.T @ activations

    def add_to(self, gradient: Tensor, deltas: Tensor, activations: Tensor) -> Tensor:
        """Adds the gradient of further rows to one that has been formed, which may be changed; returns the sum."""
        return gradient.addmm_(deltas.T, activations)

    def bias_gradient(self, deltas: Tensor) -> Tensor:
        """Forms the bias's gradient ``D^T 1``, of shape (out,)."""
        return deltas.sum(0)

    def unfold(self, deltas: Tensor, activations: Tensor) -> tuple[Tensor, Tensor]:
        """Turns rows into matrices D and A with ``D^T A`` the gradient as a matrix of height ``weight.shape[0]``."""
        return deltas, activations

    def merge(self, deltas: Tensor, activations: Tensor) -> tuple[Tensor, Tensor]:
        """Makes fewer rows of them where that loses nothing."""
        return deltas, activations


LINEAR = Form()


@dataclass(frozen=True)
class Flattened(Form):
    """The form of matrices that stand for the gradient of a weight with any number of dimensions.

    Attributes:
        shape: shape of the weight.
    """

    shape: tuple[int, ...]

    def gradient(self, deltas: Tensor, activations: Tensor) -> Tensor:
        return (deltas.T @ activations).view(self.shape)

    def add_to(self, gradient: Tensor, deltas: Tensor, activations: Tensor) -> Tensor:
        return gradient.add_(self.gradient(deltas, activations))
