"""Rows of a layer's inputs that are sent as they are: nothing is left to compute."""

from __future__ import annotations

import torch

from ..capture import LayerView, Observation
from ..similarity import by_sample, judge_pictures, matched, places
from .base import Attack, Budget, Result, register_attack


@register_attack("rows")
class Rows(Attack):
    """Rows of activations as `dad` and `edad` send them: of the layer that is fed by data, the data themselves."""

    source = "arXiv:2102.09631"

    def applies(self, seen: Observation, view: LayerView | None) -> str:
        assert view is not None
        if not view.sends_rows or view.truth is None or view.is_table:
            return "no rows of inputs are sent"
        return ""

    def run(self, seen: Observation, view: LayerView | None, budget: Budget) -> Result:
        assert view is not None
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
