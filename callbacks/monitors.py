"""Monitors, the part of the callbacks that is the same for all trainers: they measure batches and return values."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ..adaptive import AdaptiveDataLoader
from ..adaptive.adaptive_loader import adaptive_loader
from ..errors import MismatchError
from ..privacy.mechanism import check_delta
from ..reduction import GradientReduction
from ..support.progress import new_figure
from ..support.refusals import refuse


class Means:
    """Running means by name."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, values: Mapping[str, float], *, totals: bool = False) -> None:
        """Add one value for each name.

        Args:
            values: the values.
            totals: whether they replace earlier ones, in place of a mean.
        """
        for name, value in values.items():
            if totals:
                self._sums[name], self._counts[name] = 0.0, 0
            self._sums[name] += value
            self._counts[name] += 1

    def take(self) -> dict[str, float]:
        """Return the means, and reset them."""
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        self._sums.clear()
        self._counts.clear()
        return means


class Monitor:
    """Base of monitors, which measure batches and return values to log; a batch may have one step, several, or none.

    Attributes:
        on_every_batch: whether `end` is called for batches outside of training, too.
        of_layers: whether there are values for each layer, too many for a progress bar.
        totals: whether values grow over training, so that the last one counts, and no mean.
        shown: names of the values that the progress bar shows.
    """

    on_every_batch = False
    of_layers = False
    totals = False
    shown: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._seen: tuple[int, int, float] = (0, 0, 0.0)
        self._reduction: GradientReduction | None = None

    def start(self) -> None:
        """Start a loader."""

    def begin(self) -> None:
        """Start a batch, whose data has been loaded."""

    def end(self, reduction: GradientReduction | None, samples: int) -> dict[str, float]:
        """End a batch.

        Args:
            reduction: reduction of the model in training; None if there is none.
            samples: number of samples of the batch on this site.

        Returns:
            Values to log, by name.
        """
        if reduction is None:
            return {}
        if reduction is not self._reduction:
            self._reduction, self._seen = reduction, (0, 0, 0.0)
        traffic, (steps, nbytes, wait) = reduction.traffic, self._seen
        if traffic.steps == steps:
            return {}
        self._seen = traffic.steps, traffic.bytes_in_steps, traffic.wait_in_steps
        now_steps, now_bytes, now_wait = self._seen
        return self.end_steps(reduction, now_steps - steps, now_bytes - nbytes, now_wait - wait)

    def end_steps(self, reduction: GradientReduction, steps: int, nbytes: int, wait: float) -> dict[str, float]:
        """End a batch that had steps.

        Args:
            reduction: reduction of the model in training.
            steps: number of steps in the batch.
            nbytes: payload bytes that this site has sent in them.
            wait: seconds that this site has waited for other sites in them.

        Returns:
            Values to log, by name.
        """
        raise NotImplementedError


class BatchTimer(Monitor):
    """Monitor of the time of batches.

    Values, in seconds: ``_timer/data_time`` (loading the batch), ``_timer/model_time`` (forward to optimizer step
    without waiting), ``_timer/exchange_time`` (waiting for other sites) and ``_timer/batch_time`` (their sum); and
    ``_timer/_fps``, the samples of this site per second.
    """

    on_every_batch = True

    def __init__(self) -> None:
        super().__init__()
        self._ended = self._began = time.perf_counter()
        self._waited = 0.0

    def start(self) -> None:
        self._ended = time.perf_counter()

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self, reduction: GradientReduction | None, samples: int) -> dict[str, float]:
        now = time.perf_counter()
        self._waited = 0.0
        super().end(reduction, samples)
        data, work, whole = self._began - self._ended, now - self._began, now - self._ended
        self._ended = now
        return {
            "_timer/data_time": data,
            "_timer/model_time": work - self._waited,
            "_timer/exchange_time": self._waited,
            "_timer/batch_time": whole,
            "_timer/_fps": samples / max(whole, 1e-9),
        }

    def end_steps(self, reduction: GradientReduction, steps: int, nbytes: int, wait: float) -> dict[str, float]:
        self._waited = wait
        return {}


