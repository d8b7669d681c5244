"""Division of a data set over the sites: the order of its samples, the schedule, a sampler, and the elastic loader."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from ..errors import MismatchError
from ..exchange.fields import checked
from ..support.refusals import refuse
from ..support.signature import whole_number
from .progress import Pass, ProgramProgress, progress

_OWN = ("sampler", "batch_sampler")  # arguments of DataLoader that this loader gives itself


# The order of the samples


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
    return torch.randperm(length, generator=torch.Generator().manual_seed(_seed_of(key, 7)))


def _seed_of(key: tuple[int, ...], nbytes: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:nbytes], "little")


def check_sampler(sampler: Any) -> None:
    """Check that a sampler gives an order that can be drawn again.

    Args:
        sampler: the sampler.

    Raises:
        ValueError: if it cannot.
    """
    refuse(
        (
            isinstance(sampler, DistributedSampler),
            "an AdaptiveDataLoader divides the data over the sites: leave out the DistributedSampler",
        ),
        (
            not hasattr(sampler, "__len__"),
            "the sampler needs a length, so that its samples can be divided over the sites",
        ),
        (
            getattr(sampler, "generator", None) is not None,
            "a sampler with a generator of its own gives another order after a restart: leave out the generator, and "
            "give the AdaptiveDataLoader a seed",
        ),
    )


def order_of_sampler(sampler: Any, *key: int) -> Tensor:
    """Return the indices that a sampler gives in a pass, the same whenever the pass is begun.

    Random numbers of torch, numpy and Python are drawn from a seed of the pass meanwhile.

    Args:
        sampler: the sampler; one with ``set_epoch`` is given the epoch.
        key: numbers that name the pass: seed, epoch, number of the pass in the epoch.
    """
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(key[1])
    with seeded(_seed_of(key, 4)):
        return torch.tensor(list(sampler), dtype=torch.int64)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw random numbers of torch, numpy and Python from a seed, inside a ``with`` block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would change those of GPUs for good
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


# Their division


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


class ElasticSampler(Sampler[int]):
    """Sampler for any DataLoader: each sample of the data set at one site, from a position on that the program states.

    Unlike ``torch.utils.data.DistributedSampler`` it repeats no samples to make the sites' numbers equal, and the order
    does not depend on the number of sites. Programs that count samples themselves use it; `dadplug.ElasticDataLoader`
    counts them for loops over `dadplug.remaining_epochs_until`.

    Args:
        dataset: the data set, the same at all sites.
        shuffle: whether to shuffle in every epoch.
        seed: seed of the order.
        rank: number of this site; that of the default process group if None.
        num_sites: number of sites; that of the default process group if None.

    Raises:
        ValueError: if the rank is not below the number of sites.

    Example:
        >>> sampler = dadplug.ElasticSampler(dataset)
        >>> loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        >>> sampler.set_epoch(3, used=640)  # in epoch 3, the sites have used 640 samples together
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        *,
        seed: int = 0,
        rank: int | None = None,
        num_sites: int | None = None,
    ) -> None:
        connected = dist.is_available() and dist.is_initialized()
        self._rank = rank if rank is not None else dist.get_rank() if connected else 0
        self._num_sites = num_sites if num_sites is not None else dist.get_world_size() if connected else 1
        if not 0 <= self._rank < self._num_sites:
            raise ValueError(
                f"rank must lie in 0 to {self._num_sites - 1} for {self._num_sites} sites, got {self._rank}"
            )
        self._dataset, self._shuffle, self._seed = dataset, shuffle, seed
        self._epoch = self._used = 0

    def set_epoch(self, epoch: int, used: int = 0) -> None:
        """Set the epoch, and the position at which the next pass begins.

        Args:
            epoch: number of the epoch.
            used: number of samples of the epoch that have been used, by all sites together.

        Raises:
            ValueError: if the data set has fewer samples than that.
        """
        if not 0 <= used <= len(self._dataset):
            raise ValueError(f"used must lie in 0 to {len(self._dataset)}, the length of the data set, got {used}")
        self._epoch, self._used = epoch, used

    def __iter__(self) -> Iterator[int]:
        order = order_of(len(self._dataset), self._shuffle, self._seed, self._epoch, 0)
        return iter(order[self._share].tolist())

    def __len__(self) -> int:
        return len(range(len(self._dataset))[self._share])

    @property
    def _share(self) -> slice:
        """Places of this site's samples in the order of the pass: sites take turns.

        After batches of one size at all sites the samples that have been used are the first ones of the order, so that
        the rest can be divided over another number of sites.
        """
        return slice(self._used + self._rank, len(self._dataset), self._num_sites)


