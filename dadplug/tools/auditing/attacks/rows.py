"""Rows of a layer's inputs that are sent as they are, and the span of rows that a gradient and low-rank factors show.

``G = D^T A ~ L^T R``: the rows of R, and the right singular vectors of G, are mixtures of the rows of A. With P the
projection on their span, an observer who has a candidate x, such as the record of a patient, compares x with P x by
least squares. A similarity of 1 confirms the candidate, if unrelated samples have less: those of the other half of the
batch, in a step with its first half. The attacks that separate the mixtures start here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..capture import LayerView, Observation
from .base import Attack, Budget, Result, by_sample, centre, judge_pictures, matched, places, register_attack


@register_attack("rows")
class RowsAttack(Attack):
    """Rows of activations as `dad` and `edad` send them: of the layer that is fed by data, the data themselves."""

    source = "arXiv:2102.09631"

    def applies(self, seen: Observation, view: LayerView) -> str:
        if not view.sends_rows or view.truth is None or view.is_table:
            return "no rows of inputs are sent"
        return ""

    def run(self, seen: Observation, view: LayerView, budget: Budget) -> Result:
        assert view.inputs is not None
        assert view.truth is not None
        width = view.inputs.shape[1]
        truth = view.truth.reshape(-1, width) if view.truth.numel() % width == 0 else view.rows_of_truth()
        if truth.shape[1] != width:  # a convolution whose input is padded before
            truth = view.truth.flatten(1)
            if truth.shape[1] != width:
                truth = view.inputs
        found, scores = matched(view.inputs, truth)
        return row_result(self.name, seen, view, found, scores, chance_of_rows(len(view.inputs), width))


def chance_of_rows(count: int, width: int) -> float:
    """Return the largest correlation with a row that `count` random rows have, about."""
    return min(1.0, float((2 * torch.log(torch.tensor(max(count, 2.0))) / max(width, 1)).sqrt()))


def row_result(
    name: str,
    seen: Observation,
    view: LayerView,
    found: torch.Tensor,
    scores: torch.Tensor,
    chance: float,
    note: str = "",
) -> Result:
    """Return the result of an attack that has recovered rows of a layer's input.

    Args:
        name: name of the attack.
        seen: the observation.
        view: the layer.
        found: a row for each row of the layer's input, of shape (rows, in).
        scores: their similarities.
        chance: the similarity of random rows.
        note: what a reader has to know.
    """
    data = seen.batch.data
    samples = by_sample(scores, len(data))
    target = "data" if view.fed_by_data else "activations"
    result = Result(name, view.name, target, float(samples.mean()), "correlation", chance, samples, note=note)
    if target == "data" and found.numel() and found.numel() % len(data) == 0:
        known = places(seen.batch, view)
        if known is not None and view.truth is not None and found.numel() == view.truth.numel():
            result.pictures = known.data(found, data.shape)
            judge_pictures(result, data)
    return result


_MOST = 4096  # rows and columns of a gradient whose singular vectors are computed
_TOLERANCE = 1e-5
_LARGEST_CHANCE = 0.85  # similarity of unrelated samples up to which the span distinguishes samples


@register_attack("span")
class Span(Attack):
    """Least squares of the samples on the span of what is seen."""

    source = "DAGER, arXiv:2405.15586; Cocktail Party, arXiv:2209.05578"

    def applies(self, seen: Observation, view: LayerView) -> str:
        return why_no_mixed_data(view)

    def run(self, seen: Observation, view: LayerView, budget: Budget) -> Result:
        basis, truth = basis_of(view), view.rows_of_truth().double()
        width = truth.shape[1]
        scores = _inside(truth - centre(truth), basis)
        chance = _of_unrelated(seen, view) or (basis.shape[1] / width) ** 0.5
        note = "a candidate is confirmed, not found"
        if basis.shape[1] > width // 2 or chance > _LARGEST_CHANCE:
            scores = torch.zeros_like(scores)
            note = f"not informative: unrelated samples have a similarity of {chance:.2f}"
        result = row_result(self.name, seen, view, truth @ basis @ basis.T, scores, chance, note)
        if not scores.any():
            result.pictures = result.psnr = result.ssim = None
        return result


def _inside(rows: Tensor, basis: Tensor) -> Tensor:
    """Return the share of each row's length that lies in a span."""
    share: Tensor = (rows @ basis).norm(dim=1) / rows.norm(dim=1).clamp_min(1e-30)
    return share


def _of_unrelated(seen: Observation, view: LayerView) -> float:
    """Return the similarity of samples that had no part in a step with the span that it shows; 0 if not known."""
    same = [] if seen.half is None else [each for each in seen.half.layers if each.name == view.name]
    if not same or why_not_mixed(same[0]) or same[0].truth is None or view.truth is None:
        return 0.0
    count = len(same[0].rows_of_truth())
    others = view.rows_of_truth().double()[count:]
    return float(_inside(others - centre(others), basis_of(same[0])).mean()) if len(others) else 0.0


def why_not_mixed(view: LayerView) -> str:
    """Return why mixtures of rows cannot be had from a layer's message; empty if they can."""
    if not view.is_linear or view.truth is None:
        return "no layer whose gradient is a product of rows"
    if view.inputs is None and view.formed is None:
        return "nothing of it is sent"
    shape = (
        (view.deltas.shape[1], view.inputs.shape[1]) if view.inputs is not None and view.deltas is not None else None
    )
    largest = max(shape or view.weight.shape)
    return "" if largest <= _MOST else f"its matrix is larger than {_MOST}, and was left out"


def why_no_mixed_data(view: LayerView) -> str:
    """Return why mixtures of the data cannot be had from a layer's message; empty if they can."""
    if view.sends_rows:
        return "the rows themselves are sent"
    return why_not_mixed(view) or ("" if view.fed_by_data else "the layer's input is not data")


def singular(view: LayerView) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, S and V^T of what is seen of a gradient, for as many singular values as the layer has rows."""
    if view.inputs is not None and view.deltas is not None:
        left, right = view.deltas.double(), view.inputs.double()
        q, r = torch.linalg.qr(left.T)
        p, s = torch.linalg.qr(right.T)
        u, values, v = torch.linalg.svd(r @ s.T)
        u, v = q @ u, v @ p.T
    else:
        u, values, v = torch.linalg.svd(view.gradient().double(), full_matrices=False)
    rank = int((values > _TOLERANCE * values.max().clamp_min(1e-300)).sum())
    count = min(rank, view.rows)
    return u[:, :count], values[:count], v[:count]


def basis_of(view: LayerView) -> Tensor:
    """Return an orthonormal basis of the span, of shape (in, k)."""
    return singular(view)[2].T
