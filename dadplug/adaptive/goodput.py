"""Goodput: a model of the time of a step and of what its samples are worth, its fit, and the choice of the batch by it.

Goodput = B / T(B) * (noise scale + B0) / (noise scale + B), in samples of the base batch B0 per second, after Pollux
(Qiao et al., 2021). Unlike there, batches differ between sites, and the bytes of a step depend on them.

In the fit, errors are those of the logarithm of a time, so that neither long nor short steps count more. A prior
decides what few measurements leave open: all sites' costs have the same proportions, see `site_prior`. All functions
are pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..exchange.codec import register
from ..support.refusals import refuse

_REACH = 0.5  # binary logarithm of the ratio of batches within which a deviation from the model counts
_SHRINK = 0.3  # weight of no deviation
_EXPONENTS = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)
_USUAL_EXPONENT = 1.5  # before steps of several batches tell
_WORTH = 0.9  # another exponent has to leave less than this fraction of the error
_PRIOR = (0.01, 0.01, 0.03)  # weights against deviations of the time of micro-batches, of own rows, and of all rows
_AGED = 0.75  # weight of a period for each later one
_MANY = 16  # steps of a period that count 1
_ROUNDS = 4  # of reweighting
MIN_GAIN = 1.05  # predicted goodput of a new split, as a multiple of that of the present one
_GROWTH = 2.0  # times the largest batch that has been measured
_RATIO = 1.1  # between two batches that are compared
_LESS, _MORE = 2.0, 4.0  # times the fewest and the most samples that a site has been measured with
_SHARES = 4  # that are compared with those of equal times of computing
_MICRO_BATCHES = 16


# The model


@register
@dataclass(frozen=True)
class BatchSplit:
    """Split of a step's batch over sites and over micro-batches.

    Attributes:
        sizes: samples of each site in a step, by rank.
        micro_batches: number of micro-batches of a step at each site.
    """

    sizes: tuple[int, ...]
    micro_batches: int = 1

    @property
    def batch(self) -> int:
        """Samples of all sites in a step."""
        return sum(self.sizes)


@dataclass(frozen=True)
class SiteCosts:
    """Costs of a step at one site.

    Attributes:
        fixed: seconds of a micro-batch, whatever its size.
        per_row: seconds for each sample of the site.
        per_global_row: seconds for each sample of all sites, such as for the sum over their factors.
        payload: bytes that the site sends in a step, whatever its batch.
        payload_per_row: bytes that it sends for each of its samples.
    """

    fixed: float
    per_row: float
    per_global_row: float = 0.0
    payload: float = 0.0
    payload_per_row: float = 0.0

    def compute(self, rows: int, split: BatchSplit) -> float:
        """Predict the seconds of a step without waiting for other sites.

        Args:
            rows: samples of the site.
            split: the whole step's.
        """
        fixed = split.micro_batches * self.fixed
        return fixed + self.per_row * rows + self.per_global_row * split.batch

    def sent(self, rows: int) -> float:
        """Predict the bytes that the site sends in a step of so many samples of its own."""
        return self.payload + self.payload_per_row * rows


@dataclass(frozen=True)
class ExchangeCosts:
    """Costs of the exchange between sites.

    Attributes:
        latency: seconds of an exchange, whatever its bytes.
        per_byte: seconds for each byte of the site that sends most.
        overlap: exponent by which times of computing and exchange are combined: 1 if one follows the other, more the
            more of the exchange takes place during backward.
    """

    latency: float
    per_byte: float
    overlap: float = 1.0

    def exchange(self, nbytes: float) -> float:
        """Predict the seconds of an exchange.

        Args:
            nbytes: bytes of the site that sends most.
        """
        return self.latency + self.per_byte * nbytes


@dataclass(frozen=True)
class Residual:
    """Deviation of a measured step from the model.

    Attributes:
        split: the split that has been measured.
        error: logarithm of the measured seconds divided by the predicted ones.
        weight: weight of the measurement, at most 1.
    """

    split: BatchSplit
    error: float
    weight: float

    def near(self, split: BatchSplit) -> float:
        """Return the weight of the measurement for another split, the less the more the batches of sites differ."""
        pairs = list(zip(self.split.sizes, split.sizes, strict=True))
        squares = [math.log2(max(one, 1) / max(other, 1)) ** 2 for one, other in pairs]
        squares.append(math.log2(self.split.micro_batches / split.micro_batches) ** 2)
        return self.weight * math.exp(-max(squares) / _REACH**2)


@dataclass(frozen=True)
class StepModel:
    """Model of the time of a step.

    Attributes:
        sites: costs of each site, by rank.
        link: costs of the exchange.
        residuals: deviations of measured steps; predictions for splits near to these are corrected by them.
    """

    sites: tuple[SiteCosts, ...]
    link: ExchangeCosts
    residuals: tuple[Residual, ...] = ()

    def seconds(self, split: BatchSplit) -> float:
        """Predict the seconds of a step.

        All sites wait for the slowest. Only the last micro-batch of a step overlaps with the exchange.

        Args:
            split: samples of each site.
        """
        pairs = list(zip(self.sites, split.sizes, strict=True))
        compute = max(site.compute(rows, split) for site, rows in pairs)
        exchange = self.link.exchange(max(site.sent(rows) for site, rows in pairs))
        last = compute / split.micro_batches
        seconds = compute - last + combined(last, exchange, self.link.overlap)
        near = [(each.near(split), each.error) for each in self.residuals]
        return seconds * math.exp(sum(weight * error for weight, error in near) / (_SHRINK + sum(w for w, _ in near)))


def combined(compute: float, exchange: float, overlap: float) -> float:
    """Return the seconds of computing and exchange together: (Tc^g + Tn^g)^(1/g).

    Args:
        compute: seconds of computing, Tc.
        exchange: seconds of the exchange, Tn.
        overlap: the exponent g, at least 1.
    """
    largest = max(compute, exchange)
    if largest <= 0.0:
        return 0.0
    return largest * math.pow((compute / largest) ** overlap + (exchange / largest) ** overlap, 1.0 / overlap)


def efficiency(batch: float, noise_scale: float, base_batch: float) -> float:
    """Return what a sample of a batch is worth, as a fraction of one of the base batch.

    Args:
        batch: samples of all sites in a step.
        noise_scale: gradient noise scale, in samples; infinite if samples of any batch are worth the same.
        base_batch: batch that counts 1.
    """
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + base_batch) / (noise_scale + batch)


def goodput(model: StepModel, split: BatchSplit, noise_scale: float, base_batch: float) -> float:
    """Predict the goodput, in samples of the base batch per second.

    Args:
        model: model of the time of a step.
        split: samples of each site in a step.
        noise_scale: gradient noise scale, in samples.
        base_batch: batch that counts 1.
    """
    batch = split.batch
    return batch / max(model.seconds(split), 1e-12) * efficiency(batch, noise_scale, base_batch)


def divide(
    batch: int, offsets: Sequence[float], per_row: Sequence[float], bounds: Sequence[tuple[int, int]]
) -> list[int]:
    """Divide a batch over sites so that the slowest ends as early as possible: more for a faster site.

    Args:
        batch: samples of all sites; no less than all lower bounds together, and no more than all upper ones.
        offsets: seconds of each site before its first sample.
        per_row: seconds of each site for each sample.
        bounds: least and most samples of each site.

    Returns:
        The samples of each site.
    """
    least = max(max(per_row) * 1e-9, 1e-15)  # a site whose samples cost nothing takes them all at once
    costs = [max(each, least) for each in per_row]

    def rows(seconds: float) -> list[float]:
        found = [(seconds - offset) / cost for offset, cost in zip(offsets, costs, strict=True)]
        return [min(max(each, low), high) for each, (low, high) in zip(found, bounds, strict=True)]

    sites = list(zip(offsets, costs, bounds, strict=True))
    ends = sorted(offset + cost * bound for offset, cost, pair in sites for bound in pair)
    end = float(np.interp(batch, [sum(rows(each)) for each in ends], ends))  # samples are linear between these
    sizes = [max(low, math.floor(each + 1e-6)) for each, (low, _) in zip(rows(end), bounds, strict=True)]
    while (left := batch - sum(sizes)) != 0:
        sign = 1 if left > 0 else -1
        later = {
            site: offsets[site] + costs[site] * (sizes[site] + max(sign, 0))
            for site, (low, high) in enumerate(bounds)
            if low <= sizes[site] + sign <= high
        }
        sizes[min(later, key=lambda site: sign * later[site])] += sign
    return sizes


# The fit


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
    lengths = np.linalg.norm(rows, axis=0)
    scaled = rows / lengths
    products, targets = scaled.T @ scaled, scaled.T @ wanted
    best, most = np.zeros(len(lengths)), 0.0
    for count in range(len(lengths), 0, -1):
        for chosen in map(list, itertools.combinations(range(len(lengths)), count)):
            found = np.linalg.solve(products[np.ix_(chosen, chosen)], targets[chosen])
            explained = float(found @ targets[chosen])  # of the squares of what is wanted
            if found.min() >= 0.0 and explained > most:
                best, most = np.zeros(len(lengths)), explained
                best[chosen] = found
        if count == len(lengths) and most > 0.0:
            break  # nothing is better than all of them
    coefficients: np.ndarray = best / lengths
    return coefficients


def _features(rank: int, periods: Sequence[Period]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the features of a site's times of computing, these times, and the weights of the periods."""
    splits = [period.split for period in periods]
    features = np.array([(each.micro_batches, each.sizes[rank], each.batch) for each in splits], dtype=float)
    own = [period.sites[rank] for period in periods]
    weights = _weights([each.count for each in own])
    return features, np.maximum([each.compute for each in own], 1e-9), weights