# The loader


class ElasticDataLoader(DataLoader[Any]):
    """DataLoader that divides a data set over the sites, and resumes its position after a restart.

    In an epoch every sample is used once, by one site, whatever the number of sites is and however often it changes at
    restarts. The order of the samples depends on the seed and the epoch, not on the number of sites. Epochs are those
    of `dadplug.remaining_epochs_until`. Outside of such a loop, and in a pass that begins within a batch of another
    one, each pass gives all the data.

    Where every site has data of its own, `source` names them: processes that give the same name divide the data set.

    What is left for the last batches of an epoch is divided over the sites, so that all have the same number of
    batches. If fewer samples than sites are left, some batches have one sample more than `batch_size`. Sites have
    different numbers of batches only where their data are of different size, or where a data set, or the rest of one
    after a restart, has fewer samples than sites. Call ``reduction.join(optimizer.step)`` after loops for which that
    may happen.

    Args:
        dataset: the data set, with a length, the same at all processes that share it.
        batch_size: number of samples in a batch of this site; sites may have different ones.
        shuffle: whether to shuffle in every epoch.
        source: name of the data set, if sites have data sets of their own; the same after a restart. None if all sites
            have the same data set.
        seed: seed of the order.
        drop_last: whether to leave out the samples of an epoch that are too few for a full batch at every site.
        options: other arguments of `torch.utils.data.DataLoader`, but for samplers.

    Raises:
        ValueError: if the data set has no length, the batch size is not positive, or a sampler is given.

    Example:
        >>> loader = dadplug.ElasticDataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)
        >>> for epoch in dadplug.remaining_epochs_until(20):
        ...     for inputs, targets in loader:
        ...         train(inputs, targets)
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        source: str | None = None,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError("the data set needs a length, so that it can be divided over the sites")
        whole_number(1)("batch_size", batch_size)
        if given := [name for name in _OWN if options.get(name) is not None]:
            raise ValueError(f"an ElasticDataLoader has a sampler of its own: leave out {given[0]}")
        options = {name: value for name, value in options.items() if name not in _OWN}
        self._batches = _Batches(batch_size)
        self._source = "" if source is None else f"={source}"
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._passes = (-1, -1)  # epoch, and number of the last pass in it
        self._passes_outside = 0
        super().__init__(dataset, batch_sampler=self._batches, **options)

    @property
    def local_batch_size(self) -> int:
        """Number of samples in a batch of this site."""
        return self._batches.batch_size

    def __len__(self) -> int:
        """Return the number of this site's batches in an epoch, as of the last pass.

        Before the first pass it is assumed that all sites have this batch size and share the data set; with `source`,
        that no other process shares it.
        """
        batches = self._batches
        if batches.schedule is not None:
            sizes, member = batches.schedule.sizes, batches.member
        else:
            alone = self._source or not (dist.is_available() and dist.is_initialized())
            member, count = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
            sizes = self._sizes_before(count)
        return batches.count(Schedule(self._length, 0, sizes, self._drop_last), member)

    def _sizes_before(self, count: int) -> tuple[int, ...]:
        """Return the batch sizes of the sites that are assumed before the first pass."""
        return (self.local_batch_size,) * count

    def __iter__(self) -> Any:
        current = progress()
        running = current.enter(self._passes_outside)
        number = self._number(running)
        if running.over:
            current.leave(running)
            return iter(())
        self._divide(current, running, number)
        return self._give(current, running, number, super().__iter__())

    def _number(self, running: Pass) -> int:
        """Return the number of a pass in its epoch, the same in a program that was restarted."""
        if running.recorded:
            epoch, number = self._passes
            self._passes = running.epoch, number + 1 if epoch == running.epoch else 0
            return self._passes[1]
        self._passes_outside += 1
        return 0

    @property
    def _length(self) -> int:
        """Number of samples of a pass."""
        return len(self.dataset)  # type: ignore[arg-type]

    def _order(self, running: Pass, number: int) -> Tensor:
        """Return the indices of all samples in the order of a pass."""
        return order_of(self._length, self._shuffle, self._seed, running.epoch, number)

    def _divide(self, current: ProgramProgress, running: Pass, number: int) -> None:
        """Agree with the other sites on the division of the rest of the data.

        Raises:
            MismatchError: if sites that share a data set differ in it, or are not in the same pass.
            ValueError: if the data set has another length than when the checkpoint was written.
        """
        length = self._length
        used, length_before = running.used.get(self._source, [0, length])
        if length_before != length:
            raise ValueError(
                f"the data set had {length_before} samples when the checkpoint was written, and has {length} now"
            )
        running.used[self._source] = [used, length]
        order = self._order(running, number)
        same = (running.epoch, number, used, length, self._drop_last, order[:8].tolist())
        transport = current.transport
        own = transport.gather_present((self._source, self.local_batch_size, same))
        kind = tuple[str, int, tuple[int, int, int, int, bool, list[int]]]
        every = checked(own, kind, "position", transport, lambda each: [each[1] - 1, *each[2][2:4]])
        members: dict[str, list[int]] = {}
        for rank, (source, _, other) in every.items():
            members.setdefault(source, []).append(rank)
            first = members[source][0]
            if other != every[first][2]:
                raise MismatchError(
                    f"{transport.sites[first]} and {transport.sites[rank]} share a data set, and do not iterate it "
                    f"alike: epoch, pass, position, length, drop_last and first samples are {every[first][2]} and "
                    f"{other}. Sites with data of their own give ElasticDataLoader(..., source=NAME)"
                )
        steps = []
        for source, ranks in members.items():
            _, _, used_of_data, size_of_data, drops, _ = every[ranks[0]][2]
            schedule = Schedule(size_of_data, used_of_data, tuple(every[rank][1] for rank in ranks), drops)
            steps += [schedule.steps(member) for member in range(len(ranks))]
            if source == self._source:
                self._batches.prepare(order, schedule, ranks.index(transport.rank))
        running.common_steps = running.steps + min(steps)

    def _give(self, current: ProgramProgress, running: Pass, number: int, batches: Iterator[Any]) -> Iterator[Any]:
        schedule = self._batches.schedule
        assert schedule is not None
        try:
            for step, batch in enumerate(batches):
                running.hand_out((self._source, schedule.used_after(step + 1)))
                yield batch
                current.end_batch(running)
        finally:
            current.leave(running)


class _Batches(Sampler[list[int]]):
    """Sampler of this site's batches in a pass.

    Args:
        batch_size: number of samples of a step.

    Attributes:
        batch_size: the same.
        micro_batches: number of batches of a step.
        schedule: division of the data of the last pass; None before the first.
        member: index of this site among those that share the data.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.micro_batches = 1
        self.schedule: Schedule | None = None
        self.member = 0
        self._order: Tensor | None = None

    def prepare(self, order: Tensor, schedule: Schedule, member: int) -> None:
        """Prepare the next pass.

        Args:
            order: indices of all samples in the order of the pass.
            schedule: division of the data.
            member: index of this site.
        """
        self._order, self.schedule, self.member = order, schedule, member

    def parts(self, step: int) -> list[list[int]]:
        """Return the batches of a step.

        Args:
            step: number of the step, from 0.
        """
        if self._order is None or self.schedule is None:
            raise RuntimeError("batches are given to a pass of the loader only")
        indices = self._order[self.schedule.batch(step, self.member)]
        return [part.tolist() for part in indices.tensor_split(_parts(len(indices), self.micro_batches))]

    def count(self, schedule: Schedule, member: int, first: int = 0) -> int:
        """Return the number of batches of a site from a step on.

        Args:
            schedule: division of the data.
            member: index of the site.
            first: number of the step.
        """
        if self.micro_batches == 1:
            return schedule.steps(member) - first
        places = (schedule.batch(step, member) for step in range(first, schedule.steps(member)))
        return sum(_parts(place.stop - place.start, self.micro_batches) for place in places)

    def left_after(self, steps: int) -> int:
        """Return the number of batches that the pass has after some steps of its last division."""
        return 0 if self.schedule is None else self.count(self.schedule, self.member, steps)

    def __iter__(self) -> Iterator[list[int]]:
        if self.schedule is None:
            raise RuntimeError("batches are given to a pass of the loader only")
        return (part for step in range(self.schedule.steps(self.member)) for part in self.parts(step))

    def __len__(self) -> int:
        return self.left_after(0)


def _parts(rows: int, micro_batches: int) -> int:
    """Return the number of batches of a step that has so many samples."""
    return max(1, min(rows, micro_batches))
