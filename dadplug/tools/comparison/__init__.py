"""Comparison of ways to train a model, on the user's own model and data."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...errors import RunFailedError
from ...exchange.codec import gather_objects
from ...exchange.handshake import own_node
from ...support.progress import ProgressBar
from ...support.schedules import available_cores
from ...support.signature import check_seconds, whole_number
from .link import Link
from .pool import Pool
from .result import LOOPBACK, Comparison, Row
from .trial import DEFAULTS, STRATEGIES, Build, Place, Point, Strategy, Task, run_trial

__all__ = ["STRATEGIES", "Comparison", "Place", "Row", "Strategy", "compare"]

FINALISTS = 3

Runner = Callable[[str, float, int], "list[Point]"]  # name of a strategy, seconds, seed


def compare(
    build: Build,
    dataset: Any,
    seconds: float = 60.0,
    *,
    ways: Sequence[str] | None = None,
    batch_size: int = 32,
    evaluation: Any = None,
    processes: int | None = None,
    seeds: int = 3,
    progress: bool = True,
    link: str | None = None,
) -> Comparison:
    """Train a model in all ways that apply, each for the same time, and say which is fastest.

    Where sites are connected (`dadplug.connect`), all of them call it, and train together over their link, each with
    its own data. Otherwise processes of this machine do, which divide the data.

    First each way runs once. Then the three with the lowest held-out loss, and the defaults of rankdad, run with
    several seeds, in turn. Only training counts as time: not the start of processes, nor the first three steps, in
    which kernels are compiled, nor evaluation. A way whose runs have too few steps is not measured.

    Args:
        build: returns ``(model, optimizer, criterion)``. It is called anew in every run, with torch's generator seeded;
            the criterion is a mean over a batch. For processes of this machine it must be at the top level of a module.
        dataset: samples, tuples of inputs and a target, drawn by number.
        seconds: training time of all runs of a way together; one that is not in the final runs once.
        ways: names of ways; all that apply if None, see `dadplug.tools.comparison.STRATEGIES`.
        batch_size: samples in a batch of each process.
        evaluation: samples whose loss is compared; a tenth of `dataset`, at most 1,000, if None.
        processes: number of processes of this machine; one a core, at most 4, if None.
        seeds: number of runs of each way in the final.
        progress: whether to print the runs to standard error, in a terminal with a progress bar.
        link: rate and round trip of a link between processes of this machine, as ``"20mbit,60ms"``; Linux, as root.

    Returns:
        The result: ``.rows``, ``.best``, ``.table()``, ``.picture(path)``.

    Raises:
        TypeError: if `build` cannot be called, or samples cannot be drawn by number.
        ValueError: if an argument is out of its range, a way is unknown or does not apply here, `build` cannot be
            sent to other processes, or the link cannot be made here.

    Example:
        >>> comparison = dadplug.compare(build, dataset, seconds=60)
        >>> print(comparison.table())
        >>> comparison.picture("comparison.png")
    """
    connected = dist.is_initialized() and dist.get_world_size() > 1
    place = _place(connected, processes, link)
    chosen = _choose(ways, place)
    task = Task.create(build, dataset, evaluation, batch_size, place.processes, dealt=not connected)
    trials = _Trials(chosen, seconds, seeds, progress and (not connected or dist.get_rank() == 0))
    _run_all(trials, task, place)
    rows, count = trials.rows(), len(task.held_out)  # type: ignore[arg-type]
    return Comparison(
        rows, trials.finalists, trials.run_seconds, count, place.processes, batch_size, connected, _name(place)
    )


class _Trials:
    """First trials of all strategies, and the final of the best.

    Args:
        names: names of the strategies.
        seconds: training time of all trials of a strategy together.
        seeds: number of trials of each strategy in the final.
        shown: whether to print the trials.

    Attributes:
        finalists: names of the strategies that have trained in the final.
        run_seconds: training time of a trial.

    Raises:
        ValueError: if there are too few seconds or seeds.
    """

    def __init__(self, names: Sequence[str], seconds: float, seeds: int, shown: bool) -> None:
        check_seconds("seconds", seconds)
        whole_number(2, "since one run shows no noise")("seeds", seeds)
        self._names = list(names)
        self._seeds = seeds
        first = len(names) if len(names) > FINALISTS else 0
        self.run_seconds = seconds / (seeds + bool(first))
        self._planned = first + min(len(names), FINALISTS + (first > 0 and DEFAULTS in names)) * seeds
        self._progress = ProgressBar(self.run_seconds * self._planned, shown=shown)
        self._number = 0
        self._first: dict[str, Row] = {}
        self._final: dict[str, Row] = {}
        self._failures: dict[str, str] = {}
        self.finalists = self._names

    def run(self, run: Runner) -> None:
        """Run the trials.

        Args:
            run: trains by one strategy for some seconds with a seed.
        """
        if len(self._names) > FINALISTS:
            for name in self._names:
                self._run(run, name, 0, self._first)
            able = sorted((row for row in self._first.values() if row.is_measured), key=lambda row: row.loss)
            self.finalists = [row.way for place, row in enumerate(able) if place < FINALISTS or row.way == DEFAULTS]
        for seed in range(1, self._seeds + 1):
            for name in self.finalists:
                if name not in self._failures and (name not in self._final or self._final[name].is_measured):
                    self._run(run, name, seed, self._final)
        self.finalists = [name for name in self.finalists if name not in self._failures]

    def _run(self, run: Runner, name: str, seed: int, into: dict[str, Row]) -> None:
        label, least = STRATEGIES[name].label, STRATEGIES[name].least
        place = f"run {self._number + 1} of {self._planned}: {label}"
        try:
            with self._progress.span(self._number * self.run_seconds, self.run_seconds, place):
                points = run(name, self.run_seconds, seed)
        except RunFailedError as error:
            self._failures[name] = str(error)
            self._progress.report(f"{place}: failed, {error}")
        else:
            runs = [*into[name].runs, points] if name in into else [points]
            into[name] = Row(name, label, runs, least=least, agrees=STRATEGIES[name].agrees)
            loss = f"loss {points[-1].loss:.4f} after {points[-1].seconds:.1f} s"
            self._progress.report(f"{place}: {into[name].shortage or loss}")
        self._number += 1

    def rows(self) -> list[Row]:
        """Return the rows: finalists by their loss, the others, those not measured, then those that failed."""
        found = [row for row in (self._first | self._final).values() if row.way not in self._failures]
        failed = [Row(name, STRATEGIES[name].label, failure=reason) for name, reason in self._failures.items()]
        found.sort(key=lambda row: (not row.is_measured, row.way not in self.finalists, row.loss))
        return [*found, *failed]


def _place(connected: bool, processes: int | None, link: str | None) -> Place:
    if connected:
        if processes is not None or link is not None:
            raise ValueError("the connected sites and their own link are compared: leave out processes= and link=")
        return Place(dist.get_world_size(), torch.get_num_threads(), connected=True)
    cores = available_cores()
    shaped = None if link is None else Link.parse(link)
    count = min(max(cores, 1 if link is None else 2), 4) if processes is None else processes
    whole_number(1 if link is None else 2)("processes", count)
    return Place(count, cores if shaped is None else max(1, cores // count), connected=False, link=shaped)


def _name(place: Place) -> str:
    """Return the name of the link that processes are compared over; the connected sites call it together."""
    if not place.connected:
        return LOOPBACK if place.link is None else f"a link of {place.link.text} between processes of this machine"
    nodes = gather_objects((own_node(), socket.gethostname()))
    hosts = ", ".join(dict.fromkeys(host for _, host in nodes))
    return LOOPBACK if len({node for node, _ in nodes}) == 1 else f"the link between the sites (hosts: {hosts})"


def _choose(names: Sequence[str] | None, place: Place) -> list[str]:
    if names is None:
        return [name for name, strategy in STRATEGIES.items() if strategy.applies(place)]
    for name in names:
        if not STRATEGIES[name].applies(place):
            raise ValueError(f"{STRATEGIES[name].label!r} has nothing to compare with {place.processes} processes here")
    return list(dict.fromkeys(names))


def _run_all(trials: _Trials, task: Task, place: Place) -> None:
    if place.connected or place.processes == 1:
        trials.run(lambda name, seconds, seed: _run_here(STRATEGIES[name], task, place, seconds, seed))
        return
    with Pool(task, place.link) as pool:

        def run(name: str, seconds: float, seed: int) -> Any:
            count, threads = STRATEGIES[name].processes(place), STRATEGIES[name].threads(place)
            return pool.run(_trial, count, threads, name, seconds, seed)[0]

        trials.run(run)


def _trial(task: Task, rank: int, count: int, name: str, seconds: float, seed: int) -> list[Point]:
    return run_trial(STRATEGIES[name], task, seconds, seed, rank, count)


def _run_here(strategy: Strategy, task: Task, place: Place, seconds: float, seed: int) -> list[Point]:
    """Train by a strategy in this process, one of the connected sites or alone; return site 0's points at all sites."""
    rank, threads = dist.get_rank() if place.connected else 0, torch.get_num_threads()
    torch.set_num_threads(strategy.threads(place))
    failure, points = "", []
    try:
        points = run_trial(strategy, task, seconds, seed, rank, place.processes)
    except (ValueError, TypeError, NotImplementedError, FloatingPointError) as error:
        failure = f"{type(error).__name__}: {error}"
    finally:
        torch.set_num_threads(threads)
    outcomes: list[Any] = gather_objects((failure, points)) if place.connected else [(failure, points)]
    for other, _ in outcomes:
        if other:
            raise RunFailedError(other)
    own: list[Point] = outcomes[0][1]
    return own
