"""Estimates of a step's gradient noise from what all sites have measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .noise_formulas import NO_ESTIMATE, NoiseEstimate, Part, between_parts, norm_of_mean, within_parts
from .noise_probe import SiteNorms, square_of

_MISSING = Part(math.nan, math.nan, math.nan, math.nan)


@dataclass
class Pair:
    """Agreed gradients that wait for those of the next step, to be compared with them.

    Attributes:
        gradients: by name of the parameter; None at a site that does not have it.
        samples: number of samples of a batch with the same noise.
    """

    gradients: Mapping[str, Tensor | None]
    samples: float


def effective_samples(sites: Sequence[tuple[float, int]]) -> float:
    """Return the number of samples of a batch whose mean gradient has the noise of the weighted mean over sites.

    Args:
        sites: weight in the mean and number of samples of each site that has any.
    """
    return 1.0 / math.fsum(weight * weight / samples for weight, samples in sites)


def estimate_step(
    sites: Sequence[tuple[float, SiteNorms]], names: Sequence[str], compressed: Sequence[str]
) -> dict[str, NoiseEstimate]:
    """Estimate the noise of every parameter's gradient from one step.

    Args:
        sites: weight in the mean and norms of each site that has samples.
        names: names of the parameters.
        compressed: names of those whose agreed gradients are approximations, so that their norms do not count.

    Returns:
        The estimates by name, without parameters that have no gradient; NaN where this step does not suffice.
    """
    agreed = first_known([norms.agreed for _, norms in sites])
    estimates = {}
    for place, name in enumerate(names):
        norm = agreed[place]
        if math.isnan(norm):
            continue
        parts = _parts(sites, place)
        if name in compressed:
            norm = _norm_by_sketches(parts, sites, compressed.index(name))
        within = within_parts(parts, norm)
        estimates[name] = between_parts(parts, norm) if math.isnan(within.squared_norm) else within
    return estimates


def first_known(columns: Sequence[Tensor]) -> list[float]:
    """Return in each place the first number that is not NaN; NaN where there is none.

    Args:
        columns: of shape (places,), those of each site.
    """
    lists = [column.tolist() for column in columns]
    return [next((value for value in values if not math.isnan(value)), math.nan) for values in zip(*lists, strict=True)]


def _parts(sites: Sequence[tuple[float, SiteNorms]], place: int) -> list[Part]:
    """Return the micro-batches of all sites, with the norms of one parameter's gradients."""
    parts = []
    for weight, site in sites:
        total = float(site.samples)
        for row, samples in enumerate(site.parts):
            norm, squares = float(site.norms[row, place]), float(site.squares[row, place])
            scale = total / samples
            parts.append(Part(samples, weight / scale, norm * scale * scale, squares * total * total))
        if not site.parts:
            parts.append(_MISSING)
    return parts


def _norm_by_sketches(parts: Sequence[Part], sites: Sequence[tuple[float, SiteNorms]], index: int) -> float:
    """Return the squared norm of the mean of gradients that only their own site knows."""
    if any(math.isnan(part.norm) for part in parts):
        return math.nan
    sketches = torch.stack(
        [
            site.sketched[row, index] * (site.samples / samples)
            for _, site in sites
            for row, samples in enumerate(site.parts)
        ]
    )
    lists = sketches.tolist()
    products = [[math.fsum(map(float.__mul__, one, other)) for other in lists] for one in lists]
    return norm_of_mean(parts, products)


def pair_norms(pair: Pair, gradients: Mapping[str, Tensor | None]) -> Tensor:
    """Return the squared norms of each first and second gradient, and of their difference.

    Args:
        pair: the first gradients.
        gradients: the second ones, by name.

    Returns:
        A tensor of shape (parameters in the order of their names, 3); NaN where a gradient is missing.
    """
    rows = []
    for name, first in sorted(pair.gradients.items()):
        second = gradients.get(name)
        if first is None or second is None or first.is_sparse != second.is_sparse:
            rows.append(torch.full((3,), torch.nan, dtype=torch.float64))
        else:
            rows.append(torch.stack([square_of(first), square_of(second), square_of(second - first)]).cpu())
    return torch.stack(rows)


def estimate_pair(pair: Pair, samples: float, norms: Sequence[Tensor]) -> dict[str, NoiseEstimate]:
    """Estimate the noise from the agreed gradients of two steps.

    Args:
        pair: the first gradients.
        samples: number of samples of a batch with the noise of the second ones.
        norms: what `pair_norms` returned at each site.

    Returns:
        The estimates, by name.
    """
    estimates = {}
    total = pair.samples + samples
    known = [first_known([each[:, column] for each in norms]) for column in range(3)]
    for name, first, second, difference in zip(sorted(pair.gradients), *known, strict=True):
        parts = [
            Part(pair.samples, pair.samples / total, first, math.nan),
            Part(samples, samples / total, second, math.nan),
        ]
        product = 0.5 * (first + second - difference)
        estimate = between_parts(parts, norm_of_mean(parts, [[0.0, product], [product, 0.0]]))
        estimates[name] = NO_ESTIMATE if math.isnan(difference) else estimate
    return estimates
