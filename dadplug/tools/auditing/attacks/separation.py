"""Separation of mixed rows: exact behind a ReLU (SPEAR), or by independent components (Cocktail Party).

SPEAR (arXiv:2403.03945): with ``G = L R`` of rank b there is a matrix Q with ``D^T = L Q`` and ``A = Q^-1 R``. Behind a
ReLU the columns of D^T have zeros, one for each inactive neuron. So: draw b - 1 rows of L, find the vector q that they
are orthogonal to, and keep it if L q has many more zeros than these. It is a column of Q then, up to its scale, which
does not change a picture; with a bias, ``grad b = D^T 1`` gives the scale.

The draws that this takes double with each row of the batch. SPEAR++ (arXiv:2510.24200) searches by dictionary learning
instead, at ten times as many rows: a vector q with many zeros in L q has a small sum of absolute values, which descent
finds from random starts. Both searches run here in turns, since the draws need no distribution of the deltas.

Cocktail Party (arXiv:2209.05578): the rows that are seen are mixtures ``R = M A`` of the samples. Pictures have
distributions of values that are far from normal, their mixtures are closer to it: the fixed-point iteration of FastICA
finds the combinations that are least so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..capture import LayerView, Observation
from .base import Attack, Budget, Result, matched, register_attack
from .rows import basis_of, chance_of_rows, row_result, singular, why_no_mixed_data

MOST_ROWS = 256
"""Rows up to which the attack is tried."""

_DRAWS = 4096  # at a time
_MOST_DRAWN = 24  # rows up to which vectors are drawn, too
_STARTS, _STEPS, _AT_ONCE = 128, 200, 16
_SMOOTHED = (0.4, 0.2, 0.8)  # value, of the root mean square, up to which the absolute value is smoothed, by round
_FALL = 0.99  # of the step length by step
_ZERO = 1e-3  # cosine up to which a neuron counts as inactive
_SURPLUS = 0.05  # of the neurons: zeros beyond those that were drawn
_SURE, _TRIMS = 0.7, 3  # share of the inactive neurons, those with least values, that determine a vector at last
_KEPT = 32  # draws of each round that are looked at, those with most zeros
_SAME = 0.9999  # cosine of equal directions
_AGREES = 0.97  # share of neurons whose activity recovered inputs explain
_ROUNDS = 400
_UNIQUE = 1e-5  # least eigenvalue, of the largest, from which a direction is determined


@register_attack("spear")
class Spear(Attack):
    """Exact rows of a linear layer that a ReLU follows, from its gradient or factors of it."""

    source = "arXiv:2403.03945"
    share = 0.15
    slow = True

    def applies(self, seen: Observation, view: LayerView) -> str:
        if reason := why_no_mixed_data(view):
            return reason
        if view.rows > MOST_ROWS:
            return f"more than {MOST_ROWS} rows"
        if view.rows > 1 and not any(isinstance(module, nn.ReLU) for module in seen.batch.model.modules()):
            return "" if uses_function(seen.batch.model) else "the model has no ReLU"
        return ""

    def run(self, seen: Observation, view: LayerView, budget: Budget) -> Result:
        u, values, v = singular(view)
        truth = view.rows_of_truth()
        mixed = values[:, None] * v
        directions, exact = find_directions(u, budget, lambda found: _agreement(view, u, mixed, found) >= _AGREES)
        note = (
            "" if exact else f"{len(directions)} of {len(v)} directions found, which do not explain the layer's outputs"
        )
        found = rows_of(view, u, mixed, directions) if len(directions) else v[:0]
        best, scores = matched(found, truth)
        result = row_result(self.name, seen, view, best, scores, chance_of_rows(len(v), truth.shape[1]), note)
        if not len(found):
            result.pictures = result.psnr = result.ssim = None
        return result


def rows_of(view: LayerView, u: Tensor, mixed: Tensor, directions: Tensor) -> Tensor:
    """Return the rows of the layer's inputs that follow from directions, in the right scale if there is a bias.

    They are exact where all directions are known, else the nearest ones.

    Args:
        view: the layer.
        u: L of shape (out, b).
        mixed: R of shape (b, in).
        directions: columns of Q, as rows of shape (up to b, b).
    """
    found: Tensor = torch.linalg.lstsq(directions.T, mixed).solution
    if view.bias is None:
        return found
    scale = torch.linalg.lstsq(u @ directions.T, view.bias.double()[:, None]).solution[:, 0]
    scaled: Tensor = found / torch.where(scale.abs() < 1e-12, torch.ones_like(scale), scale)[:, None]
    return scaled


def _agreement(view: LayerView, u: Tensor, mixed: Tensor, directions: Tensor) -> float:
    """Return the share of neurons whose activity by recovered inputs fits recovered deltas, of the worst sample."""
    weight = view.weight.double()
    bias = getattr(view.module, "bias", None)
    found = rows_of(view, u, mixed, directions)
    outputs = found @ (weight if view.transposed else weight.T)
    if isinstance(bias, Tensor):
        outputs = outputs + bias.detach().double()
    deltas = (u @ directions.T).T
    active = deltas.abs() > _ZERO * deltas.abs().amax(1, keepdim=True)
    alike = ((outputs > 0) == active).double().mean(1)
    if view.bias is None:  # the sign is not known
        alike = torch.maximum(alike, ((outputs < 0) == active).double().mean(1))
    return float(alike.min())


def uses_function(model: nn.Module) -> bool:
    """Return whether a model may call ReLU as a function, since it is not a sequence of modules alone."""
    return any(type(module).__module__.split(".")[0] != "torch" for module in model.modules())


def find_directions(
    mixtures: Tensor, budget: Budget, accept: Callable[[Tensor], bool], seed: int = 0
) -> tuple[Tensor, bool]:
    """Find the vectors q for which ``mixtures @ q`` has many zeros.

    Args:
        mixtures: L of shape (out, b).
        budget: time limit.
        accept: returns whether b vectors explain what else is known.
        seed: seed of the draws.

    Returns:
        Independent vectors, of shape (up to b, b), and whether they were accepted.
    """
    norms = mixtures.norm(dim=1)
    rows = mixtures[norms > 1e-9 * norms.max().clamp_min(1e-300)]
    rows = rows / rows.norm(dim=1, keepdim=True)
    count = mixtures.shape[1]
    if count == 1:
        return torch.ones(1, 1, dtype=mixtures.dtype, device=mixtures.device), True
    least = count - 1 + max(4, int(_SURPLUS * len(rows)))
    generator = torch.Generator().manual_seed(seed)
    found: list[tuple[int, Tensor]] = []
    chosen = rows[:0]
    if len(rows) < least:
        return chosen, False
    for number in budget.rounds():
        draws = number % 2 == 0 and count <= _MOST_DRAWN
        smoothed = _SMOOTHED[number // 2 % len(_SMOOTHED)]
        candidates = _drawn(rows, generator) if draws else _descended(rows, smoothed, generator, budget)
        candidates = candidates[candidates.isfinite().all(1)]
        candidates = candidates / candidates.norm(dim=1, keepdim=True)
        zeros = ((candidates @ rows.T).abs() < _ZERO).sum(1)
        candidates, zeros = candidates[zeros >= least], zeros[zeros >= least]
        before = len(found)
        for _ in range(_KEPT):
            if found and len(candidates):
                far = (candidates @ torch.stack([each for _, each in found]).T).abs().amax(1) < _SAME
                candidates, zeros = candidates[far], zeros[far]
            if not len(candidates):
                break
            place = int(zeros.argmax())
            refined = _refined(rows, candidates[place])
            if refined is not None and all(abs(float(refined[1] @ known)) < _SAME for _, known in found):
                found.append(refined)
            zeros[place] = 0
            if int(zeros.max()) < least:
                break
        if len(found) > before:
            found = sorted(found, key=lambda each: -each[0])[: _KEPT * count]
            chosen = _independent(found, count)
            if len(chosen) == count and accept(chosen):
                return chosen, True
        if number >= _ROUNDS:
            break
    return chosen, False


def _drawn(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Return vectors to each of which as many drawn rows are orthogonal as determine it."""
    drawn = torch.rand(_DRAWS, len(rows), generator=generator).topk(rows.shape[1] - 1, 1).indices.to(rows.device)
    systems = rows[drawn]
    solution = torch.linalg.solve_ex(systems[:, :, :-1], -systems[:, :, -1:])[0][:, :, 0]
    return torch.cat([solution, torch.ones_like(solution[:, :1])], 1)


