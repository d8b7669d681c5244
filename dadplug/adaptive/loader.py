"""Loader whose position in the data is resumed after a restart, also with another number of sites."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ..errors import MismatchError
from .progress import Progress, progress
from .records import Pass
from .schedule import Schedule, fewest_steps, order_of

_OWN = ("sampler", "batch_sampler")  # arguments of DataLoader that this loader gives itself


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
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
        if given := [name for name in _OWN if options.get(name) is not None]:
            raise ValueError(f"an ElasticDataLoader has a sampler of its own: leave out {given[0]}")
        options = {name: value for name, value in options.items() if name not in _OWN}
        self._batches = _Batches(batch_size)
        self._source = "" if source is None else f"={source}"
        self._order_options = (shuffle, seed, drop_last)
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
        if batches.schedule is None:
            alone = self._source or not (dist.is_available() and dist.is_initialized())
            rank, count = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
            return batches.count(self._schedule(0, self._sizes_before(count)), rank)
        return batches.count(self._schedule(0, batches.schedule.sizes), batches.member)

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
        shuffle, seed, _ = self._order_options
        return order_of(self._length, shuffle, seed, running.epoch, number)

    def _schedule(self, used: int, sizes: tuple[int, ...]) -> Schedule:
        return Schedule(self._length, used, sizes, self._order_options[2])

    def _divide(self, current: Progress, running: Pass, number: int) -> None:
        """Agree with the other sites on the division of the rest of the data.

        Raises:
            MismatchError: if sites that share a data set differ in it, or are not in the same pass.
            ValueError: if the data set has another length than when the checkpoint was written.
        """
        drop_last, length = self._order_options[2], self._length
        used, length_before = running.used.get(self._source, [0, length])
        if length_before != length:
            raise ValueError(
                f"the data set had {length_before} samples when the checkpoint was written, and has {length} now"
            )
        running.used[self._source] = [used, length]
        order = self._order(running, number)
        same = (running.epoch, number, used, length, drop_last, order[:8].tolist())
        every = current.transport.gather_objects((self._source, self.local_batch_size, same))
        members: dict[str, list[int]] = {}
        for rank, (source, _, other) in enumerate(every):
            members.setdefault(source, []).append(rank)
            first = members[source][0]
            if other != every[first][2]:
                raise MismatchError(
                    f"{current.transport.sites[first]} and {current.transport.sites[rank]} share a data set, and do "
                    f"not iterate it alike: epoch, pass, position, length, drop_last and first samples are "
                    f"{every[first][2]} and {other}. Sites with data of their own give "
                    "ElasticDataLoader(..., source=NAME)"
                )
        schedules = []
        for source, ranks in members.items():
            _, _, _, size_of_data, drops, _ = every[ranks[0]][2]
            sizes = tuple(every[rank][1] for rank in ranks)
            schedule = Schedule(size_of_data, every[ranks[0]][2][2], sizes, drops)
            schedules += [(schedule, member) for member in range(len(ranks))]
            if source == self._source:
                self._batches.prepare(order, schedule, ranks.index(current.transport.rank))
        running.common_steps = running.steps + fewest_steps(schedules)

    def _give(self, current: Progress, running: Pass, number: int, batches: Iterator[Any]) -> Iterator[Any]:
        schedule = self._batches.schedule
        assert schedule is not None
        try:
            for step, batch in enumerate(batches):
                current.begin_batch(running, self._source, schedule.used_after(step + 1))
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
