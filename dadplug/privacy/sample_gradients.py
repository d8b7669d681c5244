"""Per-sample squared norms of a parameter's gradient, and sums of scaled per-sample gradients, from factors.

With A_i and D_i the rows of sample i in all calls of a layer, ``grad_i = D_i^T A_i`` and
``|grad_i|^2 = sum of (D_i D_i^T) * (A_i A_i^T)`` (ghost norms, arXiv:2009.03106 and 2110.05679): no gradient of a single
sample is formed where there are few rows. Where there are many, as in convolutions, the gradients of the samples take
less work and memory than the products of rows, and are formed. The sum of scaled gradients is one product of all rows,
with the deltas scaled sample by sample (book-keeping, arXiv:2210.00038).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..hooks import Factor, Form, stack_by_form

Blocks = tuple[Tensor, Tensor]
"""Left and right rows of a weight's gradient, of shapes (samples, blocks, positions, ·)."""


class SampleGradients:
    """Gradients of one parameter for each sample of a batch; what several layers and calls add to it is summed.

    Args:
        samples: number of samples.

    Attributes:
        samples: number of samples.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._formed: Tensor | None = None
        self._factors: list[Factor] = []

    def add_formed(self, gradients: Tensor) -> None:
        """Add gradients that have been formed.

        Args:
            gradients: of shape (samples, …).
        """
        self._formed = gradients if self._formed is None else self._formed + gradients

    def add(self, factor: Factor) -> None:
        """Add the rows of one call; rows of a sample are neighbours.

        Args:
            factor: the factors; a table's activations are row numbers and indices of samples.
        """
        self._factors.append(factor)

    def squared_norms(self) -> Tensor:
        """Compute the squared norm of each sample's gradient, of shape (samples,)."""
        if not self._factors:
            assert self._formed is not None
            return _squares(self._formed)
        lookups = [factor for factor in self._factors if factor.form.table_rows]
        blocks = _joined([_blocks(factor, self.samples) for factor in self._factors if not factor.form.table_rows])
        if blocks is None:
            return _table_norms(lookups, self.samples)
        left, right = blocks
        if _forms_samples(left, right) and not lookups:
            self._formed = left.transpose(2, 3) @ right
            return _squares(self._formed)
        norms = _ghost_norms(left, right)
        if lookups:
            norms = norms + _table_norms(lookups, self.samples) + 2 * _cross(left, right, lookups, self.samples)
        return norms

    def clear(self, samples: Tensor) -> None:
        """Replace the gradients of some samples by zeros.

        Args:
            samples: whether to, of shape (samples,).
        """
        if self._formed is not None:
            self._formed = self._formed.masked_fill(samples.view(-1, *[1] * (self._formed.dim() - 1)), 0)
        for place, factor in enumerate(self._factors):
            rows = _of_rows(factor, samples)[:, None]
            table = factor.form.table_rows
            activations = factor.activations if table else factor.activations.masked_fill(rows, 0)
            self._factors[place] = Factor(activations, factor.deltas.masked_fill(rows, 0), factor.form)

    def weighted_sum(self, weights: Tensor, shape: Sequence[int]) -> Tensor:
        """Compute the sum of the samples' gradients times their weights.

        Args:
            weights: of shape (samples,).
            shape: shape of the parameter.
        """
        if self._formed is not None:
            return (weights.to(self._formed.dtype) @ self._formed.flatten(1)).view(tuple(shape))
        scaled = [_scaled(factor, weights) for factor in self._factors]
        total: Tensor | None = None
        for factor in stack_by_form(scaled):
            gradient = factor.gradient()
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            total = gradient if total is None else total + gradient
        assert total is not None
        return total


def bias_gradients(factor: Factor, samples: int) -> Tensor:
    """Form the gradients of a bias for each sample, of shape (samples, out).

    Args:
        factor: the factors of one call.
        samples: number of samples.
    """
    rows = factor.form.bias_rows(factor.deltas)
    return rows if len(rows) == samples else rows.unflatten(0, (samples, -1)).sum(1)


def _squares(gradients: Tensor) -> Tensor:
    return gradients.flatten(1).square().sum(1)