class TrafficMonitor(Monitor):
    """Monitor of the traffic between sites.

    Values: ``traffic/mb``, the megabytes that this site sends per step; ``traffic/ratio``, the factor by which an
    all-reduce of all gradients would send more; ``traffic/wait``, the seconds per step that it waits for other sites;
    and ``traffic/mb_per_s``, the megabytes that it sends per second.
    """

    shown = ("traffic/mb_per_s", "traffic/ratio")

    def __init__(self) -> None:
        super().__init__()
        self._ended = time.perf_counter()

    def start(self) -> None:
        self._ended = time.perf_counter()

    def end_steps(self, reduction: GradientReduction, steps: int, nbytes: int, wait: float) -> dict[str, float]:
        before, self._ended = self._ended, time.perf_counter()
        return {
            "traffic/mb": nbytes / steps / 1e6,
            "traffic/ratio": reduction.traffic.dense_bytes * steps / nbytes if nbytes else 1.0,
            "traffic/wait": wait / steps,
            "traffic/mb_per_s": nbytes / 1e6 / max(self._ended - before, 1e-9),
        }


class PrivacyMonitor(Monitor):
    """Monitor of what training has cost the records of this site, by `GradientReduction.epsilon`.

    Value: ``privacy/epsilon``, after the first step and every some steps. The status of a hub gets it, too.

    Args:
        delta: the delta, below one over the number of the site's records.
        every: number of steps between two values; one takes up to some tenths of a second.

    Raises:
        ValueError: if a value is out of its range; in training, if the reduction has no `privacy`.
    """

    totals = True
    shown = ("privacy/epsilon",)

    def __init__(self, delta: float, every: int = 100) -> None:
        super().__init__()
        check_delta(delta)
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._delta, self._every = delta, every
        self._measured: GradientReduction | None = None

    def end_steps(self, reduction: GradientReduction, steps: int, nbytes: int, wait: float) -> dict[str, float]:
        if reduction is self._measured and reduction.step % self._every >= steps:
            return {}
        self._measured = reduction
        return {"privacy/epsilon": reduction.epsilon(self._delta)}


class RankMonitor(Monitor):
    """Monitor of the quality of compressed gradients.

    Values: for each layer ``rank/LAYER``, the effective rank that this site sends, ``residual/LAYER``, the relative
    error of its compressed gradient (Frobenius norm), and ``kept/LAYER``, the number of components that it keeps for
    the next step, 0 where it keeps all in a matrix; and their means over layers, ``rank/mean``, ``residual/mean`` and
    ``kept/mean``. Methods without a rank have no values.
    """

    of_layers = True

    def end_steps(self, reduction: GradientReduction, steps: int, nbytes: int, wait: float) -> dict[str, float]:
        values: dict[str, float] = {}
        qualities = reduction.quality
        for name, quality in qualities.items():
            layer = name.removesuffix(".weight")
            values[f"rank/{layer}"] = float(quality.effective_rank)
            values[f"residual/{layer}"] = quality.residual
            values[f"kept/{layer}"] = float(quality.kept)
        for kind in ("rank", "residual", "kept") if qualities else ():
            own = [value for name, value in values.items() if name.startswith(f"{kind}/")]
            values[f"{kind}/mean"] = sum(own) / len(own)
        return values


