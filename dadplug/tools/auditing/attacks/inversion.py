"""Data by optimisation: inputs are searched whose messages are those that are seen.

Inverting gradients (Geiping et al., arXiv:2003.14053) minimises ``1 - cos(g(x), g)``, for pictures and volumes plus
their total variation, by Adam on signs of gradients. Where the span of the first layer's rows is seen, the search is
for the coefficients in it, which are few. Where rows of a later layer are seen, as with ``share_inputs=False``, inputs
are searched that have these activations.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..capture import LayerView, Observation
from .base import (
    Attack,
    Budget,
    Places,
    Result,
    is_grid,
    judge_pictures,
    layer_input,
    matched,
    places,
    register_attack,
)
from .rows import basis_of, chance_of_rows, why_not_mixed

_ITERATIONS = 1000
_FEW = 200
_PATIENCE, _PROGRESS = 200, 0.02  # iterations in which the objective has to fall by a share
_VARIATION = 1e-3
_MOST_SAMPLES = 16


@register_attack("activations")
class Activations(Attack):
    """Data whose activations at a layer are the rows that are seen there."""

    whole = True
    share = 0.2

    def applies(self, seen: Observation, view: None) -> str:
        if seen.batch.is_text:
            return "the data are not numbers, but tokens"
        return "" if _visible(seen) else "no rows of a later layer are sent"

    def run(self, seen: Observation, view: None, budget: Budget) -> Result:
        batch, shown = seen.batch, _visible(seen)
        assert shown is not None
        assert shown.truth is not None
        assert shown.inputs is not None
        target = shown.inputs.reshape(shown.truth.shape)
        size = float(target.square().mean())

        def objective(data: Tensor) -> Tensor:
            found = layer_input(batch, shown.layer, batch.with_data(data), differentiable=True)
            if found is None:
                raise RuntimeError(f"the layers before {shown.layer} cannot be run again")
            return (found - target).square().mean() / max(size, 1e-30)

        found, loss, steps = search(objective, batch.data, budget, signs=False)
        note = f"from the input of {shown.layer}; {steps} iterations, objective {loss:.1e}"
        return _judged(self.name, seen, found, note)


@register_attack("inversion")
class Inversion(Attack):
    """Data whose gradients are those that are seen, with the labels known."""

    source = "arXiv:2003.14053"
    whole = True
    share = 0.5
    slow = True

    def applies(self, seen: Observation, view: None) -> str:
        if seen.batch.is_text:
            return "the data are not numbers, but tokens"
        if len(seen.batch) > _MOST_SAMPLES:
            return f"more than {_MOST_SAMPLES} samples"
        return "" if seen.gradients else "no gradients are seen"

    def run(self, seen: Observation, view: None, budget: Budget) -> Result:
        batch = seen.batch
        model = copy.deepcopy(batch.model)
        trained = {name: each for name, each in model.named_parameters() if name in seen.gradients}
        targets = [
            seen.gradients[name].to_dense() if seen.gradients[name].is_sparse else seen.gradients[name]
            for name in trained
        ]
        norm = math.sqrt(sum(float(each.square().sum()) for each in targets))

        def objective(data: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):  # the others cannot be differentiated twice
                loss = replace(batch, inputs=batch.with_data(data)).loss(model)
                own = torch.autograd.grad(loss, list(trained.values()), create_graph=True, allow_unused=True)
            pairs = [(each, target) for each, target in zip(own, targets, strict=True) if each is not None]
            product = sum(((each * target).sum() for each, target in pairs), torch.zeros(()))
            square = sum((each.square().sum() for each, _ in pairs), torch.zeros(()))
            return 1 - product / (square.clamp_min(1e-30).sqrt() * max(norm, 1e-30))

        expand, width = _in_span(seen) or (None, 0)
        shape = batch.data.shape if expand is None else torch.Size((len(batch), width))
        found, loss, steps = search(objective, batch.data, budget, signs=True, shape=shape, expand=expand)
        notes = [
            f"{steps} iterations{', too few to tell' if steps < _FEW else ''}, objective {loss:.2g}",
            "labels known",
        ]
        if expand is not None:
            notes.append("within the span of the first layer")
        return _judged(self.name, seen, found, "; ".join(notes))


def _in_span(seen: Observation) -> tuple[Callable[[Tensor], Tensor], int] | None:
    """Return a function from coefficients in the span of a first layer's rows to data, and their number a sample."""
    for view in seen.layers:
        if not view.fed_by_data or why_not_mixed(view) or view.rows != len(seen.batch):
            continue
        basis, known = basis_of(view), places(seen.batch, view)
        if known is not None and 0 < basis.shape[1] <= basis.shape[0] // 2:
            scaled = basis.shape[0] ** 0.5 * basis.T.to(seen.batch.data)
            return partial(_expanded, scaled, known, seen.batch.data.shape), len(scaled)
    return None


