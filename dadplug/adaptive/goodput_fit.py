"""Fit of the goodput model to measured steps, by least squares over medians: pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..exchange.codec import register
from .goodput import BatchSplit, ExchangeCosts, SiteCosts, StepModel, combined

_EXPONENTS = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)
_USUAL_EXPONENT = 1.5  # before steps of several batches tell
_WORTH = 0.9  # a further coefficient has to leave less than this fraction of the error


@register
@dataclass(frozen=True)
class Measurement:
    """Medians of the measured steps of one site in a period in which batches stayed the same.

    Attributes:
        seconds: seconds of a step.
        compute: seconds of a step in which the site did not wait for others.
        nbytes: bytes that it sent.
        count: number of measured steps.
    """

    seconds: float
    compute: float
    nbytes: float
    count: int


@dataclass(frozen=True)
class Period:
    """Measured steps of all sites with one split.

    Attributes:
        split: samples of each site.
        sites: what each site has measured, by rank.
    """

    split: BatchSplit
    sites: tuple[Measurement, ...]


def nonnegative_fit(features: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Fit coefficients of at least 0 by least squares of the relative error.

    Of two sets of features that explain the targets about equally well, the first one with fewer features is used.

    Args:
        features: shape (measurements, features).
        targets: positive numbers, shape (measurements,).
        weights: shape (measurements,).

    Returns:
        The coefficients.
    """
    scale = np.sqrt(weights) / targets
    scaled, wanted = features * scale[:, None], targets * scale
    best, least = np.zeros(features.shape[1]), float(wanted @ wanted)
    for count in range(1, features.shape[1] + 1):
        for chosen in itertools.combinations(range(features.shape[1]), count):
            found, *_ = np.linalg.lstsq(scaled[:, chosen], wanted, rcond=None)
            error = float(np.square(scaled[:, chosen] @ found - wanted).sum())
            if found.min() >= 0.0 and error < _WORTH * least and error < least - 1e-12 * float(wanted @ wanted):
                best, least = np.zeros(features.shape[1]), error
                best[list(chosen)] = found
    return best


def fit_site(rank: int, periods: Sequence[Period], payload: tuple[float, float]) -> SiteCosts:
    """Fit the costs of one site.

    With measurements of one batch alone, all of the time counts as that of samples.

    Args:
        rank: rank of the site.
        periods: the measured periods, at least one.
        payload: bytes that it sends in a step, whatever its batch, and for each of its samples.
    """
    own = [period.sites[rank] for period in periods]
    rows = [period.split.sizes[rank] for period in periods]
    micro = [period.split.micro_batches for period in periods]
    if len({*zip(rows, micro, strict=True)}) == 1:
        seconds = float(np.median([each.compute for each in own]))
        return SiteCosts(0.0, seconds / rows[0], 0.0, *payload)
    totals = [period.split.batch for period in periods]
    features = np.array([micro, rows, totals], dtype=float).T
    times = np.maximum([each.compute for each in own], 1e-9)
    weights = np.array([float(min(each.count, 16)) for each in own])
    fixed, per_row, per_global_row = map(float, nonnegative_fit(features, times, weights))
    if per_row == 0.0:  # then batches would be divided by chance
        total = sum(totals) / max(1, sum(rows))
        per_row, per_global_row = per_global_row * total / 2, per_global_row / 2
    return SiteCosts(fixed, per_row, per_global_row, *payload)


def fit_link(periods: Sequence[Period]) -> ExchangeCosts:
    """Fit the costs of the exchange.

    With measurements of one number of bytes alone, half of the time counts as latency.

    Args:
        periods: the measured periods, at least one.
    """
    seconds = np.array([max(each.seconds for each in period.sites) for period in periods])
    compute = np.array([max(each.compute for each in period.sites) for period in periods])
    compute = np.minimum(compute, seconds)
    micro = np.array([period.split.micro_batches for period in periods])
    nbytes = np.array([max(each.nbytes for each in period.sites) for period in periods])
    weights = np.array([float(min(each.count for each in period.sites)) for period in periods])
    best, least = ExchangeCosts(0.0, 0.0, 1.0), np.inf
    several = len({*nbytes}) > 1 and nbytes.max() > 1.02 * nbytes.min()
    exponents = _EXPONENTS if len(periods) > 1 else (_USUAL_EXPONENT,)
    for exponent in sorted(exponents, key=lambda each: abs(each - _USUAL_EXPONENT)):
        last = compute / micro
        whole = seconds - compute + last
        exchange = np.maximum(whole**exponent - last**exponent, 0.0) ** (1 / exponent)
        if not several:
            middle = float(np.median(exchange))
            costs = ExchangeCosts(middle / 2, middle / 2 / max(1.0, float(nbytes.max())), exponent)
        else:
            features = np.stack([np.ones_like(nbytes), nbytes], 1)
            latency, per_byte = map(float, nonnegative_fit(features, np.maximum(exchange, 1e-3 * seconds), weights))
            costs = ExchangeCosts(latency, per_byte, exponent)
        predicted = [combined(each, costs.exchange(size), exponent) for each, size in zip(last, nbytes, strict=True)]
        error = float((weights * np.square((np.array(predicted) - whole) / seconds)).sum())
        if error < _WORTH * least - 1e-12:
            best, least = costs, error
    return best


def fit(periods: Sequence[Period], payloads: Sequence[tuple[float, float]]) -> StepModel:
    """Fit the model of the time of a step.

    Args:
        periods: the measured periods, at least one.
        payloads: for each site, the bytes that it sends in a step, whatever its batch, and for each of its samples.
    """
    sites = tuple(fit_site(rank, periods, payload) for rank, payload in enumerate(payloads))
    return StepModel(sites, fit_link(periods))