class RankSchedule(Monitor):
    """Schedule of the rank of compressed gradients.

    Value: ``rank/limit``, the largest rank that is sent.

    Args:
        steps: rank as a function of the step, or as a table from the first step of each rank to the rank.
        residual: target in place of `steps`: mean relative error over layers, on the site where it is largest. The rank
            grows if the error is larger than the target, and shrinks if it is smaller by more than a tenth.
        every: number of steps between two changes by the residual.
        min_rank: smallest rank, with `residual`.
        max_rank: largest rank, with `residual`.

    Raises:
        ValueError: if neither or both of `steps` and `residual` are given, or a value is out of its range; in training,
            if the mode has no rank.
    """

    def __init__(
        self,
        steps: Mapping[int, int] | Callable[[int], int] | None = None,
        *,
        residual: float | None = None,
        every: int = 50,
        min_rank: int = 1,
        max_rank: int = 64,
    ) -> None:
        super().__init__()
        refuse(
            ((steps is None) == (residual is None), "a rank schedule goes by steps= or by residual=: give one of them"),
            (
                residual is not None and not 0 < residual < 1,
                f"residual must lie between 0 and 1, got {residual!r}",
            ),
            (
                every < 1 or not 1 <= min_rank <= max_rank,
                f"need every >= 1 and 1 <= min_rank <= max_rank, got {every}, {min_rank}, {max_rank}",
            ),
        )
        self._table = steps
        self._residual = residual
        self._every = every
        self._range = (min_rank, max_rank)

    def rank_at(self, step: int) -> int | None:
        """Return the rank for a step by the table or function; None before the table's first step.

        Args:
            step: number of the step, from 0.
        """
        if callable(self._table):
            return int(self._table(step))
        table = self._table or {}
        reached = [begin for begin in table if begin <= step]
        return table[max(reached)] if reached else None

    def end_steps(self, reduction: GradientReduction, steps: int, nbytes: int, wait: float) -> dict[str, float]:
        rank = reduction.max_rank
        if rank is None:
            raise ValueError(f"mode {reduction.options.mode!r} has no rank for a rank schedule to set")
        if self._residual is None:
            rank = self.rank_at(reduction.step) or rank
        elif reduction.step % self._every < steps:
            rank = self._by_residual(reduction, rank, self._residual)
        reduction.max_rank = rank
        return {"rank/limit": float(rank)}

    def _by_residual(self, reduction: GradientReduction, rank: int, target: float) -> int:
        residuals = [quality.residual for quality in reduction.quality.values()]
        own = sum(residuals) / len(residuals) if residuals else 0.0
        every = reduction.gather_objects(own, float, "residual")
        worst = max(each for each in every if each is not None)  # None for sites that are absent
        if worst > target:
            rank = max(rank + 1, round(1.25 * rank))
        elif worst < 0.9 * target:
            rank = min(rank - 1, round(rank / 1.25))
        return min(max(rank, self._range[0]), self._range[1])


class AdaptiveBatchSize(Monitor):
    """Batch that follows the goodput of training, see `dadplug.AdaptiveDataLoader`.

    The training loader's data are divided over the sites anew, and its batch begins as that of all sites together.
    Every sample is used once in an epoch, whatever the batches are.

    Values: ``batch/size`` and ``batch/local``, the samples of all sites and of this site in a step; ``batch/gain``, the
    steps of the first batch that a step is worth; ``batch/noise_scale`` in samples; ``batch/goodput``, the predicted
    samples of the first batch per second; and ``batch/progress``, the sum of the gains.

    Args:
        max_batch_size: largest batch of all sites together.
        local_bsz_bounds: least and most samples of this site in a batch; None for no bound.

    Attributes:
        loader: the loader; None before training.
        history: the values of every step.

    Raises:
        ValueError: in training, if bounds contradict each other or the batch of the loader, or if its batches are not
            those of a DataLoader with a ``batch_size``.
    """

    shown = ("batch/size",)

    def __init__(self, max_batch_size: int, local_bsz_bounds: tuple[int | None, int | None] | None = None) -> None:
        super().__init__()
        self._limits = (max_batch_size, local_bsz_bounds)
        self._saved: dict[str, Any] | None = None
        self.loader: AdaptiveDataLoader | None = None
        self.history: list[dict[str, float]] = []

    def convert(self, loader: Any, sites: int, seed: int) -> AdaptiveDataLoader:
        """Return the adaptive loader that replaces a training loader.

        Args:
            loader: the loader of one site.
            sites: number of sites.
            seed: seed of the order.
        """
        self.loader = adaptive_loader(loader, sites, seed)
        self.loader.autoscale_batch_size(*self._limits)
        if self._saved is not None:
            self.loader.load_state_dict(self._saved)
        return self.loader

    def state_dict(self) -> dict[str, Any]:
        """Return the batch and the progress."""
        return {} if self.loader is None else self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._saved = dict(state) or None
        if self.loader is not None and self._saved is not None:
            self.loader.load_state_dict(self._saved)

    def end_steps(self, reduction: GradientReduction, steps: int, nbytes: int, wait: float) -> dict[str, float]:
        if self.loader is None:
            return {}
        values = {
            "batch/size": float(self.loader.current_batch_size),
            "batch/local": float(self.loader.local_batch_size),
            "batch/gain": reduction.gain,
            "batch/noise_scale": reduction.noise.scale,
            "batch/goodput": self.loader.goodput,
            "batch/progress": self.loader.progress,
        }
        self.history.append(values)
        return {name: value for name, value in values.items() if not math.isnan(value)}

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draw batch, gain, noise scale and goodput over the steps.

        Args:
            path: path of the PNG file.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        shown = {"batch/size": "batch", "batch/gain": "gain", "batch/noise_scale": "noise scale, samples"}
        shown["batch/goodput"] = "goodput, samples/s"
        figure = new_figure(7, 7)
        panels = figure.subplots(len(shown), 1, sharex=True)
        for panel, (name, label) in zip(panels, shown.items(), strict=True):
            panel.step(range(len(self.history)), [values[name] for values in self.history], where="post")
            panel.set_ylabel(label)
            panel.margins(y=0.1)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
        panels[-1].set_xlabel("step")
        figure.savefig(path, dpi=110)


