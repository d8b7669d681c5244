"""Fit of the goodput model to measured steps: pure functions.

Errors are those of the logarithm of a time, so that neither long nor short steps count more. A prior decides what few
measurements leave open: all sites' costs have the same proportions, see `site_prior`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..exchange.codec import register
from .goodput import BatchSplit, ExchangeCosts, Residual, SiteCosts, StepModel, combined

_EXPONENTS = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)
_USUAL_EXPONENT = 1.5  # before steps of several batches tell
_WORTH = 0.9  # another exponent has to leave less than this fraction of the error
_PRIOR = (0.01, 0.01, 0.03)  # weights against deviations of the time of micro-batches, of own rows, and of all rows
_AGED = 0.75  # weight of a period for each later one
_MANY = 16  # steps of a period that count 1
_ROUNDS = 4  # of reweighting


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


def nonnegative_fit(
    features: np.ndarray, targets: np.ndarray, weights: np.ndarray, prior: np.ndarray, strength: np.ndarray
) -> np.ndarray:
    """Fit coefficients of at least 0 to the logarithms of targets.

    Minimizes the weighted sum of (p - y)^2 / (p y) for targets y and predictions p, which is about the square of
    log(p / y), plus the weighted squares of deviations from a prior, each relative to the predicted times.

    Args:
        features: shape (measurements, features).
        targets: positive numbers, shape (measurements,).
        weights: shape (measurements,).
        prior: coefficients that are assumed before, shape (features,).
        strength: positive weights of the deviations from the prior, shape (features,).

    Returns:
        The coefficients.
    """
    predicted = targets
    found = prior
    for _ in range(_ROUNDS):
        scale = np.sqrt(weights / (targets * predicted))
        spread = np.sqrt(strength * np.square(features * scale[:, None]).sum(0) / weights.sum())
        rows = np.concatenate([features * scale[:, None], np.diag(spread)])
        wanted = np.concatenate([targets * scale, spread * prior])
        found = _nonnegative(rows, wanted)
        predicted = np.maximum(features @ found, 0.01 * targets)
    return found


def _nonnegative(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the least squares solution with coefficients of at least 0, by all subsets of the few features."""
    best, least = np.zeros(rows.shape[1]), float(wanted @ wanted)
    for count in range(1, rows.shape[1] + 1):
        for chosen in itertools.combinations(range(rows.shape[1]), count):
            found, *_ = np.linalg.lstsq(rows[:, chosen], wanted, rcond=None)
            error = float(np.square(rows[:, chosen] @ found - wanted).sum())
            if found.min() >= 0.0 and error < least:
                best, least = np.zeros(rows.shape[1]), error
                best[list(chosen)] = found
    return best


