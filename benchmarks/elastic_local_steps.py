"""Local steps over a hub while each site is killed once and returns: what is in the model, waits, and bits.

    python benchmarks/elastic_local_steps.py                  four sites, 20 minutes with a kill of each, and 20 without
    python benchmarks/elastic_local_steps.py --quick          the same in a minute and a half each

The sites have different paces (`--paces`, seconds that a site waits after each step), so that in a round of
`--round-seconds` each takes as many steps as it can. They train for a time, first without kills. In the second run each
site is killed by SIGKILL once, at a random time in its part of the run, and started again after `--away` seconds; a
forkserver starts it.

A run fails if agreed models or final models differ in a bit, a batch of a site counts twice, the samples in the model
are not those of the batches that the sites' logs say, a step takes longer than `--site-timeout` and the round together,
or less than `--share` of the samples of the run without kills are in the model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command import parser_of
from drive import HERE
from elastic import save_data
from elastic_local_site import Case, train
from kits import ForkedSites, end
from returning_site import MODELS

_POLL = 0.02  # seconds
_START = 6.0  # seconds for the sites to start, which do not count


@dataclass
class Outcome:
    """What a run has shown.

    Attributes:
        samples: samples in the model, by site.
        trained: samples that the sites have trained on, those in no contribution included.
        longest: longest step of any site, in seconds, waits included.
        median: median step, in seconds.
        agreements: number of agreements.
        accuracy: of the final model.
        sent: bytes that a site has sent, of the last process of each.
        faults: what is wrong.
    """

    samples: dict[int, int] = field(default_factory=dict)
    trained: int = 0
    longest: float = 0.0
    median: float = 0.0
    agreements: int = 0
    accuracy: float = 0.0
    sent: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Run(ForkedSites):
    """A run: a hub, and processes of sites.

    Args:
        folder: folder for kits and logs.
        arguments: the arguments of this program.
        data: file of the data.
        kills: whether each site is killed once.
    """

    def __init__(self, folder: Path, arguments: argparse.Namespace, data: Path, kills: bool) -> None:
        super().__init__(folder, len(arguments.paces), "elastic_local_site")
        self._arguments, self._data, self._kills = arguments, data, kills
        self._until = 0.0

    def run(self) -> Outcome:
        """Train until the time is over."""
        with ExitStack() as stack:
            stack.callback(end, self.start_hub())
            stack.callback(self.end)
            self._until = time.monotonic() + _START + self._arguments.seconds
            for rank in range(len(self.names)):
                self._start(rank)
            self._drive()
        outcome = judge([self._lines(name) for name in self.names], self._arguments)
        for rank in range(len(self.names)):
            if "joins again" in self._messages(rank):
                outcome.faults.insert(0, f"site {rank} was dropped as silent: the machine is too busy for this run")
        return outcome

    def _lines(self, name: str) -> list[dict[str, Any]]:
        text = (self.folder / f"{name}.log").read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def _start(self, rank: int) -> None:
        arguments, name = self._arguments, self.names[rank]
        options = {
            "min_sites": 1,
            "late": "skip",
            "site_timeout": arguments.site_timeout,
            "round_seconds": arguments.round_seconds,
            "overlap": not arguments.no_overlap,
        }
        if arguments.density:
            options |= {"density": arguments.density, "wire": "int2"}
        case = Case(
            kit=str(self.folder / "kits" / name),
            log=str(self.folder / f"{name}.log"),
            data=str(self._data),
            sites=len(self.names),
            until=self._until,
            batch_size=arguments.batch_size,
            model=arguments.model,
            seed=arguments.seed,
            pace=arguments.paces[rank],
            options=options,
        )
        self.fork(rank, train, case)

    def _drive(self) -> None:
        """Kill each site once, and start it again, until all have ended."""
        chance, count, seconds = random.Random(self._arguments.seed), len(self.names), self._arguments.seconds
        first, part = self._until - seconds, seconds / (count + 1)
        order = chance.sample(range(count), count) if self._kills else []
        times = {rank: first + part * (place + 0.5 + chance.random() / 2) for place, rank in enumerate(order)}
        back: dict[int, float] = {}
        while times or back or any(process.is_alive() for process in self.processes.values()):
            now = time.monotonic()
            for rank in [rank for rank, at in times.items() if now >= at]:
                os.kill(self.processes[rank].pid, signal.SIGKILL)
                self.processes[rank].join()
                del times[rank]
                back[rank] = now + self._arguments.away
            for rank in [rank for rank, at in back.items() if now >= at]:
                del back[rank]
                self._start(rank)
            for rank, process in self.processes.items():
                if process.exitcode and rank not in back:
                    raise SystemExit(f"site {rank} has failed\n{self._messages(rank)}")
            if now > self._until + 120:
                raise SystemExit("the sites do not end")
            time.sleep(_POLL)

    def _messages(self, rank: int) -> str:
        return (self.folder / f"{self.names[rank]}.log.err").read_text()[-3000:]


def judge(written: list[list[dict[str, Any]]], arguments: argparse.Namespace) -> Outcome:
    """Compare what the sites have written.

    Args:
        written: the lines of each site.
        arguments: the arguments of this program.
    """
    outcome = Outcome()
    agreed: dict[int, str] = {}
    seconds: list[float] = []
    for rank, lines in enumerate(written):
        for line in lines:
            known = agreed.setdefault(line["agreement"], line["agreed"]) if "agreement" in line else ""
            if known != line.get("agreed", ""):
                outcome.faults.append(f"the agreed model {line['agreement']} of site {rank} differs")
        seconds += [line["seconds"] for line in lines if "seconds" in line]
        outcome.trained += sum(line.get("rows", 0) for line in lines)
    finals = [line for lines in written for line in lines[-1:]]
    if len({line["digest"] for line in finals}) > 1:
        outcome.faults.append("the final models differ")
    last = max((line for lines in written for line in lines if "agreement" in line), key=lambda line: line["agreement"])
    outcome.samples = {int(rank): count for rank, count in last["contributions"].items()}
    outcome.longest, outcome.median = max(seconds), statistics.median(seconds)
    outcome.agreements, outcome.accuracy = last["agreement"], finals[0]["accuracy"]
    outcome.sent = [line["sent"] for line in finals]
    if outcome.longest > arguments.site_timeout + arguments.round_seconds:
        outcome.faults.append(f"a step took {outcome.longest:.1f} s")
    for rank, lines in enumerate(written):
        counted = in_the_model(lines, outcome.samples.get(rank, 0))
        if counted is None:
            outcome.faults.append(f"the samples of site {rank} in the model are not those of its contributions")
        elif max(Counter(counted).values(), default=0) > 1:
            outcome.faults.append(f"a batch of site {rank} counts twice")
    return outcome


def in_the_model(lines: list[dict[str, Any]], samples: int) -> list[int] | None:
    """Return the batches of a site that are in the model: of a killed process all but the last ones.

    Args:
        lines: what the site has written.
        samples: number of its samples in the model.

    Returns:
        The numbers of the batches; None if no such batches have so many samples.
    """
    processes: dict[int, list[tuple[int, int]]] = {}
    for line in lines:
        own = processes.setdefault(line["pid"], [])
        if "batch" in line:
            own.append((line["batch"], line["rows"]))
    *killed, last = processes.values()
    found, left = list(last), samples - sum(rows for _, rows in last)  # it has finished: all of it is in the model
    for batches in killed:
        while left > 0 and batches:
            found.append(batches.pop(0))
            left -= found[-1][1]
    return [number for number, _ in found] if left == 0 else None


def show(title: str, outcome: Outcome) -> None:
    """Print a run."""
    total = sum(outcome.samples.values())
    print(f"{title}: {total:,} samples in the model, of {outcome.trained:,} trained; by site {outcome.samples}")
    print(f"  {outcome.agreements} agreements, accuracy {100 * outcome.accuracy:.2f} %, ", end="")
    print(f"step {1e3 * outcome.median:.1f} ms, at most {outcome.longest:.2f} s")
    print(*(f"  FAULT: {fault}" for fault in outcome.faults[:10]), sep="\n", end="\n" if outcome.faults else "")
    sys.stdout.flush()


def main() -> int:
    parser = parser_of(
        __doc__,
        dataset={"default": "digits", "choices": ("digits", "mnist")},
        data_dir=None,
        model={"default": "small", "choices": list(MODELS)},
        seconds=(1200.0, "time of a run"),
        paces={"type": float, "nargs": "+", "default": [0.05, 0.08, 0.12, 0.2]},
        round_seconds=2.0,
        site_timeout=5.0,
        away=(2.0, "seconds until a killed site is started again"),
        batch_size=16,
        density=(0.0, "sparse deltas of this density; 0: whole ones"),
        no_overlap=False,
        share=0.88,
        seed=0,
        quick=(False, "a minute and a half a run"),
        out=(None, "folder for kits and logs; by default they are removed"),
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds = 90.0
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])  # forkserver
    outcomes = []
    with ExitStack() as stack:
        folder = Path(arguments.out or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        save_data(arguments, folder / "data")
        for title, kills in (("without kills", False), ("each site killed once", True)):
            place = folder / title.replace(" ", "-")
            place.mkdir()
            outcomes.append(Run(place, arguments, folder / "data", kills).run())
            show(title, outcomes[-1])
    whole, killed = (sum(outcome.samples.values()) for outcome in outcomes)
    share = killed / whole
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    if share < arguments.share:
        faults.append(f"less than {100 * arguments.share:g} % of the samples are in the model")
    print(f"share of the samples of the run without kills: {100 * share:.1f} %")
    print("FAILED" if faults else "passed", *faults[:10], sep="\n  ")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
