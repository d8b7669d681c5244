"""Order of the samples of a pass, and their division into steps and over sites: pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


def order_of(length: int, shuffle: bool, *key: int) -> Tensor:
    """Return the order in which a pass uses the samples of a data set; it does not depend on the number of sites.

    Args:
        length: number of samples N.
        shuffle: whether to shuffle; otherwise the order is that of the data set.
        key: numbers that name the pass: seed, epoch, number of the pass in the epoch.

    Returns:
        Indices of shape (N,).
    """
    if not shuffle:
        return torch.arange(length)
    digest = hashlib.sha256(repr(key).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randperm(length, generator=generator)


@dataclass(frozen=True)
class Schedule:
    """Division of the rest of a pass into steps, and of each step's samples over the sites that share the data set.

    Every sample is in one batch of one site. In a step each site has a batch of its own size. The samples that are left
    for the last step are divided over the sites; if there are fewer of them than sites, they are divided together with
    those of the step before, so that some batches have one sample more. Only if there is no step before, some sites
    have no batch.

    Attributes:
        length: number of samples N of the data set.
        used: number of samples of the pass that have been used before.
        sizes: batch size of each site.
        drop_last: whether to leave out what is left for the last step.
    """

    length: int
    used: int
    sizes: tuple[int, ...]
    drop_last: bool = False

    @property
    def _parts(self) -> tuple[int, int]:
        """Number of steps with a full batch at each site, and number of samples of the last step."""
        total = sum(self.sizes)
        full, left = divmod(self.length - self.used, total)
        if self.drop_last:
            return full, 0
        if 0 < left < len(self.sizes) and full:
            return full - 1, left + total
        return full, left

    def _bounds(self, step: int) -> list[int]:
        """Return where the batches of a step begin and end, counted from the first sample of the step."""
        full, left = self._parts
        sums = [0, *accumulate(self.sizes)]
        if step < full:
            return sums
        least = min(1, left // len(self.sizes))  # samples for each site, before the rest is divided by batch sizes
        if not least:
            return [min(place, left) for place in range(len(sums))]
        rest = left - len(self.sizes)
        return [place + rest * each // sums[-1] for place, each in enumerate(sums)]

    def steps(self, member: int) -> int:
        """Return the number of batches of a site.

        Args:
            member: index of the site in `sizes`.
        """
        full, left = self._parts
        bounds = self._bounds(full)
        return full + (left > 0 and bounds[member + 1] > bounds[member])

    def is_full(self, step: int) -> bool:
        """Return whether each site has as many samples in a step as `sizes` says."""
        return step < self._parts[0]

    def batch(self, step: int, member: int) -> slice:
        """Return the place of a site's batch in the order of the pass.

        Args:
            step: number of the step, from 0.
            member: index of the site in `sizes`.
        """
        bounds, start = self._bounds(step), self.used_after(step)
        return slice(start + bounds[member], start + bounds[member + 1])

    def used_after(self, steps: int) -> int:
        """Return how many samples of the pass have been used after some steps, by all sites together."""
        full, left = self._parts
        return self.used + min(steps, full) * sum(self.sizes) + (left if steps > full else 0)


def share_of(length: int, used: int, rank: int, num_sites: int) -> slice:
    """Return the places of one site's samples in the order of a pass, if sites take turns.

    After batches of one size at all sites the samples that have been used are the first ones of the order, so that the
    rest can be divided over another number of sites.

    Args:
        length: number of samples of the data set.
        used: number of samples that have been used.
        rank: number of the site.
        num_sites: number of sites.
    """
    return slice(used + rank, length, num_sites)


def fewest_steps(schedules: Sequence[tuple[Schedule, int]]) -> int:
    """Return the number of steps in which all sites have a batch.

    Args:
        schedules: for each site, the schedule and its index in it.
    """
    return min(schedule.steps(member) for schedule, member in schedules)
