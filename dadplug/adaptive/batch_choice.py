"""Choice of the batch, of each site's share and of micro-batches by the predicted goodput: pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ..exchange.codec import register
from .goodput import BatchSplit, StepModel, divide, efficiency, goodput

MIN_GAIN = 1.05  # predicted goodput of a new split, as a multiple of that of the present one
_GROWTH = 2.0  # times the largest batch that has been measured
_RATIO = 1.1  # between two batches that are compared
_LESS, _MORE = 2.0, 4.0  # times the fewest and the most samples that a site has been measured with
_SHARES = 4  # that are compared with those of equal times of computing
_MICRO_BATCHES = 16


@register
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
        least, most = (sum(bound[side] for bound in self.bounds) for side in (0, 1))
        if least > self.max_batch:
            raise ValueError(
                f"local_bsz_bounds of {len(self.bounds)} sites ask for at least {least} samples in a step, and "
                f"max_batch_size is {self.max_batch}"
            )
        if most < self.base_batch and not self.accumulate:
            raise ValueError(
                f"local_bsz_bounds of {len(self.bounds)} sites allow at most {most} samples in a step, and batch_size "
                f"is {self.base_batch}: pass larger bounds, or gradient_accumulation=True"
            )

    @property
    def range(self) -> tuple[int, int]:
        """Smallest and largest batch of all sites."""
        least, most = (sum(bound[side] for bound in self.bounds) for side in (0, 1))
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
    sites = len(limits.bounds)
    batch, micro = _fitting(batch, 1, limits)
    weights = limits.weights or (1.0,) * sites
    return _divided(batch, micro, limits, [0.0] * sites, [1 / max(each, 1e-9) for each in weights])


def _fits(batch: int, micro: int, limits: BatchLimits) -> bool:
    least, most = (sum(bound[side] for bound in limits.bounds) for side in (0, 1))
    return micro * least <= batch <= micro * most


def _fitting(batch: int, micro: int, limits: BatchLimits) -> tuple[int, int]:
    """Return a batch near to the given one, and a number of micro-batches of at least the given one, that fit."""
    least, most = (sum(bound[side] for bound in limits.bounds) for side in (0, 1))
    micro = max(micro, math.ceil(batch / most))
    batch = max(batch, micro * least)
    if batch > limits.max_batch and micro > 1:
        micro -= 1
        batch = micro * most
    return batch, micro


def _divided(
    batch: int, micro: int, limits: BatchLimits, offsets: Sequence[float], per_row: Sequence[float]
) -> BatchSplit:
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
    if limits.weights is not None:
        per_row = [1 / max(each, 1e-9) for each in limits.weights]
        return _divided(batch, micro, limits, [0.0] * len(per_row), per_row)
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
