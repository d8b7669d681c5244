"""Goodput: model of the time of a step and of what its samples are worth, as functions of the batch: pure functions.

Goodput = B / T(B) * (noise scale + B0) / (noise scale + B), in samples of the base batch B0 per second, after Pollux
(Qiao et al., 2021). Unlike there, batches differ between sites, and the bytes of a step depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..exchange.codec import register

_REACH = 0.5  # binary logarithm of the ratio of batches within which a deviation from the model counts
_SHRINK = 0.3  # weight of no deviation


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


@register
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


@register
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


@register
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


@register
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

    ratios = sum(offset / cost for offset, cost in zip(offsets, costs, strict=True))
    late = (batch + ratios) / sum(1 / cost for cost in costs)  # where no bound counts
    if abs(sum(rows(late)) - batch) > 1e-6 * batch:
        early = min(offsets)
        late = max(offset + cost * high for offset, cost, (_, high) in zip(offsets, costs, bounds, strict=True))
        for _ in range(50):
            middle = (early + late) / 2
            early, late = (middle, late) if sum(rows(middle)) < batch else (early, middle)
    sizes = [max(low, math.floor(each + 1e-6)) for each, (low, _) in zip(rows(late), bounds, strict=True)]
    while (left := batch - sum(sizes)) != 0:
        sign = 1 if left > 0 else -1
        ends = {
            site: offsets[site] + costs[site] * (sizes[site] + max(sign, 0))
            for site, (low, high) in enumerate(bounds)
            if low <= sizes[site] + sign <= high
        }
        sizes[min(ends, key=lambda site: sign * ends[site])] += sign
    return sizes
