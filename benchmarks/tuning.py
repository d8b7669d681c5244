"""The tuner against an exhaustive search, random search and Optuna, and its results against the defaults.

    python benchmarks/tuning.py --measure TABLE.json      all configurations of twelve tasks, five times (some minutes)
    python benchmarks/tuning.py --replay TABLE.json       searches with a quarter of the measurements, from that table
    python benchmarks/tuning.py --picture TABLE.json OUT.png   measured against predicted times
    python benchmarks/tuning.py --pairs                   a run of the tuner, and 30 pairs against the defaults
    python benchmarks/tuning.py --falsified               the same from constants that are wrong by a factor of four
    python benchmarks/tuning.py --start                   the time to read a file

One thread. A search sees one of the five measurements of a configuration, drawn at random; what it finds is judged by
the median of the five. Optuna (TPE) is compared if it is installed: pip install optuna.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from command import parser_of

from dadplug.lowrank import warmup
from dadplug.support import schedules
from dadplug.support.schedules import Decoding, Encoding, Record
from dadplug.tools.tuning import tune
from dadplug.tools.tuning.search import Config, Task, Timer, compare_in_pairs, search
from dadplug.tools.tuning.tasks import MNIST_NET, Layer, tasks_for

WORKLOADS = {
    "MNISTNet": MNIST_NET,
    "small ViT": [Layer(128, 128, 520), Layer(512, 128, 520), Layer(128, 512, 520)],
    "BERT-base": [Layer(768, 768, 128), Layer(3072, 768, 128), Layer(768, 3072, 128)],
}
ROUNDS = 5
SEEDS = 20
SHARE = 0.25
GOAL = 1.05


def all_tasks() -> dict[str, Task]:
    return {
        f"{workload}: {task.name}": task
        for workload, layers in WORKLOADS.items()
        for task in tasks_for(layers, Decoding(), Encoding())
    }


def measure_all(path: Path) -> None:
    """Measure every configuration in rounds, so that a disturbance does not fall on one of them."""
    table: dict[str, list[list[float]]] = {}
    start = time.perf_counter()
    for name, task in all_tasks().items():
        timer, configs = Timer(), task.space.configs()
        times: list[list[float]] = [[] for _ in configs]
        for _ in range(ROUNDS):
            for place in random.sample(range(len(configs)), len(configs)):
                times[place].append(timer(task, configs[place], 3))
        table[name] = times
        path.write_text(json.dumps(table))
        print(f"{name}: {len(configs)} configurations, {time.perf_counter() - start:.0f} s so far", flush=True)


class Replay:
    """Measure that draws one of the measurements of a table.

    Args:
        task: the task.
        times: measurements by configuration.
        seed: seed of the draws.
    """

    def __init__(self, task: Task, times: list[list[float]], seed: int) -> None:
        self._times = dict(zip(task.space.configs(), times, strict=True))
        self._rng = random.Random(seed)
        self.seen: dict[Config, float] = {}

    def __call__(self, task: Task, config: Config, samples: int = 1) -> float:
        if config not in self.seen:
            self.seen[config] = self._rng.choice(self._times[config])
        return self.seen[config]

    @property
    def found(self) -> Config:
        """The configuration that seemed fastest."""
        return min(self.seen, key=self.seen.__getitem__)


def by_tuner(task: Task, replay: Replay, budget: int, seed: int) -> None:
    search(task, replay, budget, seed)


def by_chance(task: Task, replay: Replay, budget: int, seed: int) -> None:
    replay(task, task.default)
    rest = [config for config in task.space.configs() if config != task.default]
    for config in random.Random(seed).sample(rest, budget - 1):
        replay(task, config)


def by_optuna(task: Task, replay: Replay, budget: int, seed: int) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    values = dict(zip(task.space.names, task.space.values, strict=True))
    study.enqueue_trial({name: values[name].index(each) for name, each in task.space.named(task.default).items()})
    for _ in range(4 * budget):  # a configuration that is suggested again does not count
        if len(replay.seen) == budget:
            break
        trial = study.ask()
        config = tuple(each[trial.suggest_int(name, 0, len(each) - 1)] for name, each in values.items())
        study.tell(trial, replay(task, config))


def replay_all(path: Path) -> None:
    table = json.loads(path.read_text())
    methods: dict[str, Callable[[Task, Replay, int, int], None]] = {"tuner": by_tuner, "random": by_chance}
    try:
        import optuna  # noqa: F401

        methods["Optuna"] = by_optuna
    except ImportError:
        print("Optuna is not installed")
    head = "".join(f"{name:>22}" for name in methods)
    print(f"{'task':42}{'configs':>8}{'tried':>6}{'default':>9}{head}")
    print(f"{'':65}" + f"{'over best, within 5 %':>22}" * len(methods))
    reached = dict.fromkeys(methods, 0)
    for name, task in all_tasks().items():
        medians = dict(zip(task.space.configs(), map(statistics.median, table[name]), strict=True))
        best, budget = min(medians.values()), max(1, round(SHARE * len(medians)))
        cells = ""
        for method, run in methods.items():
            ratios = []
            for seed in range(SEEDS):
                replay = Replay(task, table[name], seed)
                run(task, replay, budget, seed)
                assert len(replay.seen) <= budget
                ratios.append(medians[replay.found] / best)
            within = statistics.fmean(ratio <= GOAL for ratio in ratios)
            reached[method] += statistics.median(ratios) <= GOAL
            cells += f"{statistics.median(ratios):>15.3f}{within:>7.0%}"
        default = medians[task.default] / best
        print(f"{name:42}{len(medians):8}{budget:6}{default:9.3f}{cells}", flush=True)
    print(
        f"{'tasks within 5 % of the best (median of 20 seeds)':65}"
        + "".join(f"{f'{each} of {len(table)}':>22}" for each in reached.values())
    )


def picture(path: Path, out: Path) -> None:
    """Plot the times that searches predicted just before they were measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    table = json.loads(path.read_text())
    figure, axes = plt.subplots(figsize=(5.5, 4.6))
    errors = []
    for (workload, _), color in zip(WORKLOADS.items(), ("#0072b2", "#d55e00", "#009e73"), strict=True):
        measured, predicted = [], []
        for name, task in all_tasks().items():
            if name.startswith(workload):
                replay = Replay(task, table[name], 0)
                found = search(task, replay, round(SHARE * len(task.space)), 0)
                measured += [1e3 * found.measured[each] for each in found.predicted]
                predicted += [1e3 * value for value in found.predicted.values()]
        errors += [abs(b / a - 1) for a, b in zip(measured, predicted, strict=True)]
        axes.scatter(measured, predicted, s=12, color=color, label=workload, alpha=0.7, linewidths=0)
    low, high = axes.get_xlim()
    low = max(low, 0.1)
    axes.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="predicted ms")
    axes.plot([low, high], [low, high], color="#888888", linewidth=0.8, zorder=0)
    axes.set_title(f"predicted before measured: median error {100 * statistics.median(errors):.0f} %", fontsize=10)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, dpi=150)
    print(f"{len(errors)} predictions, median error {statistics.median(errors):.1%}: {out}")


