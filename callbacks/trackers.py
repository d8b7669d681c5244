"""Trackers of training outside of a trainer: what a reduction exchanges, written to CSV, TensorBoard, MLflow or W&B."""

from __future__ import annotations

import atexit
import csv
import importlib
import os
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..ddp import DistributedDataParallel
from ..reduction import GradientReduction
from ..support.files import replacing
from ..support.logs import get_logger
from ..support.refusals import refuse
from ..support.registry import Registry
from .monitors import RankMonitor, TrafficMonitor

_log = get_logger(__name__)
_WAITING = 1000  # entries that may wait for a slow tracker
_CLOSING = 10.0  # seconds for what is left at the end


class Tracker(ABC):
    """Destination of values by step; the base of those that `track` knows by name, and of the user's own.

    Its methods are called in a thread of their own, so that a slow server does not hold up the training. The
    constructor is called in the training thread; it raises an error if values cannot be written there.
    """

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write values.

        Args:
            values: the values by name, such as ``"traffic/mb"``.
            step: number of steps that have been agreed on.
        """

    def close(self) -> None:  # noqa: B027  (some have nothing to close)
        """End the record; called once."""


TRACKERS: Registry[str, type[Tracker]] = Registry("tracker")
"""Trackers by name; ``@TRACKERS.register("name")`` adds a subclass of `Tracker`."""


@TRACKERS.register("csv")
class CSVTracker(Tracker):
    """Tracker that writes a file with a row for each record, and a column for each name.

    Rows are added to a file that exists. If a name is new, the file is written anew with one more column.

    Args:
        path: path of the file.
    """

    def __init__(self, path: str | os.PathLike[str] = "metrics.csv") -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+", newline="") as file:
            file.seek(0)
            self._names = next(csv.reader(file), [])

    def log(self, values: Mapping[str, float], step: int) -> None:
        row = {"step": step, **values}
        if new := [name for name in row if name not in self._names]:
            self._add_columns(new)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._names).writerow(row)

    def _add_columns(self, names: list[str]) -> None:
        with self._path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        self._names = [*self._names, *names]
        temporary = self._path.with_name(f"{self._path.name}.new")
        with replacing(self._path, temporary, durable=False), temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._names)
            writer.writeheader()
            writer.writerows(rows)


@TRACKERS.register("tensorboard")
class TensorBoardTracker(Tracker):
    """Tracker that writes event files, by ``tensorboard`` or ``tensorboardX``, whichever is installed.

    Args:
        log_dir: folder of the event files.
        writer: a SummaryWriter of the program to use in place of a new one; it is not closed.
    """

    def __init__(self, log_dir: str | os.PathLike[str] = "runs/dadplug", *, writer: Any = None) -> None:
        self._owned = writer is None
        self._writer = _summary_writer()(os.fspath(log_dir)) if writer is None else writer

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._owned:
            self._writer.close()


@TRACKERS.register("mlflow")
class MLflowTracker(Tracker):
    """Tracker that writes metrics of an MLflow run.

    Args:
        tracking_uri: address of a server or a store, such as ``"sqlite:///mlflow.db"``; None for MLflow's choice.
        experiment: name of the experiment of a new run.
        run_id: a run to write to; None for the active run of the program, or a new one, which ends with the tracker.
        run_name: name of a new run.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        experiment: str = "dadplug",
        run_id: str | None = None,
        run_name: str | None = None,
    ) -> None:
        mlflow = _package("mlflow")
        active = mlflow.active_run() if run_id is None and tracking_uri is None else None
        self._client = mlflow.MlflowClient(tracking_uri)
        self._metric = importlib.import_module("mlflow.entities").Metric
        self._owned = run_id is None and active is None
        self.run_id = active.info.run_id if active is not None else run_id
        if self._owned:
            found = self._client.get_experiment_by_name(experiment)
            number = self._client.create_experiment(experiment) if found is None else found.experiment_id
            self.run_id = self._client.create_run(number, run_name=run_name).info.run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(1e3 * time.time())
        self._client.log_batch(self.run_id, [self._metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        if self._owned:
            self._client.set_terminated(self.run_id)


@TRACKERS.register("wandb")
class WandbTracker(Tracker):
    """Tracker that writes to the program's run of Weights & Biases, or to a new one, which ends with the tracker.

    The values have an axis of their own, ``dadplug/step``, so that the program may log by other steps.

    Args:
        settings: arguments of ``wandb.init`` for a new run, such as ``project="study", mode="offline"``.
    """

    def __init__(self, **settings: Any) -> None:
        wandb = _package("wandb")
        self._owned = wandb.run is None
        self._run = wandb.init(**settings) if wandb.run is None else wandb.run
        self._known: set[str] = set()
        self._run.define_metric("dadplug/step", hidden=True)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name in values.keys() - self._known:
            self._run.define_metric(name, step_metric="dadplug/step")
        self._known |= values.keys()
        self._run.log({**values, "dadplug/step": step})

    def close(self) -> None:
        if self._owned:
            self._run.finish()


def _package(name: str) -> Any:
    """Import a tracker's package.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"the tracker {name!r} needs the package of this name: pip install {name}") from error


def _summary_writer() -> Any:
    for package in ("torch.utils.tensorboard", "tensorboardX"):
        with suppress(ImportError):
            return importlib.import_module(package).SummaryWriter
    raise ImportError("the tracker 'tensorboard' needs a package: pip install tensorboard, or tensorboardX")


class Tracking:
    """Record of a training that is under way, see `track`; a context manager that ends it.

    Values: those of `dadplug.callbacks.monitors.TrafficMonitor`; ``traffic/total_mb``, the megabytes that this site has
    sent since the start; ``step/seconds``, the time of a step; ``sites/present``, the number of sites in the last step;
    and the means of `dadplug.callbacks.monitors.RankMonitor`, or with `layers` also its values for each layer. Those
    that are per step are means since the last record.

    Args:
        reduction: the reduction.
        tracker: where values are written; None at sites that write nothing.
        every: number of steps between two records.
        layers: whether to write the values of each layer.
    """

    def __init__(self, reduction: GradientReduction, tracker: Tracker | None, every: int, layers: bool) -> None:
        self._reduction, self._tracker, self._every, self._layers = weakref.ref(reduction), tracker, every, layers
        self._traffic, self._ranks = TrafficMonitor(), RankMonitor()
        self._since, self._steps = time.perf_counter(), 0
        self._waiting: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(_WAITING)
        self._stopped = tracker is None  # or broken
        self._thread = threading.Thread(target=self._write, name="dadplug tracker", daemon=True)
        if tracker is not None:
            reduction.after_step.append(self.end_step)
            self._thread.start()
            atexit.register(self.stop)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def log(self, values: Mapping[str, float]) -> None:
        """Write values of the program beside those of the exchange, such as the loss, for the present step.

        Args:
            values: the values by name.
        """
        reduction = self._reduction()
        if reduction is not None:
            self._put({name: float(value) for name, value in values.items()}, reduction.step)

    def end_step(self) -> None:
        """Record a step that has ended; the reduction calls it."""
        reduction = self._reduction()
        self._steps += 1
        if reduction is None or self._stopped or self._steps < self._every:
            return
        now, steps = time.perf_counter(), self._steps
        values = {"step/seconds": (now - self._since) / steps, "sites/present": float(len(reduction.present_sites))}
        self._since, self._steps = now, 0
        values |= self._traffic.end(reduction, 0)
        values["traffic/total_mb"] = reduction.traffic.total_bytes_sent / 1e6
        ranks = self._ranks.end(reduction, 0)
        values |= {name: value for name, value in ranks.items() if self._layers or name.endswith("/mean")}
        self._put(values, reduction.step)

    def _put(self, values: dict[str, float], step: int) -> None:
        if self._stopped:
            return
        try:
            self._waiting.put_nowait((values, step))
        except queue.Full:
            self._give_up(f"{_WAITING} records wait for it")

    def _write(self) -> None:
        """Write records until there are no more, in a thread."""
        assert self._tracker is not None
        try:
            while (entry := self._waiting.get()) is not None:
                self._tracker.log(*entry)
            self._tracker.close()
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        if not self._stopped:
            self._stopped = True
            _log.warning("%s has failed, and training goes on without it: %s", type(self._tracker).__name__, reason)

    def stop(self) -> None:
        """Write what is left, for up to 10 seconds, and close the tracker. May be called twice."""
        atexit.unregister(self.stop)
        reduction = self._reduction()
        if reduction is not None and self.end_step in reduction.after_step:
            reduction.after_step.remove(self.end_step)
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._waiting.put(None, timeout=_CLOSING)
            self._thread.join(_CLOSING)
            if self._thread.is_alive():
                self._give_up(f"it has not closed within {_CLOSING:.0f} s")
        self._stopped = True


def track(
    reduction: GradientReduction | DistributedDataParallel,
    tracker: str | Tracker,
    *,
    every: int = 10,
    layers: bool = False,
    all_sites: bool = False,
    **settings: Any,
) -> Tracking:
    """Write traffic, ranks, residuals and the time of steps to a tracker, every some steps.

    It is written at site 0 alone. A tracker that fails in training is given up with one warning.

    Args:
        reduction: the reduction, or the wrapped model that has one.
        tracker: ``"csv"``, ``"tensorboard"``, ``"mlflow"``, ``"wandb"``, or a tracker of your own.
        every: number of steps between two records.
        layers: whether to write effective rank, residual and number of kept components of each layer, too.
        all_sites: whether each site writes; it needs a file or run of its own for each.
        settings: arguments of the tracker, such as ``path`` of `CSVTracker`.

    Returns:
        The record, to log values of your own, or to stop.

    Raises:
        ValueError: if the tracker is unknown, or `every` less than 1.
        ImportError: if the tracker's package is not installed.

    Example:
        >>> tracking = dadplug.track(model.reduction, "csv", path="run.csv", every=20)
        >>> tracking.log({"loss": loss.item()})
    """
    names = ", ".join(settings)
    refuse(
        (every < 1, f"every must be at least 1, got {every}"),
        (isinstance(tracker, Tracker) and settings, f"{names}: settings are for trackers that are given by name"),
    )
    found = reduction.reduction if isinstance(reduction, DistributedDataParallel) else reduction
    build = TRACKERS[tracker] if isinstance(tracker, str) else lambda: tracker
    writes = found.site_rank == 0 or all_sites
    return Tracking(found, build(**settings) if writes else None, every, layers)