def _expanded(basis: Tensor, known: Places, shape: torch.Size, coefficients: Tensor) -> Tensor:
    return known.data(coefficients @ basis, shape)


def _visible(seen: Observation) -> LayerView | None:
    """Return the first layer whose rows are sent, with a part of them for each sample."""
    for view in seen.layers:
        if not view.sends_rows or view.is_table or view.fed_by_data or view.truth is None or view.inputs is None:
            continue
        if view.inputs.numel() == view.truth.numel():
            return view
    return None


def search(
    objective: Callable[[Tensor], Tensor],
    like: Tensor,
    budget: Budget,
    *,
    signs: bool,
    shape: torch.Size | None = None,
    expand: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
) -> tuple[Tensor, float, int]:
    """Minimise a function of data, within the range of the originals, which an observer is assumed to know.

    Args:
        objective: returns what is minimised.
        like: the originals, for shape, range and statistics.
        budget: time limit.
        signs: whether Adam steps by the signs of gradients.
        shape: shape of what is varied; that of the data where None.
        expand: function from it to the data; None where these are varied themselves, within their range.
        seed: seed of the start.

    Returns:
        The data that were best, their value, and the number of iterations.
    """
    generator = torch.Generator().manual_seed(seed)
    mean, spread = float(like.mean()), float(like.std().nan_to_num(1.0)) or 1.0
    low, high = float(like.min()), float(like.max())
    start = torch.randn(shape or like.shape, generator=generator, dtype=like.dtype).to(like.device)
    if expand is not None:
        mean, low, high = 0.0, -math.inf, math.inf
    varied = nn.Parameter((mean + spread * start).clamp(low, high))
    optimizer = torch.optim.Adam([varied], lr=0.1 * spread)
    schedule = torch.optim.lr_scheduler.MultiStepLR(
        optimizer, [int(_ITERATIONS * part) for part in (0.4, 0.65, 0.85)], 0.1
    )
    best, least, before, steps = like, math.inf, math.inf, 0
    for number in budget.rounds():
        if number >= _ITERATIONS:
            break
        data = varied if expand is None else expand(varied)
        value = objective(data)
        if float(value.detach()) < least:
            least, best = float(value.detach()), data.detach().clone()
        total = value + _VARIATION * variation(data) / spread if signs and is_grid(like) else value
        (gradient,) = torch.autograd.grad(total, varied)
        varied.grad = gradient.sign() if signs else gradient
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            varied.clamp_(low, high)
        steps = number + 1
        if number % _PATIENCE == _PATIENCE - 1:
            if least < 1e-10 or least > (1 - _PROGRESS) * before:
                break
            before = least
    return best, least, steps


def variation(grids: Tensor) -> Tensor:
    """Return the mean total variation of pictures or volumes of shape (samples, channels, height, width[, depth])."""
    return sum((grids.diff(dim=dim).abs().mean() for dim in range(2, grids.dim())), torch.zeros(()))


def _judged(name: str, seen: Observation, found: Tensor, note: str) -> Result:
    data = seen.batch.data
    best, scores = matched(found.flatten(1), data.flatten(1))
    chance = chance_of_rows(len(data), data[0].numel())
    result = Result(name, "", "data", float(scores.mean()), "correlation", chance, scores, note=note)
    result.pictures = best.reshape(data.shape)
    judge_pictures(result, data)
    return result
