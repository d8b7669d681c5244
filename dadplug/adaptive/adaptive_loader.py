"""Loader whose batch follows the goodput of training, at the same step on all sites."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .batch_controller import BatchController
from .gradient_sources import GradientSource
from .loader import ElasticDataLoader
from .progress import Progress, progress
from .records import Pass
from .sample_order import check_sampler, order_of_sampler


class AdaptiveDataLoader(ElasticDataLoader):
    """DataLoader that divides a data set over the sites, and with `autoscale_batch_size` chooses batches by goodput.

    It takes the arguments of `torch.utils.data.DataLoader`, but for samplers of batches. As with
    `dadplug.ElasticDataLoader`, every sample is used once in an epoch, by one site, whatever the batches are and
    however often they and the number of sites change; training resumes at the same sample after a restart, with the
    batch and the progress that were reached.

    Unlike there, `batch_size` is the batch of all sites together, so that a restart with another number of sites does
    not change it. Without `autoscale_batch_size` the sites have equal parts of it.

    Args:
        dataset: the data set, with a length, the same at all processes that share it.
        batch_size: samples of all sites in a step, with which training begins; the learning rate is for this batch.
        shuffle: whether to shuffle in every epoch.
        sampler: sampler that gives the order of the samples, the same at all sites, in place of `shuffle`. It draws
            with the seed of the pass.
        source: name of the data set, if sites have data sets of their own, see `dadplug.ElasticDataLoader`. Then
            batches are in proportion to the lengths of the data sets.
        seed: seed of the order.
        drop_last: whether to leave out the samples of an epoch that are too few for a full batch at every site.
        options: other arguments of `torch.utils.data.DataLoader`, such as ``num_workers``.

    Attributes:
        max_batch_size: largest batch of all sites; None without `autoscale_batch_size`.
        local_bsz_bounds: least and most samples of this site in a batch, None for no bound.

    Raises:
        ValueError: if the data set has no length, the batch size is not positive, a sampler cannot be repeated, or an
            argument decides about batches.

    Example:
        >>> loader = dadplug.AdaptiveDataLoader(dataset, batch_size=64, shuffle=True, drop_last=True)
        >>> loader.autoscale_batch_size(1024, local_bsz_bounds=(16, 256))
        >>> for epoch in dadplug.remaining_epochs_until(20):
        ...     for inputs, targets in loader:
        ...         train(inputs, targets)
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        *,
        source: str | None = None,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                "an IterableDataset has no samples by number that could be divided over the sites: an "
                "AdaptiveDataLoader needs a data set with __getitem__ and __len__"
            )
        if options.get("batch_sampler") is not None:
            raise ValueError("an AdaptiveDataLoader decides about batches: leave out the batch_sampler")
        if not options.get("in_order", True):
            raise ValueError("with in_order=False a change of the batch would lose samples: leave it out")
        if sampler is not None:
            if shuffle:
                raise ValueError("a sampler gives the order: leave out shuffle")
            check_sampler(sampler)
        super().__init__(dataset, batch_size, bool(shuffle), source=source, seed=seed, drop_last=drop_last, **options)
        self._given_sampler = sampler
        self._controller = BatchController(batch_size)
        self._micro_batch: tuple[int, int] = (1, 1)  # rows of the present one, and of its step at this site
        self._accumulates = False
        self._given: int | None = None  # batches of the running pass, of which the last split has
        self._steps = 0  # so many whole steps
        self.max_batch_size: int | None = None
        self.local_bsz_bounds: tuple[int | None, int | None] = (None, None)
        progress().register_loader(self._controller)

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
        *,
        reduction: GradientSource | None = None,
    ) -> None:
        """Let the batch change during training, to that of most goodput; all sites must call it.

        The batch never becomes smaller than `batch_size`. It changes between two steps, at all sites after the same
        one, where the predicted goodput grows by more than 5 %. Scale the learning rate by `dadplug.AdaScale`.

        Args:
            max_batch_size: largest batch of all sites together.
            local_bsz_bounds: least and most samples of this site in a batch, such as its memory allows; None for no
                bound.
            gradient_accumulation: whether a step may consist of several batches; the program then takes no step while
                `accumulates` is set.
            reduction: the reduction of the gradients; None for the one that takes steps in the loop.

        Raises:
            ValueError: if bounds contradict each other or `batch_size`; in the next pass, on all sites, if those of all
                sites do.

        Example:
            >>> loader.autoscale_batch_size(1024, local_bsz_bounds=(16, 256))
        """
        low, high = local_bsz_bounds or (None, None)
        numbers = {"max_batch_size": max_batch_size, "the lower bound": low, "the upper bound": high}
        for name, number in numbers.items():
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {number!r}")
        base = self._controller.base_batch
        if max_batch_size < base:
            raise ValueError(f"max_batch_size is {max_batch_size}, less than batch_size, {base}")
        if low is not None and low > min(max_batch_size, high or max_batch_size):
            raise ValueError(
                f"local_bsz_bounds {local_bsz_bounds} and max_batch_size {max_batch_size} contradict each other"
            )
        self._controller.scale(max_batch_size, (low, high), gradient_accumulation, reduction)
        self.max_batch_size, self.local_bsz_bounds = max_batch_size, (low, high)

    @property
    def current_batch_size(self) -> int:
        """Samples of all sites in a step."""
        split = self._controller.split
        return self._controller.base_batch if split is None else split.batch

    @property
    def accumulation_steps(self) -> int:
        """Number of batches of a step at each site."""
        split = self._controller.split
        return 1 if split is None else split.micro_batches

    @property
    def accumulates(self) -> bool:
        """Whether further batches of the same step follow the present one, so that the program must take no step."""
        return self._accumulates

    @property
    def batch_weight(self) -> float:
        """Fraction of this site's samples of the step that the batch has: a factor for a loss that is a mean."""
        rows, whole = self._micro_batch
        return rows / max(1, whole)

    @property
    def progress(self) -> float:
        """Scale-invariant steps so far, those before a restart included: the sum of the gains of all steps.

        An epoch of N samples with the batch that training begins with has N / batch_size of them. Counted with
        `autoscale_batch_size` only.
        """
        return self._controller.progress

    @property
    def goodput(self) -> float:
        """Predicted samples of the base batch per second; NaN before the first decision."""
        return self._controller.goodput

    @property
    def noise_scale(self) -> float:
        """Gradient noise scale of the last decision, in samples; NaN before."""
        return self._controller.noise_scale

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass, on which its order depends; for programs without `remaining_epochs_until`.

        Args:
            epoch: number of the epoch.
        """
        self._passes_outside = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the batch and the progress, the same at all sites; checkpoints of a program's epochs contain them."""
        return self._controller.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, before a pass.

        Args:
            state: the state.
        """
        self._controller.load_state_dict(state)

    # Passes

    def __len__(self) -> int:
        """Return the number of this site's batches: of the running pass, else of an epoch with the present split."""
        batches = self._batches
        if self._given is None or batches.schedule is None:
            return super().__len__()
        return self._given + batches.left_after(self._steps)

    def _order(self, running: Pass, number: int) -> Tensor:
        if self._given_sampler is None:
            return super()._order(running, number)
        return order_of_sampler(self._given_sampler, self._order_options[1], running.epoch, number)

    @property
    def _length(self) -> int:
        return super()._length if self._given_sampler is None else len(self._given_sampler)

    def _sizes_before(self, count: int) -> tuple[int, ...]:
        split = self._controller.split
        if split is not None and len(split.sizes) == count:
            return split.sizes
        return (max(1, math.ceil(self._controller.base_batch / count)),) * count

    def _divide(self, current: Progress, running: Pass, number: int) -> None:
        self._controller.start(current.transport, self._source, self._length)
        split = self._controller.split
        assert split is not None
        self._batches.batch_size = split.sizes[current.transport.rank]
        self._batches.micro_batches = split.micro_batches
        super()._divide(current, running, number)

    def _give(self, current: Progress, running: Pass, number: int, batches: Iterator[Any]) -> Iterator[Any]:
        self._given = self._steps = 0
        try:
            while (yield from self._give_split(current, running, batches)):
                self._divide(current, running, number)
                self._steps = 0
                batches = DataLoader.__iter__(
                    self
                )  # batches that workers have loaded ahead are dropped, and come again
        finally:
            self._accumulates, self._given = False, None
            current.leave(running)

    def _give_split(self, current: Progress, running: Pass, batches: Iterator[Any]) -> Generator[Any, None, bool]:
        """Give batches until the split changes; return whether it has, and not the end of the pass been reached."""
        controller, schedule, member = self._controller, self._batches.schedule, self._batches.member
        assert schedule is not None
        for step in range(schedule.steps(member)):
            controller.begin_step()
            began = time.perf_counter()
            parts = self._batches.parts(step)
            rows = sum(map(len, parts))
            for left, part in zip(reversed(range(len(parts))), parts, strict=True):
                batch = next(batches)
                assert self._given is not None
                self._given, self._steps = self._given + 1, step + (left == 0)
                self._accumulates, self._micro_batch = left > 0, (len(part), rows)
                if left:
                    current.begin_part(running)
                else:
                    current.begin_batch(running, self._source, schedule.used_after(step + 1))
                yield batch
            controller.end_step(rows, time.perf_counter() - began, schedule.is_full(step))
            current.end_batch(running)
            if controller.due and running.steps < running.common_steps and controller.decide(current.transport):
                return True
        for _ in batches:  # ends the workers
            raise RuntimeError("the loader has batches beyond the end of the pass")
        return False