def _blocks(factor: Factor, samples: int) -> Blocks:
    form: Form = factor.form
    left, right = form.by_row(factor.deltas, factor.activations) or (factor.deltas, factor.activations)
    if form.transposed:
        left, right = right, left
    return _by_sample(left, samples), _by_sample(right, samples)


def _by_sample(rows: Tensor, samples: int) -> Tensor:
    """Return rows of shape (rows, blocks, positions, ·) as (samples, blocks, rows of a sample · positions, ·)."""
    if len(rows) == samples:
        return rows
    return rows.unflatten(0, (samples, -1)).transpose(1, 2).flatten(2, 3)


def _joined(blocks: Sequence[Blocks]) -> Blocks | None:
    if not blocks:
        return None
    if len(blocks) == 1:
        return blocks[0]
    return torch.cat([left for left, _ in blocks], 2), torch.cat([right for _, right in blocks], 2)


def _forms_samples(left: Tensor, right: Tensor) -> bool:
    """Return whether gradients of single samples take fewer numbers than products of a sample's rows."""
    return left.shape[3] * right.shape[3] < 2 * left.shape[2] ** 2


def _ghost_norms(left: Tensor, right: Tensor) -> Tensor:
    if left.shape[2] == 1:
        return (left.square().sum(3) * right.square().sum(3)).sum((1, 2))
    return ((left @ left.transpose(2, 3)) * (right @ right.transpose(2, 3))).sum((1, 2, 3))


def _table_norms(lookups: Sequence[Factor], samples: int) -> Tensor:
    """Compute the squared norms of tables' gradients: lookups of one row by one sample are added up first."""
    numbers = torch.cat([factor.activations for factor in lookups])
    deltas = torch.cat([factor.deltas for factor in lookups])
    rows = lookups[0].form.table_rows
    keys, places = torch.unique(numbers[:, 1] * rows + numbers[:, 0], return_inverse=True)
    sums = deltas.new_zeros(len(keys), deltas.shape[1]).index_add_(0, places, deltas)
    squares = sums.square().sum(1)
    return squares.new_zeros(samples).index_add_(0, torch.div(keys, rows, rounding_mode="floor"), squares)


def _cross(left: Tensor, right: Tensor, lookups: Sequence[Factor], samples: int) -> Tensor:
    """Compute the products of a linear layer's and a table's gradients for each sample, where both share the weight.

    Args:
        left: deltas of the linear layer, of shape (samples, 1, positions, rows of the table).
        right: its inputs, of shape (samples, 1, positions, width).
        lookups: lookups of the table.
        samples: number of samples.
    """
    left, right = left[:, 0], right[:, 0]
    total = left.new_zeros(samples)
    for factor in lookups:
        numbers, deltas = _padded(factor, samples)
        at_rows = left.gather(2, numbers[:, None].expand(-1, left.shape[1], -1))
        total = total + (at_rows * (right @ deltas.transpose(1, 2))).sum((1, 2))
    return total


def _padded(factor: Factor, samples: int) -> tuple[Tensor, Tensor]:
    """Return row numbers of shape (samples, most lookups) and deltas of shape (samples, most lookups, width)."""
    numbers, owners = factor.activations.unbind(1)
    order = torch.argsort(owners, stable=True)
    counts = torch.bincount(owners, minlength=samples)
    most, first = int(counts.max()) if len(owners) else 0, counts.cumsum(0) - counts
    places = torch.arange(len(owners), device=owners.device) - first[owners[order]]
    padded = numbers.new_zeros(samples, most)
    padded[owners[order], places] = numbers[order]
    deltas = factor.deltas.new_zeros(samples, most, factor.deltas.shape[1])
    deltas[owners[order], places] = factor.deltas[order]
    return padded, deltas


def _of_rows(factor: Factor, values: Tensor) -> Tensor:
    """Return for each row of a factor the value of its sample."""
    if factor.form.table_rows:
        return values[factor.activations[:, 1]]
    return values if len(values) == factor.rows else values.repeat_interleave(factor.rows // len(values))


def _scaled(factor: Factor, weights: Tensor) -> Factor:
    """Return factors with the deltas of each sample times its weight."""
    of_rows = _of_rows(factor, weights).to(factor.deltas.dtype)
    return Factor(factor.activations, factor.deltas * of_rows[:, None], factor.form)
