"""Logs of the sites of benchmarks/elastic.py, and what they show: pauses, replicas, use of the data, growth."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from returning_site import Order

GROWTH = 1.1
"""Largest ratio of the memory in the last third of a run to that in the second."""


class Log:
    """Lines of a site's log, read as they are written.

    Attributes:
        rows: samples of the steps that the site has begun.
        done: lines of the steps that it has ended.
        result: the last line; empty before it is there.
    """

    def __init__(self, path: Path) -> None:
        self.rows: dict[int, list[int]] = {}
        self.done: dict[int, dict[str, Any]] = {}
        self.result: dict[str, Any] = {}
        self._path, self._offset = path, 0

    def read(self) -> None:
        """Read what has been written since."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in map(json.loads, whole.splitlines()):
            if "rows" in line:
                self.rows[line["step"]] = line["rows"]
            elif "step" in line:
                self.done[line["step"]] = line
            else:
                self.result = line

    @property
    def step(self) -> int:
        """Number of steps that have ended."""
        return max(self.done, default=-1) + 1


@dataclass
class Departure:
    """A site that is lost and returns.

    Attributes:
        rank: number of the site.
        stops: whether the process is suspended, not killed.
        at: time at which it happens, in seconds.
        back: step from which on the site may return.
    """

    rank: int
    stops: bool
    at: float
    back: int


@dataclass
class Outcome:
    """What became of a run; times in seconds, memory in bytes."""

    accuracy: float = 0.0
    median: float = 0.0
    kills: list[float] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    memory: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    descriptors: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    used: int = 0
    missed: int = 0
    faults: list[str] = field(default_factory=list)


def add_pauses(outcome: Outcome, departures: Sequence[Departure], log: Log) -> None:
    """Add the median step, the pauses at departures, and those at returns that no departure falls into.

    Args:
        outcome: what they are added to.
        departures: the departures.
        log: log of a site that was present in all steps.
    """
    steps = [log.done[step] for step in sorted(log.done)]
    outcome.median = statistics.median(line["end"] - line["start"] for line in steps)

    def longest(lines: list[dict[str, Any]]) -> float:
        return max(line["end"] - line["start"] for line in lines) - outcome.median

    missed = []
    for departure in departures:
        after = [line for line in steps if line["end"] > departure.at]
        gone = next((place for place, line in enumerate(after) if departure.rank not in line["present"]), None)
        if gone is None:
            outcome.faults.append(f"site {departure.rank} was not missed")
            continue
        (outcome.stops if departure.stops else outcome.kills).append(longest(after[: gone + 1]))
        missed.append((departure, after[gone]["end"], after[gone + 1 :]))
    for departure, _, rest in missed:
        back = next((place for place, line in enumerate(rest) if departure.rank in line["present"]), None)
        if back is None:
            continue
        around = rest[max(0, back - 2) : back + 2]
        first, last = around[0]["start"], around[-1]["end"]
        if not any(other.at < last and until > first for other, until, _ in missed):
            outcome.returns.append(longest(around))


def different_replicas(logs: list[Log]) -> list[str]:
    """Return the steps after which parameters or lists of present sites differ between sites."""
    faults = []
    for rank, log in enumerate(logs[:-1]):
        for step, line in log.done.items():
            other = logs[-1].done.get(step, line)
            for what in ("present", "digest"):
                if line.get(what) != other.get(what):
                    faults.append(f"{what} differs between sites {rank} and {len(logs) - 1} after step {step}")
    return faults


def use_of_data(logs: list[Log], steps: int, order: Callable[[int], Order]) -> tuple[int, int, list[str]]:
    """Compare the samples that sites have used with those that they should have used.

    Args:
        logs: logs of the sites, by rank; the last site was present in all steps.
        steps: number of steps.
        order: returns the order of a site's samples.

    Returns:
        Number of samples used and missed, and what is wrong.
    """
    used = missed = 0
    faults = []
    for rank, log in enumerate(logs):
        own = order(rank)
        length = own.steps_per_epoch
        for epoch in range(-(-steps // length)):
            every = range(epoch * length, min(steps, (epoch + 1) * length))
            present = [step for step in every if rank in logs[-1].done[step]["present"]]
            counts = Counter(row for step in present for row in log.rows.get(step, []))
            wanted = {int(row) for step in present for row in own.batch(step)}
            used += sum(counts.values())
            missed += (len(every) - len(present)) * own.batch_size
            if twice := [row for row, count in counts.items() if count > 1]:
                faults.append(f"site {rank} has used {len(twice)} samples twice in epoch {epoch}")
            if counts.keys() != wanted or len(wanted) != len(present) * own.batch_size:
                faults.append(f"site {rank} has used other samples in epoch {epoch} than it should have")
    return used, missed, faults


def grown(outcome: Outcome) -> list[str]:
    """Return which processes have more memory or descriptors in the last third of a run than in the second."""
    faults = []
    for what, most, every in (("memory", GROWTH, outcome.memory), ("descriptors", 1.0, outcome.descriptors)):
        for name, values in every.items():
            third = len(values) // 3
            if third and max(values[2 * third :]) > most * max(values[third : 2 * third]):
                faults.append(f"{what} of {name} has grown from {values[third]} to {values[-1]}")
    return faults
