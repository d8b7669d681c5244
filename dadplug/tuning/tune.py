"""The function `dadplug.tune`: all tasks, and the file of this machine's constants."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from ..lowrank import warmup
from ..schedules import Decoding, Encoding, Machine, Record, load, path_of, replaced, save
from ..serving import Model
from ..serving.loading import load_module
from ..serving.schedule import key_of
from . import kernel_tasks, rates
from .progress import Progress
from .result import Tuning
from .serving_task import ServingTask
from .task import Measure
from .timer import Timer
from .tuner import Tuner


def tune(
    model: nn.Module | str | Path | None = None,
    seconds: float = 60.0,
    *,
    input_shape: Sequence[int | None] | None = None,
    builder: str | None = None,
    rows: int = 16,
    store: bool = True,
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
        store: whether to write the file.
        seed: seed of the search.
        progress: whether to show progress on standard error.
        timer: measures a configuration in place of the clock, for tests.
        defaults: constants to begin with in place of the built-in ones, for tests.

    Returns:
        What was tried and won.

    Raises:
        ValueError: if an argument is not valid, a model cannot be loaded, or DADPLUG_TUNING switches files off.
        OSError: if the file cannot be written.

    Example:
        >>> print(dadplug.tune(seconds=30).table())
    """
    _check(seconds, rows, has_model=model is not None, for_models=bool(builder or input_shape))
    machine = Machine.this()
    if store and path_of(machine) is None:
        raise ValueError("DADPLUG_TUNING switches tuned constants off: unset it, or pass store=False")
    if isinstance(model, (str, Path)):
        model = load_module(Model(model, builder=builder).description())
    shape = None if model is None or input_shape is None else _fixed(input_shape)
    wall = Timer()
    if timer is None:
        warmup()  # kernels are compiled outside of the time limit
    tuner = Tuner(timer or wall, timer or wall.once, seed, time.perf_counter, Progress(seconds, shown=progress))
    record = _run_tasks(tuner, model, shape, rows, seconds, defaults or Record())
    if store:  # what was tuned for other models stays
        record = replace(record, served={**load(machine).served, **record.served})
    path = save(record, machine, [row.values() for row in tuner.rows]) if store else None
    return Tuning(tuner.rows, replace(record, tuned=True), path, tuner.points, tuner.notes)


def _check(seconds: float, rows: int, *, has_model: bool, for_models: bool) -> None:
    if seconds <= 0:
        raise ValueError(f"seconds has to be positive, not {seconds}")
    if rows < 1:
        raise ValueError(f"rows has to be at least 1, not {rows}")
    if for_models and not has_model:
        raise ValueError("a builder or a shape of inputs is for a model: give the model, too")


def _run_tasks(
    tuner: Tuner, model: nn.Module | None, shape: tuple[int, ...] | None, rows: int, seconds: float, start: Record
) -> Record:
    """Run the tasks of the kernels, and that of serving if there is a shape; return the constants."""
    layers = kernel_tasks.MNIST_NET if model is None else kernel_tasks.layers_of(model, rows)
    share = seconds if shape is None else seconds / 2
    with replaced(start):
        record = _tune_kernels(tuner, layers, start, share) if layers else start
        if model is not None and shape is not None:
            record = _tune_serving(tuner, model, shape, record, share)
    tuner.progress.close()
    return record


def _fixed(shape: Sequence[int | None]) -> tuple[int, ...]:
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise ValueError(f"input_shape has to be of sizes that do not vary, not {tuple(shape)}")
    return tuple(size for size in shape if size is not None)


def _tune_serving(tuner: Tuner, model: nn.Module, shape: tuple[int, ...], record: Record, seconds: float) -> Record:
    """Run the task of a served model, and return the constants with its way."""
    tuner.progress.show("served model: ways are prepared")
    over = tuner.clock() + seconds / 2
    task = ServingTask(model, shape, lambda: tuner.clock() > over)
    tuner.notes += task.notes
    way = task.way(tuner.run(task, max(0.1 * seconds, over + seconds / 2 - tuner.clock())))
    return replace(record, served={**record.served, key_of(model): way})


def _tune_kernels(tuner: Tuner, layers: Sequence[kernel_tasks.Layer], start: Record, seconds: float) -> Record:
    """Run the tasks of the kernels, and return the constants."""
    decoding, encoding = start.decoding.values(), start.encoding.values()
    tasks = kernel_tasks.tasks_for(layers, start.decoding, start.encoding)
    share = seconds / (len(tasks) + 1)
    for task in tasks:
        best = task.space.named(tuner.run(task, share))
        (encoding if set(best) <= set(encoding) else decoding).update(best)
    algorithms = rates.AlgorithmTask(rates.cases_for(layers), Encoding.of(encoding))
    fitted = tuner.fit(algorithms, share)
    return replace(start, decoding=Decoding.of(decoding), encoding=fitted, tuned=True)
