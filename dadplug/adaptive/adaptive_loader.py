"""Loader whose batch follows the goodput of training, at the same step on all sites.

`AdaptiveDataLoader` gives the batches, measures steps, and agrees with the other sites on the split of the next ones;
`adaptive_loader` makes one in place of the loader that a program gives a trainer. `AdaScale` has the learning rates for
batches larger than the one for which they were chosen. Source: arXiv:2007.05105.
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from ..errors import MismatchError, escaped
from ..exchange import Traffic, Transport
from ..exchange.codec import register
from ..exchange.fields import checked, invalid
from ..step.model_sync.structure import attached, before_update
from ..support.loaders import settings_of
from ..support.refusals import refuse
from ..support.signature import whole_number
from .goodput import BatchLimits, BatchSplit, Measurement, Period, choose, fit, initial_split
from .loader import ElasticDataLoader, check_sampler, order_of_sampler
from .noise import GradientNoise
from .progress import Pass, ProgramProgress, progress

_Item = TypeVar("_Item")
_Bounds = tuple[int | None, int | None]
_LAST_INTERVAL = 64  # steps between two decisions
_LEFT_OUT = 2  # first steps with a split, in which buffers grow
_MEASURED = 6  # steps that are measured before the first decision
_FEWEST = 3  # measured steps of a split
_KEPT = 24
_SPLITS = 12
_SHRINKS_AFTER = 17  # steps after which payloads are no longer padded to the size of larger batches before


class GradientSource(Protocol):
    """Part of `dadplug.GradientReduction`, which imports this room, that is needed here and by `dadplug.AdaScale`."""

    traffic: Traffic

    @property
    def model(self) -> nn.Module:
        """The model."""

    @property
    def noise(self) -> GradientNoise:
        """The gradient noise."""

    def weigh_by_dealt(self, samples: int | None) -> None:
        """State the samples of the next steps, which are the site's weight in them."""

    @property
    def gain(self) -> float:
        """Scale-invariant steps that the last step is worth."""

    @property
    def plan(self) -> Iterable[Any]:
        """The path and bytes of every parameter."""


@register
@dataclass(frozen=True)
class BatchRequest:
    """Arguments of one site's loader.

    Attributes:
        base_batch: batch that training begins with.
        max_batch: largest batch of all sites.
        bounds: least and most samples of a micro-batch at this site; None for no bound.
        accumulate: whether a step may have several micro-batches.
        source: name of the data set, empty for one that all sites share.
        length: number of its samples.
    """

    base_batch: int
    max_batch: int
    bounds: _Bounds
    accumulate: bool
    source: str
    length: int


@register
@dataclass(frozen=True)
class BatchReport:
    """Measurements of one site, for a decision.

    Attributes:
        periods: by split, the medians of the measured steps.
        payload: bytes that the site sends in a step, whatever its batch, and for each of its samples.
        noise_scale: gradient noise scale, in samples; NaN if it is not known.
    """

    periods: tuple[tuple[BatchSplit, Measurement], ...]
    payload: tuple[float, float]
    noise_scale: float


def merge_requests(requests: Sequence[BatchRequest], transport: Transport) -> BatchLimits:
    """Return the limits that follow from the arguments of all sites.

    Args:
        requests: the arguments, by rank.
        transport: the transport.

    Raises:
        MismatchError: if arguments that all sites share differ.
        ValueError: if no batch is within all bounds.
    """
    first = requests[0]
    for rank, each in enumerate(requests):
        if (each.base_batch, each.max_batch, each.accumulate) != (first.base_batch, first.max_batch, first.accumulate):
            raise MismatchError(
                f"batch_size, max_batch_size and gradient_accumulation are {first.base_batch}, {first.max_batch}, "
                f"{first.accumulate} at {transport.sites[0]} and {each.base_batch}, {each.max_batch}, "
                f"{each.accumulate} at {transport.sites[rank]}"
            )
    lengths = {each.source: each.length for each in requests}
    members = [each.source for each in requests]
    total = max(len(requests), sum(lengths.values()))  # a batch has no more samples than there are
    weights = None
    if len(lengths) > 1:
        weights = tuple(lengths[source] / members.count(source) for source in members)
    most = max(first.max_batch, len(requests))
    bounds = tuple((max(1, low or 1), min(most, high or most)) for low, high in (each.bounds for each in requests))
    base = max(first.base_batch, len(requests))
    limits = BatchLimits(base, max(base, min(most, total)), bounds, first.accumulate, weights)
    limits.check()
    return limits