def _weights(counts: Sequence[int]) -> np.ndarray:
    """Return the weights of periods, from the oldest on, by their numbers of measured steps."""
    return np.minimum(counts, _MANY) / _MANY * _AGED ** np.arange(len(counts) - 1, -1, -1)


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
    weights = _weights([min(each.count for each in period.sites) for period in periods])
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
    return replace(model, residuals=tuple(residuals))


# The choice


@dataclass(frozen=True)
class BatchLimits:
    """Limits within which the batch is chosen.

    Attributes:
        base_batch: batch that training begins with, and the smallest.
        max_batch: largest batch of all sites together.
        bounds: least and most samples of each site in a micro-batch, by rank.
        accumulate: whether a step may have several micro-batches.
        weights: relative batches of the sites, where these are given by the lengths of their data sets; None where each
            may take any part of a common one.
    """

    base_batch: int
    max_batch: int
    bounds: tuple[tuple[int, int], ...]
    accumulate: bool = False
    weights: tuple[float, ...] | None = None

    def check(self) -> None:
        """Check that some batch is within all limits.

        Raises:
            ValueError: if none is.
        """
        least, most = self.of_micro_batch
        refuse(
            (
                least > self.max_batch,
                f"local_bsz_bounds of {len(self.bounds)} sites ask for at least {least} samples in a step, and "
                f"max_batch_size is {self.max_batch}",
            ),
            (
                most < self.base_batch and not self.accumulate,
                f"local_bsz_bounds of {len(self.bounds)} sites allow at most {most} samples in a step, and batch_size "
                f"is {self.base_batch}: pass larger bounds, or gradient_accumulation=True",
            ),
        )

    @property
    def of_micro_batch(self) -> tuple[int, int]:
        """Fewest and most samples of all sites in a micro-batch."""
        return sum(low for low, _ in self.bounds), sum(high for _, high in self.bounds)

    @property
    def range(self) -> tuple[int, int]:
        """Smallest and largest batch of all sites."""
        least, most = self.of_micro_batch
        largest = min(self.max_batch, most * (_MICRO_BATCHES if self.accumulate else 1))
        return min(max(self.base_batch, least), largest), largest

    def allow(self, split: BatchSplit) -> bool:
        """Return whether a split is within the limits."""
        least, most = self.range
        pairs, micro = zip(split.sizes, self.bounds, strict=False), split.micro_batches
        within = all(micro * low <= rows <= micro * high for rows, (low, high) in pairs)
        return len(split.sizes) == len(self.bounds) and least <= split.batch <= most and within