def _features(rank: int, periods: Sequence[Period]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the features of a site's times of computing, these times, and the weights of the periods."""
    splits = [period.split for period in periods]
    features = np.array([(each.micro_batches, each.sizes[rank], each.batch) for each in splits], dtype=float)
    own = [period.sites[rank] for period in periods]
    ages = np.arange(len(periods) - 1, -1, -1)
    weights = np.array([min(each.count, _MANY) / _MANY for each in own]) * _AGED**ages
    return features, np.maximum([each.compute for each in own], 1e-9), weights


def site_prior(periods: Sequence[Period]) -> tuple[np.ndarray, np.ndarray]:
    """Fit the proportions of the costs that all sites have in common, and the speed of each.

    While all sites have had the same batch only, all of the time counts as that of their own samples. The times of all
    sites together show more than those of one do: where shares differ, sites with many samples and with few.

    Args:
        periods: the measured periods, from the oldest on.

    Returns:
        Seconds of a micro-batch, of a sample of the site, and of a sample of all sites, shape (3,), at a site of mean
        speed; and for each site its time as a multiple of that, shape (sites,).
    """
    sites = [_features(rank, periods) for rank in range(len(periods[0].sites))]
    per_row = [float(np.median(times / features[:, 1])) for features, times, _ in sites]
    shape = np.array([0.0, math.exp(float(np.mean(np.log(per_row)))), 0.0])
    assumed = shape
    factors = np.ones(len(sites))
    for _ in range(_ROUNDS):
        for rank, (features, times, weights) in enumerate(sites):
            ratios = np.log(times / np.maximum(features @ shape, 1e-12))
            factors[rank] = math.exp(float(np.average(ratios, weights=weights)))
        every = [np.concatenate(parts) for parts in zip(*sites, strict=True)]
        slow = np.repeat(factors, len(periods))
        shape = nonnegative_fit(every[0], every[1] / slow, every[2], assumed, np.array(_PRIOR))
    return shape, factors


def fit_site(rank: int, periods: Sequence[Period], payload: tuple[float, float], prior: np.ndarray) -> SiteCosts:
    """Fit the costs of one site, such that those of the last period are what was measured.

    Args:
        rank: rank of the site.
        periods: the measured periods, at least one, from the oldest on.
        payload: bytes that it sends in a step, whatever its batch, and for each of its samples.
        prior: seconds of a micro-batch, of a sample of the site, and of a sample of all sites that are assumed before.
    """
    features, times, weights = _features(rank, periods)
    found = nonnegative_fit(features, times, weights, prior, np.array(_PRIOR))
    fixed, per_row, per_global_row = map(float, found * times[-1] / max(float(features[-1] @ found), 1e-12))
    return SiteCosts(fixed, per_row, per_global_row, *payload)


def fit_link(periods: Sequence[Period]) -> ExchangeCosts:
    """Fit the costs of the exchange.

    With measurements of one number of bytes alone, half of the time counts as latency.

    Args:
        periods: the measured periods, at least one, from the oldest on.
    """
    seconds = np.array([max(each.seconds for each in period.sites) for period in periods])
    compute = np.array([max(each.compute for each in period.sites) for period in periods])
    compute = np.minimum(compute, seconds)
    micro = np.array([period.split.micro_batches for period in periods])
    nbytes = np.array([max(each.nbytes for each in period.sites) for period in periods])
    weights = np.array([min(_MANY, *(each.count for each in period.sites)) / _MANY for period in periods])
    weights *= _AGED ** np.arange(len(periods) - 1, -1, -1)
    best, least = ExchangeCosts(0.0, 0.0, 1.0), np.inf
    several = len({*nbytes}) > 1 and nbytes.max() > 1.02 * nbytes.min()
    exponents = _EXPONENTS if len(periods) > 1 else (_USUAL_EXPONENT,)
    for exponent in sorted(exponents, key=lambda each: abs(each - _USUAL_EXPONENT)):
        last = compute / micro
        whole = seconds - compute + last
        exchange = np.maximum(whole**exponent - last**exponent, 0.0) ** (1 / exponent)
        middle = float(np.median(exchange))
        found = np.array([middle / 2, middle / 2 / max(1.0, float(nbytes.max()))])
        if several:
            features = np.stack([np.ones_like(nbytes), nbytes], 1)
            targets = np.maximum(exchange, 1e-3 * seconds)
            found = nonnegative_fit(features, targets, weights, found, np.array(_PRIOR[:2]))
        costs = ExchangeCosts(float(found[0]), float(found[1]), exponent)
        predicted = [combined(each, costs.exchange(size), exponent) for each, size in zip(last, nbytes, strict=True)]
        error = float((weights * np.square((np.array(predicted) - whole) / seconds)).sum())
        if error < _WORTH * least - 1e-12:
            best, least = costs, error
    return best


def fit(periods: Sequence[Period], payloads: Sequence[tuple[float, float]]) -> StepModel:
    """Fit the model of the time of a step.

    Args:
        periods: the measured periods, at least one, from the oldest on; the last one is that of the present split.
        payloads: for each site, the bytes that it sends in a step, whatever its batch, and for each of its samples.
    """
    shape, factors = site_prior(periods)
    sites = tuple(fit_site(rank, periods, each, shape * factors[rank]) for rank, each in enumerate(payloads))
    model = StepModel(sites, fit_link(periods))
    residuals = []
    for age, period in enumerate(reversed(periods)):
        seconds = max(each.seconds for each in period.sites)
        error = math.log(max(seconds, 1e-9) / max(model.seconds(period.split), 1e-9))
        residuals.append(Residual(period.split, error, _AGED**age))
    return dataclasses.replace(model, residuals=tuple(residuals))