def _gather(produce: Callable[[], _Item], kind: Any, transport: Transport) -> list[_Item]:
    """Gather what each site produces, or raise the error of a site at all of them, so that none waits for another."""
    item: _Item | str
    failure: Exception | None = None
    try:
        item = produce()
    except Exception as error:
        item, failure = f"{type(error).__name__}: {error}", error
    every = [*checked(transport.gather_present(item), kind | str, "report", transport).values()]
    for rank, each in enumerate(every):
        if isinstance(each, str):
            raise RuntimeError(f"{transport.sites[rank]} cannot choose the batch: {escaped(each)}") from failure
    return every


def _medians(times: Sequence[tuple[float, float, int]]) -> Measurement:
    seconds, compute, nbytes = (statistics.median(column) for column in zip(*times, strict=True))
    return Measurement(seconds, compute, float(nbytes), len(times))


def _deal(rows: int | None) -> None:
    """State the samples of this site in the next steps to all reductions, since sites have batches of other sizes."""
    for each in attached():
        if hasattr(type(each), "weigh_by_dealt"):  # no LocalSGD
            each.weigh_by_dealt(rows)


def _counts(source: GradientSource) -> tuple[int, int, float]:
    traffic = source.traffic
    return traffic.steps, traffic.bytes_in_steps, traffic.wait_in_steps


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
        progress: scale-invariant steps so far, those before a restart included: the sum of the gains of all steps. An
            epoch of N samples with the batch that training begins with has N / batch_size of them. Counted with
            `autoscale_batch_size` only.
        goodput: predicted samples of the base batch per second; NaN before the first decision.
        noise_scale: gradient noise scale of the last decision, in samples; NaN before.
        accumulates: whether further batches of the same step follow the present one, so that the program must take no
            step.

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
        refuse(
            (
                isinstance(dataset, IterableDataset),
                "an IterableDataset has no samples by number that could be divided over the sites: an "
                "AdaptiveDataLoader needs a data set with __getitem__ and __len__",
            ),
            (
                options.get("batch_sampler") is not None,
                "an AdaptiveDataLoader decides about batches: leave out the batch_sampler",
            ),
            (
                not options.get("in_order", True),
                "with in_order=False a change of the batch would lose samples: leave it out",
            ),
            (sampler is not None and shuffle, "a sampler gives the order: leave out shuffle"),
        )
        if sampler is not None:
            check_sampler(sampler)
        super().__init__(dataset, batch_size, bool(shuffle), source=source, seed=seed, drop_last=drop_last, **options)
        self._given_sampler = sampler
        self._base_batch = batch_size
        self._may_accumulate = False
        self._gradients: GradientSource | None = None  # that takes the steps; None before it is known
        self._steps_before: weakref.WeakKeyDictionary[Any, int] = (
            weakref.WeakKeyDictionary()
        )  # of each reduction, while it is not known
        self._before: tuple[int, int, float] | None = None  # counts of the reduction at the begin of the step
        self._uses = False
        self._split: BatchSplit | None = None  # None before the first pass
        self._saved: BatchSplit | None = None  # of a checkpoint, or of before autoscale_batch_size
        self._limits: BatchLimits | None = None
        # Of each split, seconds, those of computing, and bytes of steps:
        self._times: dict[BatchSplit, deque[tuple[float, float, int]]] = {}
        self._recent_rows: deque[int] = deque(maxlen=_SHRINKS_AFTER)
        self._left_out, self._since, self._with_split = _LEFT_OUT, 0, 0
        self._interval = _LEFT_OUT + _MEASURED
        self._micro_batch: tuple[int, int] = (1, 1)  # rows of the present one, and of its step at this site
        self.accumulates = False
        self._given: int | None = None  # batches of the running pass, of which the last split has
        self._steps = 0  # so many whole steps
        self.max_batch_size: int | None = None
        self.local_bsz_bounds: _Bounds = (None, None)
        self.progress = 0.0
        self.goodput = self.noise_scale = math.nan
        progress().register_loader(self)

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: _Bounds | None = None,
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
            if number is not None:
                whole_number(1)(name, number)
        refuse(
            (
                max_batch_size < self._base_batch,
                f"max_batch_size is {max_batch_size}, less than batch_size, {self._base_batch}",
            ),
            (
                low is not None and low > min(max_batch_size, high or max_batch_size),
                f"local_bsz_bounds {local_bsz_bounds} and max_batch_size {max_batch_size} contradict each other",
            ),
        )
        self.max_batch_size, self.local_bsz_bounds = max_batch_size, (low, high)
        self._may_accumulate = gradient_accumulation
        self._gradients, self._uses = reduction, False
        self._saved, self._split, self._limits = self._split or self._saved, None, None

    @property
    def current_batch_size(self) -> int:
        """Samples of all sites in a step."""
        return self._base_batch if self._split is None else self._split.batch

    @property
    def accumulation_steps(self) -> int:
        """Number of batches of a step at each site."""
        return 1 if self._split is None else self._split.micro_batches

    @property
    def batch_weight(self) -> float:
        """Fraction of this site's samples of the step that the batch has: a factor for a loss that is a mean."""
        rows, whole = self._micro_batch
        return rows / max(1, whole)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass, on which its order depends; for programs without `remaining_epochs_until`.

        Args:
            epoch: number of the epoch.
        """
        self._passes_outside = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the batch and the progress, the same at all sites; checkpoints of a program's epochs contain them."""
        split, reached, source = self._split or self._saved, self.progress, self._gradients
        if self._before is not None and source is not None:  # a step that is not over yet, for the loader
            reached += (source.traffic.steps - self._before[0]) * source.gain
        sizes, micro_batches = ([], 1) if split is None else (list(split.sizes), split.micro_batches)
        return {"sizes": sizes, "micro_batches": micro_batches, "progress": reached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, before a pass; with another number of sites the batch is divided anew.

        Args:
            state: the state.
        """
        sizes, self.progress, self._split = tuple(state["sizes"]), state["progress"], None
        self._saved = BatchSplit(sizes, state["micro_batches"]) if sizes else None

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
        return order_of_sampler(self._given_sampler, self._seed, running.epoch, number)

    @property
    def _length(self) -> int:
        return super()._length if self._given_sampler is None else len(self._given_sampler)

    def _sizes_before(self, count: int) -> tuple[int, ...]:
        if self._split is not None and len(self._split.sizes) == count:
            return self._split.sizes
        return (max(1, math.ceil(self._base_batch / count)),) * count

    def _divide(self, current: ProgramProgress, running: Pass, number: int) -> None:
        transport = current.transport
        if self._split is None or len(self._split.sizes) != transport.world_size:
            self._split = self._first_split(transport)
        self._batches.batch_size = self._split.sizes[transport.rank]
        self._batches.micro_batches = self._split.micro_batches
        super()._divide(current, running, number)

    def _first_split(self, transport: Transport) -> BatchSplit:
        """Agree on the split that training begins or goes on with.

        Raises:
            MismatchError: if arguments that all sites share differ.
            ValueError: if no batch is within all bounds.
        """
        most = self.max_batch_size or self._base_batch
        request = BatchRequest(
            self._base_batch, most, self.local_bsz_bounds, self._may_accumulate, self._source, self._length
        )
        every = checked(transport.gather_present(request), BatchRequest, "request", transport)
        limits = self._limits = merge_requests([*every.values()], transport)
        saved = self._split or self._saved
        self._times.clear()
        if saved is not None and limits.allow(saved):
            return saved
        return initial_split(limits, None if saved is None else saved.batch)

    def _give(self, current: ProgramProgress, running: Pass, number: int, batches: Iterator[Any]) -> Iterator[Any]:
        self._given = self._steps = 0
        try:
            while (yield from self._give_split(current, running, batches)):
                self._divide(current, running, number)
                self._steps = 0
                batches = DataLoader.__iter__(self)  # what workers have loaded ahead is dropped, and comes again
        finally:
            self.accumulates, self._given = False, None
            _deal(None)
            current.leave(running)

    def _give_split(
        self, current: ProgramProgress, running: Pass, batches: Iterator[Any]
    ) -> Generator[Any, None, bool]:
        """Give batches until the split changes; return whether it has, and not the end of the pass been reached."""
        schedule, scales = self._batches.schedule, self.max_batch_size is not None
        assert schedule is not None
        for step in range(schedule.steps(self._batches.member)):
            if scales:
                self._begin_step()
            began = time.perf_counter()
            parts = self._batches.parts(step)
            rows = sum(map(len, parts))
            if scales:
                _deal(rows)
            for left, part in zip(reversed(range(len(parts))), parts, strict=True):
                batch = next(batches)
                assert self._given is not None
                self._given, self._steps = self._given + 1, step + (left == 0)
                self.accumulates, self._micro_batch = left > 0, (len(part), rows)
                running.hand_out(None if left else (self._source, schedule.used_after(step + 1)))
                yield batch
            if scales:
                self._end_step(rows, time.perf_counter() - began, schedule.is_full(step))
            current.end_batch(running)
            due = scales and self._since >= self._interval and running.steps < running.common_steps  # at all sites
            if due and self._decide(current.transport):
                return True
        for _ in batches:  # ends the workers
            raise RuntimeError("the loader has batches beyond the end of the pass")
        return False

    # Measurements of steps

    def _begin_step(self) -> None:
        """Note what the reductions have done so far, before the first micro-batch of a step is loaded."""
        self._before = None if self._gradients is None else _counts(self._gradients)
        if self._gradients is None:
            self._steps_before = weakref.WeakKeyDictionary({each: each.traffic.steps for each in attached()})

    def _end_step(self, rows: int, seconds: float, whole: bool) -> None:
        """End a step, after the program has used its last micro-batch.

        Args:
            rows: samples of this site.
            seconds: seconds since its first micro-batch was asked for.
            whole: whether each site had as many samples as the split says.

        Raises:
            RuntimeError: if the program has taken no step, or more than one with several micro-batches.
            ValueError: if several reductions have taken steps.
        """
        source = self._find_source() if self._gradients is None else self._gradients
        if not self._uses:
            self._use(source)
        before, after = self._before or (source.traffic.steps - 1, 0, 0.0), _counts(source)
        assert self._split is not None
        steps = after[0] - before[0]
        if steps > 1 and self._split.micro_batches > 1:
            raise RuntimeError(
                f"the program has taken {steps} steps in {self._split.micro_batches} micro-batches: with "
                "gradient_accumulation=True, hold gradients back and take no step while loader.accumulates is set"
            )
        self.progress += steps * source.gain
        self._since += 1
        self._with_split += 1
        self._recent_rows.append(rows)
        known, self._before = self._before is not None, None
        if whole and steps == 1 and known and self._with_split > self._left_out:
            times = self._times.setdefault(self._split, deque(maxlen=_KEPT))
            times.append((seconds, max(0.0, seconds - (after[2] - before[2])), after[1] - before[1]))

    def _find_source(self) -> GradientSource:
        """Return the reduction that has taken a step since `_begin_step`.

        Raises:
            RuntimeError: if none has.
            ValueError: if several have.
        """
        sources = (each for each in attached() if hasattr(type(each), "gain"))  # no LocalSGD
        found: list[GradientSource] = [each for each in sources if each.traffic.steps > self._steps_before.get(each, 0)]
        if len(found) > 1:
            raise ValueError(
                "several GradientReductions take steps in the loop: name the one that decides about the batch, "
                "autoscale_batch_size(..., reduction=REDUCTION)"
            )
        if not found:
            raise RuntimeError(
                "autoscale_batch_size needs a dadplug.GradientReduction, and none has taken a step in the loop over "
                "the loader: call reduction.synchronize() after backward()"
            )
        return found[0]

    def _use(self, source: GradientSource) -> None:
        """Begin to measure a reduction's noise."""
        if source.noise.base_batch is None:
            source.noise.base_batch = self._base_batch
        self._gradients, self._uses = source, True

    # Decisions

    def _decide(self, transport: Transport) -> bool:
        """Agree on the split of the next steps; all sites must call it after the same step.

        The first site decides by what all have measured, since sites with other machines may compute other roundings.

        Args:
            transport: the transport.

        Returns:
            Whether the split has changed.

        Raises:
            SiteError: if a site is gone or does not answer.
            RuntimeError: if a site cannot report, or the first one cannot decide; on all sites.
        """
        assert self._split is not None
        reports = _gather(self._report, BatchReport, transport)
        kind = tuple[BatchSplit, float] | None
        decision = _gather(lambda: self._choose(reports) if transport.rank == 0 else None, kind, transport)[0]
        self._since = 0
        self._interval = min(2 * self._interval, _LAST_INTERVAL)
        if decision is None:
            return False
        assert self._limits is not None
        split, goodput = decision
        if not self._limits.allow(split):
            raise invalid("choice of the batch", transport.sites[0], f"{split} is not within the limits of all sites")
        self.goodput = goodput
        self.noise_scale = reports[0].noise_scale
        if split == self._split:
            return False
        grows = any(report.payload[1] > 0.0 for report in reports)
        fewer = any(after < before for after, before in zip(split.sizes, self._split.sizes, strict=True))
        self._left_out, self._with_split = _SHRINKS_AFTER if grows and fewer else _LEFT_OUT, 0
        self._split = split
        self._interval = self._left_out + _MEASURED
        self._times.pop(self._split, None)  # times of long ago
        while len(self._times) > _SPLITS:
            self._times.pop(next(iter(self._times)))
        return True

    def _report(self) -> BatchReport:
        source = self._gradients
        assert source is not None
        periods = tuple((each, _medians(times)) for each, times in self._times.items() if len(times) >= _FEWEST)
        growing = [row for row in source.plan if row.path in ("factors", "activations") and len(row.shape) > 1]
        grows = sum(row.bytes for row in growing)  # with the batch; the other bytes of a step do not
        payload = float(sum(row.bytes for row in source.plan) - grows), grows / max(1, *self._recent_rows)
        return BatchReport(periods, payload, source.noise.scale)

    def _choose(self, reports: Sequence[BatchReport]) -> tuple[BatchSplit, float] | None:
        """Return the split of the next steps and its goodput; None while not all have measured the present one."""
        assert self._split is not None
        assert self._limits is not None
        tables = [dict(report.periods) for report in reports]
        common = [each for each in tables[0] if all(each in table for table in tables)]  # the present split comes last
        periods = [Period(each, tuple(table[each] for table in tables)) for each in common]
        if self._split not in common:
            return None
        model = fit(periods, [report.payload for report in reports])
        measured = [each.batch for each in common]
        return choose(model, self._split, measured, self._limits, reports[0].noise_scale)


def adaptive_loader(loader: Any, sites: int, seed: int, sampler: Any = None) -> AdaptiveDataLoader:
    """Return a loader of the same data with the same batches at first, whose batch can change.

    Args:
        loader: the loader of each site; its batch size is that of one site.
        sites: number of sites.
        seed: seed of the order.
        sampler: sampler of the order, before it was divided over the sites; that of the loader where None.

    Raises:
        ValueError: if it is no DataLoader, or a sampler decides about its batches.
    """
    if isinstance(loader, AdaptiveDataLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise ValueError(f"the batch of one DataLoader can follow goodput, not that of a {type(loader).__name__}")
    if type(loader.batch_sampler) not in (BatchSampler, type(None)) or loader.batch_size is None:
        raise ValueError(
            "the training loader's batches are those of a sampler: give its DataLoader a batch_size instead"
        )
    sampler = loader.sampler if sampler is None else sampler
    shuffle = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source)
    order: dict[str, Any] = {"shuffle": shuffle}
    if not shuffle and type(sampler) is not SequentialSampler:
        order = {"sampler": sampler}
    order |= settings_of(loader)
    return AdaptiveDataLoader(loader.dataset, loader.batch_size * sites, **order, seed=seed, drop_last=loader.drop_last)


# AdaScale

_RULES: dict[type[Optimizer], str] = {SGD: "linear", Adam: "sqrt", AdamW: "sqrt", RMSprop: "sqrt"}


class AdaScale:
    """Scaling of the learning rate by AdaScale's gain, as a wrapper of any scheduler.

    A step with a batch larger than the base batch is worth more than one with the base batch, but less than the ratio
    of the two: how many it is worth, the gain, follows from the gradient's noise. In every step of the optimizer, its
    learning rates are multiplied by the gain (SGD) or the square root of the gain (Adam, AdamW, RMSprop). Before and
    after it, ``param_groups`` have the learning rates of the scheduler. `progress` counts the steps with the base
    batch that have been made up for, and the scheduler follows it.

    Args:
        optimizer: the optimizer.
        reduction: the reduction of the gradients; its noise is estimated from now on.
        scheduler: a scheduler of the optimizer, or None.
        base_batch: samples of all sites in a step for which the learning rate has been chosen. Where None, it is what
            ``reduction.noise.base_batch`` says, which an adaptive loader sets, or else the batch of the first step.
        scheduler_every: progress after which the scheduler makes a step: 1.0 for a scheduler that makes one in every
            step of the optimizer, ``len(dataset) / base_batch`` for one that makes one in every epoch.
        rule: ``"linear"`` to multiply by the gain, ``"sqrt"`` by its square root; None to choose by the optimizer.

    Attributes:
        optimizer: the optimizer.
        scheduler: the scheduler, or None.
        progress: sum of the gains of the optimizer's steps.
        gain: gain of the optimizer's last step.
        factor: number by which the learning rates were multiplied in it.

    Raises:
        ValueError: if it is not known how the learning rate of the optimizer is to be scaled, or an argument is out of
            its range.

    Example:
        >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
        >>> scaler = dadplug.AdaScale(optimizer, reduction, scheduler, base_batch=64)
        >>> while scaler.progress < 1000:
        ...     train(*next(batches))  # backward, reduction.synchronize(), optimizer.step()
        ...     scaler.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reduction: GradientSource,
        scheduler: Any = None,
        *,
        base_batch: int | None = None,
        scheduler_every: float = 1.0,
        rule: str | None = None,
    ) -> None:
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner  # of a trainer's wrapper, which calls its step
        self._rule = _rule_of(optimizer, rule)
        refuse(
            (
                base_batch is not None and (not isinstance(base_batch, int) or base_batch < 1),
                f"base_batch must be a whole number of at least 1, got {base_batch!r}",
            ),
            (not scheduler_every > 0.0, f"scheduler_every must be a number over 0, got {scheduler_every!r}"),
        )
        self.optimizer, self.scheduler = optimizer, scheduler
        self.progress = 0.0
        self.gain = self.factor = 1.0
        self._noise = reduction.noise
        if base_batch is not None:
            self._noise.base_batch = base_batch
        self._every = scheduler_every
        self._scheduled = 0  # steps of the scheduler
        self._rates: list[Any] | None = None  # learning rates while they are scaled
        self._hooks = [
            before_update(optimizer, self._scale),
            optimizer.register_step_post_hook(self._after_step),
        ]

    # Hooks of the optimizer

    def _scale(self) -> None:
        """Scale the learning rates."""
        if self._noise.base_batch is None and self._noise.batch:
            self._noise.base_batch = self._noise.batch
        self.gain = self._noise.gain()
        self.factor = self.gain if self._rule == "linear" else math.sqrt(self.gain)
        self._restore()  # the last step may have failed
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _after_step(self, *_: Any) -> None:
        if self._rates is not None:
            self._restore()
            self.progress += self.gain

    def _restore(self) -> None:
        if self._rates is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=False):
                group["lr"] = rate
            self._rates = None

    # As a scheduler

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Let the scheduler make as many steps as the progress says; call it after the optimizer's step.

        Args:
            args: positional arguments of the scheduler's ``step``, such as a metric.
            kwargs: its keyword arguments.
        """
        due = math.floor(self.progress / self._every + 1e-9)
        while self._scheduled < due:
            self._scheduled += 1
            if self.scheduler is not None:
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the parameter groups, as the scheduler has set them."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return progress and base batch, and the state of the scheduler."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {
            "progress": self.progress,
            "scheduled": self._scheduled,
            "base_batch": self._noise.base_batch,
            "scheduler": scheduler,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: the state.
        """
        self.progress, self._scheduled = state["progress"], state["scheduled"]
        self._noise.base_batch = state["base_batch"]
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])

    def detach(self) -> None:
        """Remove the hooks from the optimizer, whose learning rates are not scaled any more. May be called twice."""
        self._restore()
        for hook in self._hooks:
            hook.remove()


def _rule_of(optimizer: Optimizer, rule: str | None) -> str:
    """Return the rule by which the learning rate of an optimizer is scaled."""
    refuse(
        (rule not in (None, "linear", "sqrt"), f"rule must be 'linear', 'sqrt' or None, got {rule!r}"),
        (
            not isinstance(optimizer, Optimizer),
            f"AdaScale needs a torch.optim.Optimizer, got {type(optimizer).__name__}",
        ),
    )
    found = rule or next((each for kind, each in _RULES.items() if isinstance(optimizer, kind)), None)
    if found is None:
        known = ", ".join(kind.__name__ for kind in _RULES)
        raise ValueError(
            f"AdaScale does not know how to scale the learning rate of {type(optimizer).__name__}: it knows {known}. "
            "State it by rule='linear' (as for SGD) or rule='sqrt' (as for Adam), or use one of these"
        )
    return found