def initial_split(limits: BatchLimits, batch: int | None = None) -> BatchSplit:
    """Return the split that training begins with: a batch in equal parts, as far as bounds allow.

    Args:
        limits: the limits.
        batch: the batch, that of the steps before a restart; the base batch where None.
    """
    least, most = limits.range
    batch = least if batch is None else min(max(batch, least), most)
    batch, micro = _fitting(batch, 1, limits)
    return _divided(batch, micro, limits, [0.0] * len(limits.bounds), [1.0] * len(limits.bounds))


def _fits(batch: int, micro: int, limits: BatchLimits) -> bool:
    least, most = limits.of_micro_batch
    return micro * least <= batch <= micro * most


def _fitting(batch: int, micro: int, limits: BatchLimits) -> tuple[int, int]:
    """Return a batch near to the given one, and a number of micro-batches of at least the given one, that fit."""
    least, most = limits.of_micro_batch
    micro = max(micro, math.ceil(batch / most))
    batch = max(batch, micro * least)
    if batch > limits.max_batch and micro > 1:
        micro -= 1
        batch = micro * most
    return batch, micro


def _divided(
    batch: int, micro: int, limits: BatchLimits, offsets: Sequence[float], per_row: Sequence[float]
) -> BatchSplit:
    """Return the split whose slowest site ends first; where the limits have weights, that of these."""
    if limits.weights is not None:
        offsets, per_row = [0.0] * len(limits.weights), [1 / max(each, 1e-9) for each in limits.weights]
    bounds = [(micro * low, micro * high) for low, high in limits.bounds]
    return BatchSplit(tuple(divide(batch, offsets, per_row, bounds)), micro)