class ReplicaCheck(Monitor):
    """Check that the sites' parameters are bitwise equal.

    Args:
        every: number of steps between two checks; the cost of a check is about that of reading all parameters.

    Raises:
        ValueError: if `every` is less than 1.
        MismatchError: in training, on all sites, if a parameter differs; the message contains its name.
    """

    def __init__(self, every: int = 100) -> None:
        super().__init__()
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._every = every

    def end_steps(self, reduction: GradientReduction, steps: int, nbytes: int, wait: float) -> dict[str, float]:
        if reduction.step % self._every < steps:
            name = reduction.first_difference()
            if name is not None:
                raise MismatchError(
                    f"the sites' replicas are no longer equal after step {reduction.step}: {name} differs. Was it "
                    "changed outside of the optimizer, or do the sites compute on different machines or versions?"
                )
        return {}


EXAMPLES: dict[type[Monitor], str] = {
    BatchTimer: "BatchTimer{}()",
    TrafficMonitor: "TrafficMonitor{}()",
    PrivacyMonitor: "PrivacyMonitor{}(delta=1e-5)",
    RankMonitor: "RankMonitor{}()",
    RankSchedule: "RankSchedule{}({{0: 16, 1000: 8}})",
    ReplicaCheck: "ReplicaCheck{}(every=100)",
    AdaptiveBatchSize: "AdaptiveBatchSize{}(1024, local_bsz_bounds=(16, 256))",
}
"""The monitors of which each trainer has a callback, with the calls in the documentation's examples."""


class Adapter:
    """Base of the adapters that make monitors a callback of a trainer; the constructor takes the first one's arguments.

    Args:
        args: arguments of the first monitor.
        settings: its keywords.
    """

    kinds: tuple[type[Monitor], ...]
    _of_trainer: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the trainer's own class."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(**self._of_trainer)
        first, *others = self.kinds
        self._monitors: list[Any] = [first(*args, **settings), *(kind() for kind in others)]
        self._means = Means()

    def _start(self, *_: Any, **__: Any) -> None:
        """Start a pass over the data."""
        for monitor in self._monitors:
            monitor.start()

    def _begin(self, *_: Any, **__: Any) -> None:
        """Start a batch or step."""
        for monitor in self._monitors:
            monitor.begin()


def build_adapters(
    bases: Callable[[type[Monitor]], tuple[type, ...]],
    module: str,
    call: str,
    suffix: str = "",
    *,
    with_ranks: bool = False,
) -> list[Any]:
    """Build the callbacks of a trainer, one for each monitor, in the order of `EXAMPLES`.

    Args:
        bases: the base classes for a monitor, such as an adapter and the trainer's own class.
        module: name of the module that contains the callbacks.
        call: the documentation's example, with ``{}`` for the call of a callback.
        suffix: end of the callbacks' names.
        with_ranks: whether the callback for traffic also has the means of ranks.
    """
    built = []
    for kind, example in EXAMPLES.items():
        more = "\n\n    The callback also logs the means of `RankMonitor`."
        added = (RankMonitor,) if with_ranks and kind is TrafficMonitor else ()
        text = (kind.__doc__ or "").rstrip() + more * len(added)
        text += f"\n\n    Example:\n        >>> {call.format(example.format(suffix))}\n    "
        members = {"kinds": (kind, *added), "__doc__": text, "__module__": module}
        built.append(type(kind.__name__ + suffix, bases(kind), members))
    return built
