"""Row numbers of tables: an embedding's message shows which rows a batch has looked up."""

from __future__ import annotations

import torch
from torch import Tensor

from ..capture import LayerView, Observation
from .base import Attack, Budget, Result, register_attack


@register_attack("words")
class Words(Attack):
    """Set of the row numbers of a batch, without order: those sent, or the rows of a gradient that are not zero."""

    def applies(self, seen: Observation, view: LayerView | None) -> str:
        assert view is not None
        if not view.is_table or view.truth is None:
            return "no table"
        same = len(view.truth) > 1 and bool((view.truth == view.truth[:1]).all())
        return "it looks up the same rows for all samples" if same else ""

    def run(self, seen: Observation, view: LayerView | None, budget: Budget) -> Result:
        assert view is not None
        assert view.truth is not None
        table = len(view.weight)
        found, ignored = numbers_of(view), getattr(view.module, "padding_idx", None)
        samples = view.truth.reshape(len(view.truth), -1)
        scores = []
        everything = torch.unique(samples)
        precision = float(torch.isin(found, everything).float().mean()) if len(found) else 0.0
        for sample in samples:
            own = torch.unique(sample if ignored is None else sample[sample != ignored])
            scores.append(float(torch.isin(own, found).float().mean()) if len(own) else 0.0)
        values = torch.tensor(scores) * precision
        chance = len(everything) / table
        note = f"{len(found)} of {table} rows of the table" if len(found) else "no rows can be told from others"
        return Result(
            self.name, view.name, "words", float(values.mean()), "share of row numbers", chance, values, note=note
        )


def numbers_of(view: LayerView) -> Tensor:
    """Return the row numbers that a table's message shows; none if all rows have a gradient."""
    if view.inputs is not None:
        sent: Tensor = torch.unique(view.inputs[:, 0].long())
        return sent
    assert view.formed is not None
    gradient = view.formed
    if gradient.is_sparse:
        touched: Tensor = torch.unique(gradient.coalesce().indices()[0])
        return touched
    norms = gradient.flatten(1).norm(dim=1)
    found = torch.nonzero(norms > 1e-6 * norms.max().clamp_min(1e-30)).flatten()
    return found[:0] if len(found) > len(norms) // 2 else found
