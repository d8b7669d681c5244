"""Contributions of the samples of a pass to the gradient of one parameter, and the norms of these contributions.

For a layer whose factors are rows of A and D, the gradient of sample i is ``D_i^T A_i``, with T rows of the sample in
each. Its squared norm is ``sum (D_i D_i^T) * (A_i A_i^T)`` by elements (ghost norms, arXiv:2009.03106), which takes no
room for the gradient; where the rows are many and the layer small, the gradient is formed, some samples at a time.
Several calls of a layer, and layers that share a weight, add up before the norm is taken, with their cross terms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..hooks import LINEAR, Factor

if TYPE_CHECKING:
    from .noise import Sum

_CHUNK = 1 << 24  # elements of formed gradients at a time


class SampleContribution(ABC):
    """Contribution of each sample to the gradient of a parameter, by one call of a layer."""

    def unformed(self, scales: Tensor) -> Sum | None:
        """Return the sum over samples, each multiplied by a scale, whose rows are computed on demand; None for none.

        It has memory of its own, since a program may change its batch.

        Args:
            scales: of shape (samples,).
        """
        return None

    @abstractmethod
    def clipped(self, scales: Tensor) -> Tensor:
        """Return the sum over samples, each multiplied by a scale, with the parameter's number of elements.

        Args:
            scales: of shape (samples,).
        """


@dataclass(frozen=True)
class Formed(SampleContribution):
    """Contribution that is formed: small parameters, such as biases and those of normalisations.

    Attributes:
        gradients: of shape (samples, …), in the parameter's shape behind that.
    """

    gradients: Tensor

    def clipped(self, scales: Tensor) -> Tensor:
        return scales.to(self.gradients.dtype) @ self.gradients.flatten(1)


@dataclass(frozen=True)
class SampleRows(SampleContribution):
    """Contribution of a layer's rows: blocks ``left^T right`` of the weight as a matrix.

    Attributes:
        factor: the layer's factors, with whole samples one after the other.
        samples: number of samples.
        left: rows of the height of a block, of shape (samples, blocks, T, height); for a table the numbers of its rows,
            of shape (samples, 1, T).
        right: rows of its width, of shape (samples, blocks, T, width).
    """

    factor: Factor
    samples: int
    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, factor: Factor, samples: int) -> SampleRows:
        """Return the contribution of a call.

        Args:
            factor: its factors.
            samples: number of samples.
        """
        form = factor.form
        deltas, activations = factor.deltas, factor.activations
        if form.table_rows:
            width = deltas.shape[1]
            return cls(factor, samples, activations.view(samples, 1, -1), deltas.view(samples, 1, -1, width))
        found = form.by_row(deltas, activations)
        assert found is not None
        left, right = (_by_sample(each, samples) for each in (found[::-1] if form.transposed else found))
        return cls(factor, samples, left, right)

    @property
    def is_table(self) -> bool:
        """Whether `left` holds numbers of rows."""
        return bool(self.factor.form.table_rows)

    def unformed(self, scales: Tensor) -> Sum | None:
        if not self.is_table or self.factor.form.sparse:
            return None
        from .noise import TableSum  # numba loads when first used

        deltas, numbers = self.factor.deltas, self.factor.activations
        rows = scales.to(deltas.dtype).repeat_interleave(len(deltas) // max(1, self.samples))
        return TableSum(numbers[:, 0], deltas * rows[:, None], self.factor.form.table_rows)

    def clipped(self, scales: Tensor) -> Tensor:
        form, deltas, activations = self.factor.form, self.factor.deltas, self.factor.activations
        rows = scales.to(deltas.dtype).repeat_interleave(deltas.shape[0] // max(1, self.samples))
        if form == LINEAR and activations.shape[1] < deltas.shape[1]:  # fewer numbers to scale
            return form.gradient(deltas, activations * rows[:, None])
        return form.gradient(deltas * rows[:, None], activations)


def _by_sample(blocks: Tensor, samples: int) -> Tensor:
    """Return rows of shape (rows, blocks, positions, n) as (samples, blocks, rows of a sample x positions, n)."""
    rows, count, positions, width = blocks.shape
    of_sample = rows // max(1, samples)
    return blocks.view(samples, of_sample, count, positions, width).transpose(1, 2).flatten(2, 3)


def squared_norms(contributions: Sequence[SampleContribution]) -> Tensor:
    """Return the squared norm of each sample's gradient of one parameter, of shape (samples,), in float64.

    Args:
        contributions: at least one, all of the same samples.
    """
    formed = [each.gradients for each in contributions if isinstance(each, Formed)]
    rows = [each for each in contributions if isinstance(each, SampleRows)]
    if not rows:
        return _squares(sum(formed[1:], formed[0]).flatten(1))
    if formed:
        raise NotImplementedError("a parameter with rows and formed gradients")
    if len(rows) > 1 and not any(each.is_table for each in rows):
        whole = [torch.cat([getattr(each, side) for each in rows], 2) for side in ("left", "right")]
        return _norms_of_rows(*whole)
    if len(rows) == 1 and not rows[0].is_table:
        return _norms_of_rows(rows[0].left, rows[0].right)
    return sum((_cross_terms(one, other) for one in rows for other in rows), torch.zeros(()))


def _norms_of_rows(left: Tensor, right: Tensor) -> Tensor:
    """Return squared norms of ``left^T right`` over blocks; see `SampleRows` for shapes."""
    samples, blocks, rows, height = left.shape
    width = right.shape[3]
    if rows == 1:
        return (_squares(left) * _squares(right)).sum((1, 2))
    if rows * (height + width) <= height * width:
        gram = (left @ left.mT) * (right @ right.mT)
        return gram.sum((1, 2, 3), dtype=torch.float64)
    found = left.new_empty(samples, dtype=torch.float64)
    count = max(1, _CHUNK // (blocks * height * width))
    for first in range(0, samples, count):
        some = slice(first, first + count)
        found[some] = (left[some].mT @ right[some]).flatten(1).square().sum(1, dtype=torch.float64)
    return found


def _squares(rows: Tensor) -> Tensor:
    """Return the squared lengths of rows in float64, whose range they cannot leave, without a copy in it."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    return lengths.square()


def _cross_terms(one: SampleRows, other: SampleRows) -> Tensor:
    """Return the scalar products of two calls' gradients by sample."""
    right = one.right @ other.right.mT  # (samples, 1, T, S)
    if one.is_table and other.is_table:
        left = (one.left[..., :, None] == other.left[..., None, :]).to(right)
    elif one.is_table:
        left = _looked_up(other.left, one.left).mT
    elif other.is_table:
        left = _looked_up(one.left, other.left)
    else:
        left = one.left @ other.left.mT
    return (left * right).sum((1, 2, 3), dtype=torch.float64)


def _looked_up(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return the elements of rows (samples, 1, S, height) at numbers (samples, 1, T): (samples, 1, S, T)."""
    return rows.gather(3, numbers[:, :, None, :].expand(-1, -1, rows.shape[2], -1))
