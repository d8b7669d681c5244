"""Separation of mixed rows by independent components (Cocktail Party, arXiv:2209.05578).

The rows that are seen are mixtures ``R = M A`` of the samples. Pictures have distributions of values that are far from
normal, their mixtures are closer to it: the fixed-point iteration of FastICA finds the combinations that are least so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..capture import LayerView, Observation
from ..similarity import matched
from .base import Attack, Budget, Result, register_attack
from .rows import chance_of_rows, row_result
from .span import basis_of, why_not_mixed

_ITERATIONS = 300
_NUMBERS_A_ROW = 8  # values of a row for each row that is to be separated, at least


@register_attack("components")
class Components(Attack):
    """Samples from mixtures of them, by independent component analysis."""

    source = "arXiv:2209.05578"
    slow = True

    def applies(self, seen: Observation, view: LayerView | None) -> str:
        assert view is not None
        if view.sends_rows:
            return "the rows themselves are sent"
        if reason := why_not_mixed(view):
            return reason
        if not view.fed_by_data:
            return "the layer's input is not data"
        few = view.rows_of_truth().shape[1] < _NUMBERS_A_ROW * view.rows
        return "too many rows for their width" if few else ""

    def run(self, seen: Observation, view: LayerView | None, budget: Budget) -> Result:
        assert view is not None
        truth = view.rows_of_truth()
        found = separate(basis_of(view).T, budget)
        best, scores = matched(found, truth)
        return row_result(self.name, seen, view, best, scores, chance_of_rows(len(found), truth.shape[1]))


def separate(mixed: Tensor, budget: Budget, seed: int = 0) -> Tensor:
    """Return the independent components of rows.

    Args:
        mixed: orthonormal rows of shape (k, width).
        budget: time limit.
        seed: seed of the start.
    """
    centred = mixed - mixed.mean(1, keepdim=True)
    width = mixed.shape[1]
    values, vectors = torch.linalg.eigh(centred @ centred.T / width)
    keep = values > 1e-10 * values.max()
    whitening = vectors[:, keep].T / values[keep].sqrt()[:, None]
    white = whitening @ centred
    count = len(white)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.linalg.qr(torch.randn(count, count, generator=generator, dtype=torch.float64).to(mixed))[0]
    for number in budget.rounds():
        outputs = torch.tanh(weights @ white)
        update = outputs @ white.T / width - (1 - outputs.square()).mean(1, keepdim=True) * weights
        left, _, right = torch.linalg.svd(update)
        before, weights = weights, left @ right
        if number + 1 >= _ITERATIONS or bool((1 - (weights * before).sum(1).abs() < 1e-9).all()):
            break
    found: Tensor = weights @ whitening @ mixed
    return found