def best_split(batch: int, micro: int, model: StepModel, limits: BatchLimits) -> BatchSplit:
    """Return the fastest split of a batch.

    Where bytes grow with samples, the site that sends most decides about the time of the exchange. Then shares between
    those of equal times of computing and equal ones are compared.

    Args:
        batch: samples of all sites.
        micro: number of micro-batches.
        model: model of the time of a step.
        limits: the limits, within which the batch is.
    """
    balanced = _balanced_split(batch, micro, model, limits)
    grows = model.link.per_byte > 0.0 and any(site.payload_per_row > 0.0 for site in model.sites)
    if not grows or limits.weights is not None:
        return balanced
    equal, most = math.ceil(batch / len(balanced.sizes)), max(balanced.sizes)
    splits = [balanced]
    for part in range(_SHARES) if most > equal else ():
        highest = math.ceil((equal + (most - equal) * part / _SHARES) / micro)
        bounds = tuple((low, max(low, min(high, highest))) for low, high in limits.bounds)
        if _fits(batch, micro, capped := replace(limits, bounds=bounds)):
            splits.append(_balanced_split(batch, micro, model, capped))
    return min(splits, key=model.seconds)


def _balanced_split(batch: int, micro: int, model: StepModel, limits: BatchLimits) -> BatchSplit:
    """Return the split of a batch for which the slowest site computes as briefly as possible."""
    offsets = [micro * site.fixed + site.per_global_row * batch for site in model.sites]
    return _divided(batch, micro, limits, offsets, [site.per_row for site in model.sites])


def batches(limits: BatchLimits, present: int, measured: int) -> list[int]:
    """Return the batches that are compared.

    Args:
        limits: the limits.
        present: the present batch.
        measured: the largest batch that has been measured.
    """
    least, most = limits.range
    most = max(least, min(most, math.floor(_GROWTH * max(present, measured))))
    steps = math.floor(math.log(most / least) / math.log(_RATIO))
    found = {round(least * _RATIO**step) for step in range(steps + 1)} | {least, most}
    return sorted(found | ({present} if least <= present <= most else set()))


def measured_limits(model: StepModel, limits: BatchLimits) -> BatchLimits:
    """Return limits within which the model is to be trusted.

    No site gets less than half of the fewest samples that it has been measured with, and none more than four times the
    most, so that no share becomes small by a wrong fit alone.

    Args:
        model: model of the time of a step, with the splits that have been measured.
        limits: the limits of the program.
    """
    splits = [each.split for each in model.residuals if limits.allow(each.split)]
    if not splits or limits.weights is not None:
        return limits
    bounds = []
    for rank, (low, high) in enumerate(limits.bounds):
        rows = [split.sizes[rank] / split.micro_batches for split in splits]
        bounds.append((max(low, math.floor(min(rows) / _LESS)), min(high, math.ceil(max(rows) * _MORE))))
    return replace(limits, bounds=tuple(bounds))


def choose(
    model: StepModel, present: BatchSplit, measured: Collection[int], limits: BatchLimits, noise_scale: float
) -> tuple[BatchSplit, float]:
    """Choose the split of the next steps: the one of most goodput, if the gain is worth a change.

    While one batch alone has been measured, the time of a larger one is not known: it is tried if it would be worth it
    at the same time for a step.

    Args:
        model: model of the time of a step.
        present: the present split.
        measured: the batches that have been measured; those of more than twice as many samples are not tried.
        limits: the limits.
        noise_scale: gradient noise scale, in samples; NaN if it is not known, and then the batch stays.

    Returns:
        The split, and its predicted goodput in samples of the base batch per second.
    """
    limits = measured_limits(model, limits)
    known = not math.isnan(noise_scale)
    scale = noise_scale if known else math.inf
    candidates = batches(limits, present.batch, max(measured)) if known else [present.batch]
    best, most = present, goodput(model, present, scale, limits.base_batch)
    if known and len({*measured}) == 1 and (larger := candidates[-1]) > present.batch:
        larger, micro = _fitting(larger, present.micro_batches, limits)
        worth = larger / present.batch * efficiency(larger, scale, present.batch)
        if worth > MIN_GAIN:
            return best_split(larger, micro, model, limits), most
    needed = MIN_GAIN * most
    splits = [each.split for each in model.residuals if each.split.batch in candidates and limits.allow(each.split)]
    for batch in candidates:
        for micro in range(1, (_MICRO_BATCHES if limits.accumulate else 1) + 1):
            if _fits(batch, micro, limits):
                splits.append(best_split(batch, micro, model, limits))
    for split in splits:
        value = goodput(model, split, scale, limits.base_batch)
        if value > max(needed, most):
            best, most = split, value
    return best, most
