"""Controller of a loader's batch: measures steps, and agrees with the other sites on the split of the next ones."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import MismatchError
from ..exchange import Transport
from ..exchange.codec import register
from .batch_choice import BatchLimits, choose, initial_split
from .goodput import BatchSplit
from .goodput_fit import Measurement, Period, fit
from .gradient_sources import GradientSource, StepWatch

_Item = TypeVar("_Item")
_LAST_INTERVAL = 64  # steps between two decisions
_LEFT_OUT = 2  # first steps with a split, in which buffers grow
_MEASURED = 6  # steps that are measured before the first decision
_FEWEST = 3  # measured steps of a split
_KEPT = 24
_SPLITS = 12
_SHRINKS_AFTER = 17  # steps after which payloads are no longer padded to the size of larger batches before


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
    bounds: tuple[int | None, int | None]
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


@register
@dataclass(frozen=True)
class Decision:
    """Decision about the next steps.

    Attributes:
        split: samples of each site.
        goodput: predicted samples of the base batch per second.
        left_out: first steps with the split that are not measured.
    """

    split: BatchSplit
    goodput: float
    left_out: int


@dataclass
class _Times:
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    compute: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    nbytes: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def median(self) -> Measurement:
        seconds, compute = statistics.median(self.seconds), statistics.median(self.compute)
        return Measurement(seconds, compute, float(statistics.median(self.nbytes)), len(self.seconds))


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


class BatchController:
    """Controller of the batch of one loader.

    Args:
        base_batch: samples of all sites in a step with which training begins.

    Attributes:
        base_batch: the same.
        split: the split of the steps; None before the first pass.
        progress: scale-invariant steps so far: the sum of the gains of all steps.
        goodput: predicted samples of the base batch per second, of the last decision; NaN before.
        noise_scale: gradient noise scale at the last decision; NaN before.
    """

    def __init__(self, base_batch: int) -> None:
        self.base_batch = base_batch
        self.split: BatchSplit | None = None
        self.progress = 0.0
        self.goodput = self.noise_scale = math.nan
        self._request: tuple[int, tuple[int | None, int | None], bool] = (base_batch, (None, None), False)
        self._scales = False
        self._watch, self._uses = StepWatch(None), False
        self._limits: BatchLimits | None = None
        self._saved: BatchSplit | None = None
        self._times: dict[BatchSplit, _Times] = {}
        self._recent_rows: deque[int] = deque(maxlen=_SHRINKS_AFTER)
        self._left_out, self._since, self._with_split = _LEFT_OUT, 0, 0
        self._interval = _LEFT_OUT + _MEASURED
        self._before: tuple[int, int, float] | None = None

    def scale(
        self,
        max_batch: int,
        bounds: tuple[int | None, int | None],
        accumulate: bool,
        source: GradientSource | None,
    ) -> None:
        """Let the batch change from now on, at all sites.

        Args:
            max_batch: largest batch of all sites.
            bounds: least and most samples of a micro-batch at this site.
            accumulate: whether a step may have several micro-batches.
            source: the reduction; that which takes steps in the loop, where None.
        """
        self._request, self._scales, self._watch = (max_batch, bounds, accumulate), True, StepWatch(source)
        self._uses = False
        self._saved, self.split, self._limits = self.split or self._saved, None, None

    def start(self, transport: Transport, source: str, length: int) -> None:
        """Agree on the first split, if there is none yet; all sites must call it.

        Args:
            transport: the transport.
            source: name of the data set.
            length: number of its samples.

        Raises:
            MismatchError: if arguments that all sites share differ.
            ValueError: if no batch is within all bounds.
        """
        if self.split is not None and len(self.split.sizes) == transport.world_size:
            return
        max_batch, bounds, accumulate = self._request
        request = BatchRequest(self.base_batch, max_batch, bounds, accumulate, source, length)
        limits = self._limits = merge_requests(transport.gather_objects(request), transport)
        saved = self.split or self._saved
        self._times.clear()
        self.split = initial_split(limits, None if saved is None else saved.batch)
        if saved is not None and limits.allow(saved):
            self.split = saved

    # Steps

    def begin_step(self) -> None:
        """Begin a step, before its first micro-batch is loaded."""
        if self._scales:
            self._watch.begin()
            source = self._watch.source
            self._before = None if source is None else _counts(source)

    def end_step(self, rows: int, seconds: float, whole: bool) -> None:
        """End a step, after the program has used its last micro-batch.

        Args:
            rows: samples of this site.
            seconds: seconds since `begin_step`.
            whole: whether each site had as many samples as the split says.

        Raises:
            RuntimeError: if the program has taken more than one step.
        """
        if not self._scales:
            return
        source = self._watch.end()
        if source is None:
            raise RuntimeError(
                "autoscale_batch_size needs a dadplug.GradientReduction, and none has taken a step in the loop over "
                "the loader: call reduction.synchronize() after backward()"
            )
        if not self._uses:
            self._use(source)
        before, after = self._before or (source.traffic.steps - 1, 0, 0.0), _counts(source)
        steps = after[0] - before[0]
        self._check_steps(steps)
        self.progress += steps * source.gain
        self._since += 1
        self._with_split += 1
        self._recent_rows.append(rows)
        known, self._before = self._before is not None, None
        if whole and steps == 1 and known and self._with_split > self._left_out:
            assert self.split is not None
            times = self._times.setdefault(self.split, _Times())
            times.seconds.append(seconds)
            times.compute.append(max(0.0, seconds - (after[2] - before[2])))
            times.nbytes.append(after[1] - before[1])

    def _use(self, source: GradientSource) -> None:
        """Begin to measure a reduction's noise."""
        if source.options.weighting != "samples":
            raise ValueError(
                f"weighting={source.options.weighting!r} weights sites with different batches alike: "
                "autoscale_batch_size needs weighting='samples'"
            )
        if source.noise.base_batch is None:
            source.noise.base_batch = self.base_batch
        self._uses = True

    def _check_steps(self, steps: int) -> None:
        assert self.split is not None
        if steps > 1 and self.split.micro_batches > 1:
            raise RuntimeError(
                f"the program has taken {steps} steps in {self.split.micro_batches} micro-batches: with "
                "gradient_accumulation=True, hold gradients back and take no step while loader.accumulates is set"
            )

    # Decisions

    @property
    def due(self) -> bool:
        """Whether it is time for a decision; the same at all sites."""
        return self._scales and self._since >= self._interval

    def decide(self, transport: Transport) -> bool:
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
        assert self.split is not None
        reports = _gather(self._report, transport)
        decision = _gather(lambda: self._choose(reports) if transport.rank == 0 else None, transport)[0]
        self._since = 0
        self._interval = min(2 * self._interval, _LAST_INTERVAL)
        if decision is None:
            return False
        self.goodput, self.noise_scale = decision.goodput, reports[0].noise_scale
        if decision.split == self.split:
            return False
        self.split = decision.split
        self._left_out, self._with_split = decision.left_out, 0
        self._interval = self._left_out + _MEASURED
        self._times.pop(self.split, None)  # times of long ago
        while len(self._times) > _SPLITS:
            self._times.pop(next(iter(self._times)))
        return True

    def _report(self) -> BatchReport:
        source = self._watch.source
        assert source is not None
        periods = tuple((each, times.median()) for each, times in self._times.items() if len(times.seconds) >= _FEWEST)
        return BatchReport(periods, payload_of(source.plan, max(self._recent_rows)), source.noise.scale)

    def _choose(self, reports: Sequence[BatchReport]) -> Decision | None:
        assert self.split is not None
        assert self._limits is not None
        tables = [dict(report.periods) for report in reports]
        common = [each for each in tables[0] if all(each in table for table in tables)]  # the present split comes last
        periods = [Period(each, tuple(table[each] for table in tables)) for each in common]
        if self.split not in common:
            return None
        model = fit(periods, [report.payload for report in reports])
        measured = [each.batch for each in common]
        split, value = choose(model, self.split, measured, self._limits, reports[0].noise_scale)
        grows = any(report.payload[1] > 0.0 for report in reports)
        fewer = any(after < before for after, before in zip(split.sizes, self.split.sizes, strict=True))
        return Decision(split, value, _SHRINKS_AFTER if grows and fewer else _LEFT_OUT)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what goes on after a restart: the split and the progress; the same at all sites."""
        split, progress = self.split or self._saved, self.progress
        if self._before is not None and self._watch.source is not None:  # a step that is not over yet, for the loader
            progress += (self._watch.source.traffic.steps - self._before[0]) * self._watch.source.gain
        sizes, micro_batches = ([], 1) if split is None else (list(split.sizes), split.micro_batches)
        return {"sizes": sizes, "micro_batches": micro_batches, "progress": progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; with another number of sites the batch is divided anew."""
        sizes, self.progress, self.split = tuple(state["sizes"]), state["progress"], None
        self._saved = BatchSplit(sizes, state["micro_batches"]) if sizes else None


def _gather(produce: Callable[[], _Item], transport: Transport) -> list[_Item]:
    """Gather what each site produces, or raise the error of a site at all of them, so that none waits for another."""
    item: _Item | str
    failure: Exception | None = None
    try:
        item = produce()
    except Exception as error:
        item, failure = f"{type(error).__name__}: {error}", error
    every = transport.gather_objects(item)
    for rank, each in enumerate(every):
        if isinstance(each, str):
            raise RuntimeError(f"{transport.sites[rank]} cannot choose the batch: {each}") from failure
    return every


def payload_of(plan: Any, rows: int) -> tuple[float, float]:
    """Return the bytes of a step that do not depend on the batch, and those for each of this site's samples.

    Args:
        plan: the plan, as of the last steps.
        rows: samples that its payloads have room for.
    """
    growing = [row for row in plan if row.path in ("factors", "activations") and len(row.shape) > 1]
    grows = sum(row.bytes for row in growing)
    return float(sum(row.bytes for row in plan) - grows), grows / max(1, rows)


def _counts(source: GradientSource) -> tuple[int, int, float]:
    traffic = source.traffic
    return traffic.steps, traffic.bytes_in_steps, traffic.wait_in_steps
