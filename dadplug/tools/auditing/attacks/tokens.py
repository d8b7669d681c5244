"""Tokens of texts by span checks (DAGER, arXiv:2405.15586).

Up to the first linear layer, the vector at a position of a text depends on the token there alone. An observer computes
it for each token and position, and keeps those that lie in the span of the rows of that layer's input, which its
gradient shows. Where rows are sent as they are, each is compared with these vectors instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..capture import LayerView, Observation
from .base import Attack, Budget, Result, layer_input, register_attack
from .rows import why_not_mixed
from .shown import numbers_of

Distance = Callable[[Tensor], Tensor]
"""Function from the vectors of tokens at all positions, (c, positions, width), to distances."""

_NEAR = 0.1  # of the distance that a wrong token has on average
_BLOCK = 64  # candidates at a time
_TOLERANCE = 1e-6  # singular values up to this share of the largest are rounding


@register_attack("tokens")
class Tokens(Attack):
    """Tokens at their positions, from the first linear layer behind an embedding."""

    source = "arXiv:2405.15586"
    share = 0.4

    def applies(self, seen: Observation, view: LayerView) -> str:
        if not seen.batch.is_text or seen.batch.data.dim() != 2:
            return "the data are not texts of shape (samples, positions)"
        if view.layer != first_linear(seen):
            return "not the first linear layer behind an embedding"
        if view.sends_rows:
            return ""
        if reason := why_not_mixed(view):
            return reason
        return "" if view.rows < view.rows_of_truth().shape[1] else "as many rows as the input has features, or more"

    def run(self, seen: Observation, view: LayerView, budget: Budget) -> Result:
        texts, counts = seen.batch.data, seen.batch.data != -1
        candidates, size = _candidates(seen)
        compare = _nearest(view, texts.shape) if view.sends_rows else _in_span(_common_basis(seen, view))
        distances = []
        tried = 0
        for number in budget.rounds():
            block = candidates[number * _BLOCK : (number + 1) * _BLOCK]
            if not len(block):
                break
            vectors = layer_input(
                seen.batch, view.layer, seen.batch.with_data(block[:, None].expand(-1, texts.shape[1]).contiguous())
            )
            if vectors is None:
                break
            distances.append(compare(vectors.double()))
            tried += len(block)
        if not distances:
            return Result(self.name, view.name, "data", 0.0, "token accuracy", 1 / size, torch.zeros(len(texts)))
        found = torch.cat(distances)
        correct = self._correct(texts, candidates[:tried], found, view)
        ignored = padding_of(seen)
        counts = counts if ignored is None else texts != ignored
        scores = (correct & counts).sum(1) / counts.sum(1).clamp_min(1)
        notes = [] if tried == len(candidates) else [f"{tried} of {len(candidates)} tokens tried"]
        if not view.sends_rows and len(texts) > 1:
            notes.append(f"which of the {len(texts)} texts a token belongs to is left open")
        if not view.sends_rows and float((found < _NEAR).sum(0).float().mean()) > len(texts):
            notes.append("more tokens than texts lie in the span at a position, and the nearest were taken")
        chance = min(1.0, len(texts) / size)
        return Result(
            self.name,
            view.name,
            "data",
            float(scores.mean()),
            "token accuracy",
            chance,
            scores.float(),
            note="; ".join(notes),
        )

    def _correct(self, texts: Tensor, candidates: Tensor, distances: Tensor, view: LayerView) -> Tensor:
        """Return which tokens are found, of shape (samples, positions).

        Args:
            texts: the tokens.
            candidates: of shape (c,).
            distances: of each candidate at each position, or at each place of each sample.
            view: the layer.
        """
        if view.sends_rows:
            best: Tensor = candidates[distances.argmin(0)]
            return best == texts
        order = distances.argsort(0)[: len(texts)]  # as many as there are texts, at most
        near = distances.gather(0, order) < _NEAR
        found = torch.where(near, candidates[order], torch.full_like(order, -1))
        correct: Tensor = (found[:, None, :] == texts[None]).any(0)
        return correct


def first_linear(seen: Observation) -> str:
    """Return the name of the first linear layer whose input has a row for each position of the texts."""
    shape = seen.batch.data.shape
    for view in seen.layers:
        if view.is_linear and view.truth is not None and view.truth.shape[:-1] == shape and not view.fed_by_data:
            return view.layer
    return ""


def _table(seen: Observation) -> LayerView | None:
    shape = seen.batch.data.shape
    tables = [view for view in seen.layers if view.is_table and view.truth is not None and view.truth.shape == shape]
    return max(tables, key=lambda view: len(view.weight), default=None)


def padding_of(seen: Observation) -> int | None:
    """Return the token that fills texts up; None without."""
    table = _table(seen)
    return None if table is None else getattr(table.module, "padding_idx", None)


def _candidates(seen: Observation) -> tuple[Tensor, int]:
    """Return the tokens that may occur, those first that the table's message shows, and the size of the vocabulary."""
    table = _table(seen)
    if table is None:
        size = int(seen.batch.data.max()) + 1
        return torch.arange(size, device=seen.batch.data.device), size
    size = len(table.weight)
    shown = numbers_of(table).to(seen.batch.data.device)
    return (shown if len(shown) else torch.arange(size, device=seen.batch.data.device)), size


def _common_basis(seen: Observation, view: LayerView) -> Tensor:
    """Return a basis of the span of a layer's input by all layers that have the same, such as query, key and value."""
    same = [
        each
        for each in seen.layers
        if each.is_linear
        and each.truth is not None
        and not why_not_mixed(each)
        and (each.truth is view.truth or (view.truth is not None and torch.equal(each.truth, view.truth)))
    ]
    gradients = [each.gradient().double() for each in same]
    stacked = torch.cat([each / each.norm().clamp_min(1e-300) for each in gradients])
    _, values, vectors = torch.linalg.svd(stacked, full_matrices=False)
    rank = int((values > _TOLERANCE * values[0].clamp_min(1e-300)).sum())
    basis: Tensor = vectors[: min(rank, view.rows)].T
    return basis


def _in_span(basis: Tensor) -> Distance:
    """Return a function from vectors (c, positions, width) to their distance from a span, 1 for a wrong token.

    Args:
        basis: orthonormal basis of shape (width, k).
    """
    usual = max(1e-6, 1 - basis.shape[1] / basis.shape[0]) ** 0.5

    def distance(vectors: Tensor) -> Tensor:
        norms = vectors.norm(dim=2).clamp_min(1e-30)
        inside = (vectors @ basis).norm(dim=2) / norms
        found: Tensor = (1 - inside.square()).clamp_min(0).sqrt() / usual
        return found

    return distance


def _nearest(view: LayerView, shape: torch.Size) -> Distance:
    """Return a function from vectors (c, positions, width) to their distance from the row of each place."""
    assert view.inputs is not None
    rows = view.inputs.double().reshape(*shape, -1)

    def distance(vectors: Tensor) -> Tensor:
        return torch.stack([torch.cdist(vectors[:, p], rows[:, p]) for p in range(shape[1])], 2)

    return distance
