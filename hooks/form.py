"""Forms: for each kind of layer, the function from two blocks of rows to the gradient of a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


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
