"""Tuner: measures on this machine which constants kernels and served models are fastest with, and keeps them.

`tune` runs all tasks, and writes the file of this machine's constants.
"""

from __future__ import annotations

import os
import random
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...lowrank import warmup
from ...serving import Model
from ...serving.loading import key_of, load_module
from ...support.logs import table
from ...support.progress import ProgressBar
from ...support.refusals import refuse
from ...support.schedules import Decoding, Encoding, Machine, Record, load, path_of, replaced, save
from .search import SAMPLES, Config, Found, Measure, Proof, Task, Timer, compare_in_pairs, search
from .tasks import (
    MNIST_NET,
    RATES,
    STARTS,
    AlgorithmTask,
    ChoiceTask,
    Layer,
    ServingTask,
    cases_for,
    fit_rates,
    layers_of,
    prediction_error,
    tasks_for,
)

__all__ = ["Row", "Tuning", "tune"]

_SHARE = 0.25  # of the configurations of a space that are measured at most
_LEAST = 10  # configurations that are measured in any case, if there are as many
_FOR_PAIRS = 0.4  # of a task's time
_REMEASURED = 3  # of the fastest configurations, before one is compared with the default

_SLACK = 0.5  # of the load, which daemons cause

_WIDTH = 60  # characters of the last column


@dataclass(frozen=True)
class Row:
    """Result of a task.

    Attributes:
        task: name of the task.
        default: the constants before.
        chosen: the constants from now on.
        measured: number of configurations that were measured.
        size: number of configurations of the space.
        seconds: median of the default's seconds.
        ratio: median of the seconds over those of the default in pairs; 1.0 where the default stays.
        candidate: ratio of the fastest configuration that was found, also where the default stays.
        pairs: number of pairs.
    """

    task: str
    default: Mapping[str, Any]
    chosen: Mapping[str, Any]
    measured: int
    size: int
    seconds: float
    ratio: float
    candidate: float
    pairs: int

    @property
    def changed(self) -> bool:
        """Whether the constants have changed."""
        return dict(self.default) != dict(self.chosen)

    def values(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Tuning:
    """Result of `dadplug.tune`.

    Attributes:
        rows: a row for each task.
        record: the constants that this machine has from now on.
        path: the file that they are in; None if they were not stored.
        points: by task, measured and predicted seconds of configurations that the model predicted before.
        notes: remarks, such as a backend that could not be tried.
    """

    rows: Sequence[Row]
    record: Record
    path: Path | None
    points: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def table(self) -> str:
        """Return what was tried and won, as text."""
        lines = [("task", "tried", "default", "time", "constants")]
        for row in self.rows:
            first, *further = textwrap.wrap(_change(row), _WIDTH) or [""]
            lines.append((row.task, f"{row.measured} of {row.size}", _duration(row.seconds), _gain(row), first))
            lines += [("", "", "", "", each) for each in further]
        stored = "not stored" if self.path is None else f"stored in {self.path}"
        return "\n".join([*table(lines), *(f"note: {each}" for each in self.notes), stored])


def _gain(row: Row) -> str:
    if not row.changed:
        return "as before"
    return f"{100 * (1 - row.ratio):.0f} % less" if row.pairs else "same choices"


def _duration(seconds: float) -> str:
    if seconds <= 0:
        return "-"
    return f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _change(row: Row) -> str:
    """Return the constants that have changed, or the ones that stay."""
    parts = []
    for name, value in row.chosen.items():
        before = row.default.get(name)
        parts.append(f"{name} {_short(value)}" if before == value else f"{name} {_short(before)} -> {_short(value)}")
    return ", ".join(parts)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return str(value)


@dataclass
class Tuner:
    """Runner of tasks.

    Args:
        measure: measures a configuration.
        seed: seed of the search.
        clock: returns the time in seconds.
        progress: where to show progress.

    Attributes:
        rows: results of the tasks so far.
        points: by task, measured and predicted seconds.
        notes: remarks.
    """

    measure: Measure
    seed: int
    clock: Callable[[], float]
    progress: ProgressBar
    rows: list[Row] = field(default_factory=list)
    points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self, task: Task, seconds: float) -> Config:
        """Search a task's space, compare the fastest configuration with the default, and add a row.

        Args:
            task: the task.
            seconds: time for it.

        Returns:
            The configuration from now on.
        """
        over = self.clock() + (1 - _FOR_PAIRS) * seconds
        size = len(task.space)
        budget = min(size + 1, max(_LEAST, round(_SHARE * size)))
        found = search(
            task,
            self.measure,
            budget,
            self.seed,
            enough=lambda: self.clock() > over,
            report=lambda count: self.progress.show(f"{task.name}: {count} of {budget}"),
        )
        self.points[task.name] = [(found.measured[each], value) for each, value in found.predicted.items()]
        chosen, outcome = self._prove(task, found)
        old, new = task.space.named(task.default), task.space.named(chosen)
        took = self.measure(task, task.default, SAMPLES) if outcome is None else outcome.default
        self._add(task.name, old, new, (len(found.measured), size), took, outcome)
        text = "as before"
        if outcome is not None and chosen != task.default:
            text = f"{100 * (1 - outcome.ratio):.0f} % less time"
        self.progress.report(f"{task.name}: {text}")
        return chosen

    def _prove(self, task: Task, found: Found) -> tuple[Config, Proof | None]:
        """Return the configuration from now on, and its comparison with the default."""
        fastest = sorted(found.measured, key=found.measured.__getitem__)[:_REMEASURED]
        again = {each: self.measure(task, each, SAMPLES) for each in fastest}
        best = min(again, key=lambda each: again[each] + found.measured[each])
        if best == task.default:
            return task.default, None
        self.progress.show(f"{task.name}: compared with the default")
        outcome = compare_in_pairs(task, best, self.measure)
        return (best if outcome.holds else task.default), outcome

    def _add(
        self,
        name: str,
        old: Mapping[str, Any],
        new: Mapping[str, Any],
        counts: tuple[int, int],
        seconds: float,
        outcome: Proof | None,
    ) -> None:
        """Add a row: constants before and after, numbers of configurations, seconds, and the comparison."""
        candidate, pairs = (1.0, 0) if outcome is None else (outcome.ratio, outcome.pairs)
        ratio = candidate if old != new else 1.0
        self.rows.append(Row(name, old, new, *counts, seconds, ratio, candidate, pairs))

    def fit(self, task: AlgorithmTask, seconds: float) -> Encoding:
        """Fit the rates of the cost model; keep them if they predict better, and choices by them are not slower.

        Args:
            task: the algorithms, with the rates today.
            seconds: time for it.
        """
        over = self.clock() + (1 - _FOR_PAIRS) * seconds
        configs = task.space.configs()
        tried = sorted(configs, key=task.prior)[: 3 * len(configs) // 4]  # the slowest are never chosen
        random.Random(self.seed).shuffle(tried)
        measured: dict[Config, float] = {}
        for config in tried:
            if self.clock() > over and len(measured) >= 2 * len(RATES + STARTS):
                break
            measured[config] = self.measure(task, config, SAMPLES)
            self.progress.show(f"{task.name}: {len(measured)} of {len(tried)}")
        default, fitted = task.constants, fit_rates(task, measured)
        predicting = AlgorithmTask(task.cases, fitted)
        self.points[task.name] = [(took, predicting.prior(config)) for config, took in measured.items()]
        choices = ChoiceTask(task, default, fitted)
        same = choices.chosen(("default",)) == choices.chosen(("fitted",))
        outcome = None if same else compare_in_pairs(choices, ("fitted",), self.measure)
        nearer = prediction_error(task, measured, fitted) < prediction_error(task, measured, default)
        keep = nearer and (outcome is None or outcome.ratio <= 1.0)
        names = (*RATES, *STARTS)
        old, new = ({name: each.values()[name] for name in names} for each in (default, fitted))
        took = self.measure(choices, choices.default, SAMPLES)
        self._add(task.name, old, new if keep else old, (len(measured), len(configs)), took, outcome)
        self.progress.report(f"{task.name}: {'rates fitted' if keep else 'as before'}")
        return fitted if keep else default


def tune(
    model: nn.Module | str | Path | None = None,
    seconds: float = 60.0,
    *,
    input_shape: Sequence[int | None] | None = None,
    builder: str | None = None,
    rows: int = 16,
    store: bool = True,
    busy: bool = False,
    seed: int = 0,
    progress: bool = True,
    timer: Measure | None = None,
    defaults: Record | None = None,
) -> Tuning:
    """Measure which constants the kernels are fastest with on this machine, and store them for later starts.

    Constants are searched by measurements that a learned model of run time chooses. The fastest configuration of each
    task is compared with the default in 30 alternating pairs; the default stays unless the other is really faster.
    Later processes with the same processor, number of threads and versions use the stored constants. This process goes
    on with those that it has.

    Args:
        model: a model whose layers are measured; those of MNISTNet if None. The path of a file that `dadplug.serve`
            takes, or a module, is also tuned for serving if `input_shape` is given.
        seconds: time limit, about.
        input_shape: shape of one input of the model, of numbers, for serving.
        builder: builder of the model in a file, as `dadplug.serving.Model` takes it.
        rows: rows of the layers' factors: samples of a batch.
        store: whether to write the file, unless the machine becomes busy meanwhile.
        busy: whether to measure and store on a busy machine, too.
        seed: seed of the search.
        progress: whether to show progress on standard error.
        timer: measures a configuration in place of the clock, for tests.
        defaults: constants to begin with in place of the built-in ones, for tests.

    Returns:
        What was tried and won.

    Raises:
        ValueError: if an argument is not valid, a model cannot be loaded, DADPLUG_TUNING switches files off, or the
            machine is busy.
        OSError: if the file cannot be written.

    Example:
        >>> print(dadplug.tune(seconds=30).table())
    """
    _check(seconds, rows, model is not None, builder, input_shape, store)
    watched = store and timer is None and not busy
    if isinstance(model, (str, Path)):
        model = load_module(Model(model, builder=builder).description())
    if timer is None:
        if watched and (why := _busy(torch.get_num_threads())):
            raise ValueError(f"{why}. End what else runs, wait a minute, or pass busy=True (--busy)")
        warmup()  # compiles kernels outside of the time limit
    tuner = Tuner(timer or Timer(), seed, time.perf_counter, ProgressBar(seconds, shown=progress))
    shape = None if input_shape is None else tuple(size for size in input_shape if size is not None)
    record = _run_tasks(tuner, model, shape, rows, seconds, defaults or Record())
    record, path = _store(record, tuner, watched) if store else (record, None)
    return Tuning(tuner.rows, replace(record, tuned=True), path, tuner.points, tuner.notes)


def _store(record: Record, tuner: Tuner, watched: bool) -> tuple[Record, Path | None]:
    """Write the constants, unless the machine has become busy; what was tuned for other models stays."""
    if watched and (reason := _busy(0)):
        tuner.notes.append(f"{reason}: nothing is stored")
        return record, None
    machine = Machine.this()
    record = replace(record, served={**load(machine).served, **record.served})
    return record, save(record, machine, [row.values() for row in tuner.rows])


def _busy(threads: int) -> str:
    """Return why so many further threads would not have a processor each; empty if they have."""
    load, count = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    text = f"this machine is busy: its load is {load:.1f}, and it has {count} processors for {threads or 'the'} threads"
    return text if load + threads > count + _SLACK else ""


def _check(
    seconds: float, rows: int, has_model: bool, builder: str | None, shape: Sequence[int | None] | None, store: bool
) -> None:
    refuse(
        (not seconds > 0, f"seconds has to be positive, not {seconds}"),
        (rows < 1, f"rows has to be at least 1, not {rows}"),
        ((builder or shape) and not has_model, "a builder or a shape of inputs is for a model: give the model, too"),
        (
            not all(isinstance(size, int) and size > 0 for size in shape or ()),
            f"input_shape has to be of sizes that do not vary, not {tuple(shape or ())}",
        ),
        (
            store and path_of(Machine.this()) is None,
            "DADPLUG_TUNING switches tuned constants off: unset it, or pass store=False",
        ),
    )


def _run_tasks(
    tuner: Tuner, model: nn.Module | None, shape: tuple[int, ...] | None, rows: int, seconds: float, start: Record
) -> Record:
    """Run the tasks of the kernels, and that of serving if there is a shape; return the constants."""
    layers = MNIST_NET if model is None else layers_of(model, rows)
    share = seconds if shape is None else seconds / 2
    with replaced(start):
        record = _tune_kernels(tuner, layers, start, share) if layers else start
        if model is not None and shape is not None:
            record = _tune_serving(tuner, model, shape, record, share)
    tuner.progress.close()
    return record


def _tune_serving(tuner: Tuner, model: nn.Module, shape: tuple[int, ...], record: Record, seconds: float) -> Record:
    """Run the task of a served model, and return the constants with its way."""
    tuner.progress.show("served model: ways are prepared")
    over = tuner.clock() + seconds / 2
    task = ServingTask(model, shape, lambda: tuner.clock() > over)
    tuner.notes += task.notes
    way = task.way(tuner.run(task, max(0.1 * seconds, over + seconds / 2 - tuner.clock())))
    return replace(record, served={**record.served, key_of(model): way})


def _tune_kernels(tuner: Tuner, layers: Sequence[Layer], start: Record, seconds: float) -> Record:
    """Run the tasks of the kernels, and return the constants."""
    decoding, encoding = start.decoding.values(), start.encoding.values()
    tasks = tasks_for(layers, start.decoding, start.encoding)
    share = seconds / (len(tasks) + 1)
    for task in tasks:
        best = task.space.named(tuner.run(task, share))
        (encoding if set(best) <= set(encoding) else decoding).update(best)
    algorithms = AlgorithmTask(cases_for(layers), Encoding.of(encoding))
    fitted = tuner.fit(algorithms, share)
    return replace(start, decoding=Decoding.of(decoding), encoding=fitted, tuned=True)
