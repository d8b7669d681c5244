"""Gradient of a weight as a product of two blocks of rows, formed tile by tile."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..exchange.factor_buckets import FactorPayload
from ..schedules import Decoding

_CUDA_TILE_ELEMENTS = 1 << 22
_DEFAULT = Decoding()
_LEAST = 4  # rows and columns of a gradient for which these kernels are made
_BLOCK_COLUMNS = 2048  # four rows of so many numbers fit into the first cache
_DOUBLE = 2.0  # a multiplication in double precision costs about this much more


class GradientProduct:
    """Agreed gradient of a weight, ``sum over sites of w_s left_s^T right_s``, without the matrix that it makes.

    Args:
        payloads: what each site sent, by rank.
        weights: each site's share in the mean.
        transposed: whether the gradient is ``right^T left``.
        constants: sizes of blocks; the same at all sites, since the last bits depend on them.

    Attributes:
        left: the rows of all sites times their shares, of shape (rows, height).
        right: the rows, of shape (rows, width).
    """

    def __init__(
        self,
        payloads: Sequence[FactorPayload],
        weights: Sequence[float],
        transposed: bool = False,
        constants: Decoding = _DEFAULT,
    ) -> None:
        self._tile, self._narrow = constants.tile, constants.narrow
        lefts = [payload.left * weight for payload, weight in zip(payloads, weights, strict=True)]
        rights = [payload.right for payload in payloads]
        left, right = (torch.cat(lefts), torch.cat(rights)) if len(lefts) > 1 else (lefts[0], rights[0])
        self.left, self.right = (right, left) if transposed else (left, right)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the gradient."""
        return self.left.shape[1], self.right.shape[1]

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the gradient by a number."""
        self.left = self.left * factor

    def negated(self) -> GradientProduct:
        """Return the gradient times -1, as another product."""
        other = copy.copy(self)
        other.scale(-1.0)
        return other

    def formed(self) -> Tensor:
        """Return the gradient as a matrix."""
        return self.left.T @ self.right

    @property
    def is_narrow(self) -> bool:
        """Whether the factors have so few rows that kernels of their own multiply them faster than BLAS."""
        return self.left.shape[0] <= self._narrow and min(self.shape) >= _LEAST

    def padded(self, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the kernels for few rows take: both factors, filled up by rows of zeros, and a block to work in.

        Args:
            multiple: their number of rows becomes a multiple of this; it is the number of rows of the block.
        """
        rows, width = self.right.shape
        missing = -rows % multiple if rows else multiple
        left, right = (F.pad(each, (0, 0, 0, missing)) if missing else each for each in (self.left, self.right))
        block = left.new_empty(multiple, min(width, _BLOCK_COLUMNS))
        return left.contiguous(), right.contiguous(), block

    def tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """Form the gradient in blocks of its rows.

        Yields:
            First row, the row after the last, and the block, which is valid until the next one.
        """
        height, width = self.shape
        elements = _CUDA_TILE_ELEMENTS if self.left.is_cuda else self._tile
        step = min(height, max(1, elements // max(1, width)))
        scratch = self.left.new_empty(step, width)
        for start in range(0, height, max(1, step)):
            end = min(height, start + step)
            yield start, end, torch.mm(self.left[:, start:end].T, self.right, out=scratch[: end - start])

    def norm(self, order: float = 2.0) -> Tensor:
        """Return the norm of the gradient's elements, a scalar.

        The 2-norm comes from Gram matrices where that takes fewer multiplications,
        ``|L^T R|^2 = sum((L L^T) * (R R^T))``, in double precision, since the terms may cancel.

        Args:
            order: which norm, as `torch.linalg.vector_norm` takes it.
        """
        rows, (height, width) = self.left.shape[0], self.shape
        if order == 2.0 and _DOUBLE * rows * (height + width) < height * width:
            left, right = self.left.double(), self.right.double()
            squares = ((left @ left.T) * (right @ right.T)).sum()
            return squares.clamp_min(0.0).sqrt().to(self.left.dtype)
        norms = [torch.linalg.vector_norm(block, order) for _, _, block in self.tiles()]
        if not norms:
            return self.left.new_zeros(())
        if math.isinf(order):
            return torch.stack(norms).amax() if order > 0 else torch.stack(norms).amin()
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
        return total
