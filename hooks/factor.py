"""A factor pair: what the gradient of a weight is made of before it is formed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factor:
    """The two factors of a weight gradient, ``grad W = deltas.T @ activations``.

    Attributes:
        activations: input of the layer, ``A`` of shape (rows, in). Leading dimensions are flattened into rows.
        deltas: gradient of the loss at the layer's output, ``D`` of shape (rows, out).
    """

    activations: Tensor
    deltas: Tensor

    @property
    def rows(self) -> int:
        """Number of rows N, the batch times all other leading dimensions, over all calls of the layer."""
        return self.deltas.shape[0]

    def gradient(self) -> Tensor:
        """Forms the weight gradient ``D^T A``, of shape (out, in)."""
        return self.deltas.T @ self.activations

    def bias_gradient(self) -> Tensor:
        """Forms the bias gradient ``D^T 1``, of shape (out,)."""
        return self.deltas.sum(0)

    @staticmethod
    def stack(factors: Sequence[Factor]) -> Factor:
        """Stacks the rows of several factors: their gradients add up.

        Args:
            factors: at least one factor, all of the same widths.
        """
        if len(factors) == 1:
            return factors[0]
        return Factor(
            torch.cat([factor.activations for factor in factors]), torch.cat([factor.deltas for factor in factors])
        )