def _descended(rows: Tensor, smoothed: float, generator: torch.Generator, budget: Budget) -> Tensor:
    """Return vectors with small sums of absolute products with rows, found from random starts.

    Args:
        rows: of shape (n, b), of length 1.
        smoothed: products up to which the absolute value is smoothed, as a share of the root mean square.
        generator: draws the starts.
        budget: time limit, for the last part of the search.
    """
    count, size = rows.shape
    values, vectors = torch.linalg.eigh(rows.T @ rows / count)
    whitening = (vectors / values.clamp_min(_UNIQUE * float(values[-1])).sqrt()) @ vectors.T
    white = rows @ whitening
    starts = torch.randn(_STARTS, size, generator=generator, dtype=torch.float64).to(rows)
    found = starts / starts.norm(dim=1, keepdim=True)
    for step in range(_STEPS):
        slope = torch.tanh(found @ white.T / smoothed) @ white / count
        slope -= (slope * found).sum(1, keepdim=True) * found
        found = found - 0.5 * _FALL**step * slope
        found /= found.norm(dim=1, keepdim=True)
    for few in (count // share for share in (2, 4, 8) if count // share > 2 * size):
        for _ in range(6):  # towards what the rows with the least products are orthogonal to
            if not budget.left:
                break
            found = torch.cat([_orthogonal(white, part, few) for part in found.split(_AT_ONCE)])
    candidates: Tensor = found @ whitening
    return candidates


def _orthogonal(rows: Tensor, directions: Tensor, few: int) -> Tensor:
    """Return for each direction the one with the least sum of squares over the rows with its `few` least products."""
    nearest = rows[(directions @ rows.T).abs().topk(few, 1, largest=False).indices]
    vectors: Tensor = torch.linalg.eigh(nearest.mT @ nearest)[1]
    return vectors[:, :, 0]


def _refined(rows: Tensor, direction: Tensor) -> tuple[int, Tensor] | None:
    """Return the vector that all rows with a zero are orthogonal to, and their number; None if there are several."""
    inactive = rows[(rows @ direction).abs() < _ZERO]
    values, vectors = torch.linalg.eigh(inactive.T @ inactive)
    if float(values[1]) < _UNIQUE * float(values[-1]):  # also mixtures of two columns are orthogonal to them
        return None
    few = max(min(len(inactive), rows.shape[1] + 1), int(_SURE * len(inactive)))
    found = vectors[:, :1].T
    for _ in range(_TRIMS):  # without rows that are nearly orthogonal by chance, and turn the vector a little
        found = _orthogonal(rows, found, few)
    return int(((rows @ found[0]).abs() < _ZERO).sum()), found[0]


def _independent(found: list[tuple[int, Tensor]], count: int) -> Tensor:
    """Choose up to `count` independent vectors, those with most zeros first: mixtures of two have fewer."""
    chosen: list[Tensor] = []
    basis: list[Tensor] = []
    for _, direction in sorted(found, key=lambda each: -each[0]):
        rest = direction.clone()
        for each in basis:
            rest = rest - (rest @ each) * each
        if float(rest.norm()) > 1e-3:
            chosen.append(direction)
            basis.append(rest / rest.norm())
        if len(chosen) == count:
            break
    return torch.stack(chosen) if chosen else torch.empty(0, count)


_ITERATIONS = 300
_NUMBERS_A_ROW = 8  # values of a row for each row that is to be separated, at least


@register_attack("components")
class Components(Attack):
    """Samples from mixtures of them, by independent component analysis."""

    source = "arXiv:2209.05578"
    slow = True

    def applies(self, seen: Observation, view: LayerView) -> str:
        if reason := why_no_mixed_data(view):
            return reason
        few = view.rows_of_truth().shape[1] < _NUMBERS_A_ROW * view.rows
        return "too many rows for their width" if few else ""

    def run(self, seen: Observation, view: LayerView, budget: Budget) -> Result:
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