def pairs(seconds: float, defaults: Record | None = None) -> None:
    """Tune, print the table, and compare the result with the built-in defaults in 30 new pairs."""
    result = tune(seconds=seconds, store=False, defaults=defaults)
    print(result.table())
    timer = Timer()
    print("\n30 new pairs against the built-in constants (ratio of seconds, wins):")
    for task in tasks_for(MNIST_NET, Decoding(), Encoding()):
        record: dict[str, Any] = result.record.decoding.values() | result.record.encoding.values()
        config = tuple(record[name] for name in task.space.names)
        if config == task.default:
            print(f"{task.name:32} the same constants")
            continue
        outcome = compare_in_pairs(task, config, timer)
        print(f"{task.name:32} {outcome.ratio:.3f}  {outcome.wins} of {outcome.pairs}", flush=True)


def falsified(seconds: float) -> None:
    for factor in (0.25, 4.0):
        print(f"\nconstants times {factor:g}")
        good, rates = Decoding(), Encoding()
        values = {name: max(1, round(factor * value)) for name, value in good.values().items()}
        fields = {name: factor * value for name, value in rates.values().items() if name != "coarse"}
        pairs(seconds, Record(Decoding(**values), Encoding(**fields, coarse=20 if factor > 1 else 10)))


def start() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DADPLUG_TUNING"] = folder
        schedules.save(Record(tuned=True), schedules.Machine.this())
        began = time.perf_counter()
        schedules.current()
        print(f"first reading: {1e3 * (time.perf_counter() - began):.2f} ms (after `save` in the same process)")
        code = (
            "import time, torch; torch.set_num_threads(1); from dadplug import schedules; t = time.perf_counter(); "
            "r = schedules.current(); "
            "print(f'new process: {1e3 * (time.perf_counter() - t):.1f} ms, tuned: {r.tuned}')"
        )

        for _ in range(3):
            subprocess.run([sys.executable, "-c", code], check=True)


def main() -> None:
    parser = parser_of(
        __doc__,
        measure={"type": Path},
        replay={"type": Path},
        picture={"type": Path, "nargs": 2},
        pairs=False,
        falsified=False,
        start=False,
        seconds=60.0,
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.measure or arguments.pairs or arguments.falsified:
        warmup()
    if arguments.measure:
        measure_all(arguments.measure)
    if arguments.replay:
        replay_all(arguments.replay)
    if arguments.picture:
        picture(*arguments.picture)
    if arguments.pairs:
        pairs(arguments.seconds)
    if arguments.falsified:
        falsified(arguments.seconds)
    if arguments.start:
        start()


if __name__ == "__main__":
    main()
