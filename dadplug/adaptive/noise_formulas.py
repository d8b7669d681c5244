"""Gradient noise from the norms of gradients of parts of a batch, and the gain of AdaScale: pure functions.

All are of the gradient G of the mean loss. A batch has parts, of which each has a gradient of its own: the batches of
the sites, or micro-batches of them. Part g has b_g samples and the weight u_g in the mean; the weights sum to 1.
Sums are rounded once, so that the numbers do not depend on the processor.

Sources: arXiv:1812.06162 for the noise scale, arXiv:2007.05105 for the gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class NoiseEstimate(NamedTuple):
    """Estimate of the noise of a gradient; NaN where there is none.

    Attributes:
        variance: trace of the covariance of the gradients of single samples, tr(Sigma).
        squared_norm: square of the norm of the gradient's expectation, ``|G|^2``; unbiased, so it may be negative.
    """

    variance: float
    squared_norm: float

    @property
    def scale(self) -> float:
        """The simple noise scale ``tr(Sigma) / |G|^2``, in samples; infinite where `squared_norm` is not positive."""
        if math.isnan(self.variance) or math.isnan(self.squared_norm):
            return math.nan
        return self.variance / self.squared_norm if self.squared_norm > 0.0 else math.inf


NO_ESTIMATE = NoiseEstimate(math.nan, math.nan)


class Part(NamedTuple):
    """Part of a batch, with norms of its gradient.

    Attributes:
        samples: number of samples b_g.
        weight: weight u_g in the mean.
        norm: squared norm of the mean of its samples' gradients.
        squares: sum over samples of the squared norms of their gradients; NaN where it is not known.
    """

    samples: float
    weight: float
    norm: float
    squares: float


def within_parts(parts: Sequence[Part], norm: float) -> NoiseEstimate:
    """Estimate from the deviations of samples from the mean of their part; also where parts have different means.

    Args:
        parts: the parts.
        norm: squared norm of the mean gradient of the batch.

    Returns:
        The estimate; NaN if no part has two samples, or squares are not known.
    """
    freedom = math.fsum(part.samples - 1.0 for part in parts)
    if freedom <= 0.0:
        return NO_ESTIMATE
    deviations = [part.squares - part.samples * part.norm for part in parts]
    return _estimate(math.fsum(deviations) / freedom, parts, norm)


def between_parts(parts: Sequence[Part], norm: float) -> NoiseEstimate:
    """Estimate from the deviations of the parts from the mean; too large where they have different distributions.

    Args:
        parts: the parts.
        norm: squared norm of the mean gradient of the batch.

    Returns:
        The estimate; NaN with fewer than two parts.
    """
    if len(parts) < 2:
        return NO_ESTIMATE
    deviation = math.fsum([*(part.weight * part.norm for part in parts), -norm])
    share = math.fsum(part.weight * (1.0 - part.weight) / part.samples for part in parts)
    return _estimate(deviation / share, parts, norm)


def _estimate(variance: float, parts: Sequence[Part], norm: float) -> NoiseEstimate:
    of_mean = variance * math.fsum(part.weight * part.weight / part.samples for part in parts)
    return NoiseEstimate(variance, norm - of_mean)


def norm_of_mean(parts: Sequence[Part], products: Sequence[Sequence[float]]) -> float:
    """Compute the squared norm of the mean gradient from inner products between parts.

    Args:
        parts: the parts.
        products: inner products of their gradients; those of a part with itself are not used.
    """
    terms = [part.weight * part.weight * part.norm for part in parts]
    for first, one in enumerate(parts):
        for second in range(first):
            terms.append(2.0 * one.weight * parts[second].weight * products[first][second])
    return math.fsum(terms)


def gain(estimate: NoiseEstimate, batch: float, base_batch: float) -> float:
    """Compute AdaScale's gain r, the steps with the base batch that one step with a batch is worth.

    ``r = (s + m) / (s / k + m)`` with the variance ``s = tr(Sigma) / base_batch`` of a gradient of the base batch,
    ``m = |G|^2`` and ``k = batch / base_batch``. It lies between 1 and k.

    Args:
        estimate: variance and squared norm; negative ones count as zero.
        batch: samples of the step.
        base_batch: samples of a step for which the learning rate has been chosen.

    Returns:
        The gain; 1.0 without an estimate.
    """
    if math.isnan(estimate.variance) or math.isnan(estimate.squared_norm):
        return 1.0
    variance, mean = max(estimate.variance, 0.0), max(estimate.squared_norm, 0.0)
    of_step = variance / batch + mean
    return (variance / base_batch + mean) / of_step if of_step > 0.0 else 1.0
