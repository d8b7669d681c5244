"""Training over a hub while sites are killed and return: accuracy, pauses, memory, and use of the data.

    python benchmarks/elastic.py                               digits, 3 sites, 1000 steps with 50 kills, 5 seeds
    python benchmarks/elastic.py --dataset mnist --data-dir DIR
    sudo python benchmarks/elastic.py --rate 100mbit           all sites but the first one behind a link of that rate
    python benchmarks/elastic.py --quick                       120 steps with 6 kills, 2 seeds

Each seed is trained without kills first, then with them. Any site but the last one is killed by SIGKILL at random
steps, and returns after a few steps as a new process, which a forkserver starts. `--stops` of the departures suspend
the process instead (SIGSTOP) until the hub has given the site up. `--pace` is the time between steps, so that sites
have returned before the next one is killed.

Pauses are those of the last site: the longest step from the departure to the first step without the site, or in the
four steps around a return, minus the median step. A run fails if replicas differ, a sample of a present site is used
twice in an epoch or is left out, memory or descriptors of the hub or of the last site grow, or the median
accuracy is below those of all runs without kills, of which there must be three. Linux only.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from command import parser_of
from drive import HERE, check_rates
from elastic_logs import Departure, Log, Outcome, add_pauses, different_replicas, grown, use_of_data
from kits import ForkedSites, end
from link import ADDRESSES, Link, may_make_links
from returning_site import MODELS, Case, Order, train

from dadplug.data import load_dataset

_POLL = 0.002  # seconds
_AWAY = 8  # steps for which a site stays away, at most
_SPREAD = 3  # runs without kills that show how accuracies differ between seeds
_LIMIT = 120.0  # seconds without a step


class Run(ForkedSites):
    """A run: a hub, and processes of sites.

    Args:
        folder: folder for kits and logs.
        arguments: the arguments of this program.
        seed: the seed.
        link: the link; None for loopback.
        data: file of the data.
        kills: number of departures; 0 for a run at full pace.
    """

    def __init__(
        self, folder: Path, arguments: argparse.Namespace, seed: int, link: Link | None, data: Path, kills: int
    ) -> None:
        super().__init__(folder, arguments.sites, "returning_site")
        self.seed, self.link, self.kills = seed, link, kills
        self.arguments, self.data = arguments, data
        self.logs = [Log(folder / f"{name}.log") for name in self.names]
        self.departures: list[Departure] = []
        self.outcome = Outcome()
        self._chance = random.Random(seed)
        self._sampled = 0

    def run(self) -> Outcome:
        """Train to the last step."""
        inside = (ADDRESSES[0], ("ip", "netns", "exec", self.link.spaces[0])) if self.link else ()
        with ExitStack() as stack:
            hub = self.start_hub(*inside)
            stack.callback(end, hub)
            stack.callback(self.end)
            for rank in range(len(self.names)):
                self._start(rank)
            self._drive(hub.pid)
        self._judge()
        return self.outcome

    def _start(self, rank: int) -> None:
        arguments, name = self.arguments, self.names[rank]
        case = Case(
            kit=str(self.folder / "kits" / name),
            log=str(self.folder / f"{name}.log"),
            data=str(self.data),
            sites=len(self.names),
            steps=arguments.steps,
            batch_size=arguments.batch_size,
            mode=arguments.mode,
            model=arguments.model,
            seed=self.seed,
            site_timeout=arguments.site_timeout,
            pace=arguments.pace if self.kills else 0.0,
            space=self.link.spaces[min(rank, 1)] if self.link else "",
        )
        self.fork(rank, train, case)

    def _drive(self, hub: int) -> None:
        """Kill sites and start them again, until the last site has ended."""
        log, last = self.logs[-1], len(self.names) - 1
        times = sorted(self._chance.sample(range(5, self.arguments.steps - 2 * _AWAY), self.kills))
        stops = set(self._chance.sample(range(self.kills), min(self.arguments.stops, self.kills)))
        away: dict[int, Departure] = {}
        heard, step = time.monotonic(), 0
        while self.processes[last].is_alive():
            log.read()
            if log.step > step:
                heard, step = time.monotonic(), log.step
                self._sample(step, {"hub": hub, self.names[last]: self.processes[last].pid})
            if time.monotonic() - heard > _LIMIT:
                raise SystemExit(f"no step within {_LIMIT:g} s\n{self._messages()}")
            present = log.done[step - 1]["present"] if step else []
            for rank in list(away):
                if self._returns(away[rank], step, present):
                    del away[rank]
                    self._start(rank)
            free = [rank for rank in present if rank != last and rank not in away and self._trains(rank)]
            number, missed = len(self.departures), not away.keys() & set(present)
            if (
                missed
                and number < len(times)
                and step >= times[number]
                and free
                and step < self.arguments.steps - _AWAY
            ):
                rank = self._chance.choice(free)
                away[rank] = self._lose(rank, step, number in stops)
            time.sleep(_POLL)
        self.processes[last].join()
        if self.processes[last].exitcode:
            raise SystemExit(f"site {last} has failed\n{self._messages()}")
        for process in self.processes.values():
            process.join(10.0)

    def _trains(self, rank: int) -> bool:
        """Return whether a site's process is in training."""
        self.logs[rank].read()
        process = self.processes[rank]
        if process.exitcode:
            raise SystemExit(f"site {rank} has failed\n{self._messages()}")
        return process.is_alive() and self.logs[rank].step >= self.logs[-1].step - 2

    def _lose(self, rank: int, step: int, stops: bool) -> Departure:
        """Kill or suspend a site's process."""
        departure = Departure(rank, stops, time.monotonic(), step + self._chance.randint(2, _AWAY))
        os.kill(self.processes[rank].pid, signal.SIGSTOP if stops else signal.SIGKILL)
        self.departures.append(departure)
        return departure

    def _returns(self, departure: Departure, step: int, present: list[int]) -> bool:
        """Return whether it is time for a site to return, and end its process if it was suspended."""
        if departure.rank in present or step < departure.back:
            return False
        process = self.processes[departure.rank]
        if departure.stops:
            process.kill()
        process.join()
        return True

    def _sample(self, step: int, processes: dict[str, int]) -> None:
        """Take memory and descriptors of processes, a hundred times in a run."""
        share = 100 * step // self.arguments.steps
        if share <= self._sampled:
            return
        self._sampled = share
        for name, pid in processes.items():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                memory = 1024 * int(status.split("VmRSS:")[1].split()[0])
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            except (OSError, IndexError):
                continue  # the process ends: the last step is in the log before its site exits
            self.outcome.memory[name].append(memory)
            self.outcome.descriptors[name].append(descriptors)

    def _messages(self) -> str:
        files = [self.folder / f"{name}.log.err" for name in self.names]
        return "\n".join(f"-- {file.name}\n{file.read_text()[-1500:]}" for file in files if file.exists())

    # Verdict

    def _judge(self) -> None:
        """Fill in the outcome from the logs."""
        for log in self.logs:
            log.read()
        last, outcome = self.logs[-1], self.outcome
        outcome.accuracy = last.result["accuracy"]
        add_pauses(outcome, self.departures, last)
        if len(self.departures) < self.kills:
            outcome.faults.append(f"only {len(self.departures)} of {self.kills} departures: increase --pace")
        outcome.faults += different_replicas(self.logs) + grown(outcome)
        outcome.used, outcome.missed, faults = use_of_data(self.logs, len(last.done), self.order)
        outcome.faults += faults

    def order(self, rank: int) -> Order:
        """Return the order of a site's samples."""
        labels = torch.load(self.data, mmap=True)[1]
        return Order(len(labels), len(self.names), rank, self.arguments.batch_size, self.seed)


def text_of(seconds: list[float]) -> str:
    """Return median and longest pause as text."""
    if not seconds:
        return "none"
    return f"{1e3 * statistics.median(seconds):.0f} ms, at most {1e3 * max(seconds):.0f} ms ({len(seconds)})"


def show(seed: int, outcome: Outcome, kills: int) -> None:
    """Print a run."""
    print(f"seed {seed}, {kills} kills: accuracy {100 * outcome.accuracy:.2f} %, step {1e3 * outcome.median:.1f} ms")
    if kills:
        print(f"  pause at a kill {text_of(outcome.kills)}, at a stop {text_of(outcome.stops)}, ", end="")
        print(f"at a return {text_of(outcome.returns)}")
    for name, memory in outcome.memory.items():
        places = [len(memory) // 10, len(memory) // 2, len(memory) - 1]
        megabytes = ", ".join(f"{memory[place] / 1e6:.1f}" for place in places)
        descriptors = ", ".join(str(outcome.descriptors[name][place]) for place in places)
        print(f"  {name}: {megabytes} MB, {descriptors} descriptors after a tenth, half and all of the steps")
    print(f"  samples used {outcome.used:,}, missed by absent sites {outcome.missed:,}")
    print(*(f"  FAULT: {fault}" for fault in outcome.faults[:10]), sep="\n", end="\n" if outcome.faults else "")
    sys.stdout.flush()


def save_data(arguments: argparse.Namespace, file: Path) -> None:
    """Write images and labels to a file that the sites read."""
    data = load_dataset(arguments.dataset, arguments.data_dir)
    parts = []
    for part in (data.train, data.test):
        images, labels = zip(*(part[place] for place in range(len(part))), strict=True)
        parts += [torch.stack(images), torch.as_tensor([int(label) for label in labels])]
    torch.save(parts, file)


def main() -> int:
    parser = parser_of(
        __doc__,
        dataset={"default": "digits", "choices": ("digits", "mnist")},
        data_dir=None,
        mode="dad",
        model={"default": "small", "choices": list(MODELS)},
        sites=3,
        steps=1000,
        kills=(50, "number of departures, stops included"),
        stops=(2, "departures in which the process is suspended"),
        seeds=5,
        first_seed=0,
        batch_size=16,
        site_timeout=(5.0, "seconds until a suspended site is given up"),
        pace=(0.05, "seconds between steps of a run with kills"),
        rate=("none", "rate of the link, such as 100mbit; needs root"),
        quick=(False, "120 steps, 6 kills, 2 seeds"),
        out=(None, "folder for kits and logs; by default they are removed"),
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.kills, arguments.stops, arguments.seeds = 120, 6, 1, 2
    check_rates(parser, arguments.rate, not may_make_links())
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])  # forkserver
    outcomes: dict[int, list[Outcome]] = {0: [], arguments.kills: []}
    with ExitStack() as stack:
        link = None if arguments.rate == "none" else stack.enter_context(Link(arguments.rate))
        folder = Path(arguments.out or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        save_data(arguments, folder / "data")
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            for kills, found in outcomes.items():
                place = folder / f"{seed}-{kills}"
                place.mkdir()
                found.append(Run(place, arguments, seed, link, folder / "data", kills).run())
                show(seed, found[-1], kills)
    return summarise(outcomes[0], outcomes[arguments.kills])


def summarise(whole: list[Outcome], killed: list[Outcome]) -> int:
    """Print the verdict; return the exit status."""
    worst = min(outcome.accuracy for outcome in whole)
    for name, found in (("without kills", whole), ("with kills", killed)):
        values = [100 * outcome.accuracy for outcome in found]
        print(f"accuracy {name}: {min(values):.2f} to {max(values):.2f} %, median {statistics.median(values):.2f}")
    for what in ("kills", "stops", "returns"):
        print(f"pause at {what}: {text_of([pause for outcome in killed for pause in getattr(outcome, what)])}")
    faults = [fault for outcome in [*whole, *killed] for fault in outcome.faults]
    if len(whole) >= _SPREAD and statistics.median(outcome.accuracy for outcome in killed) < worst:
        faults.append("the accuracy is below that of all runs without kills")
    print("FAILED" if faults else "passed", *faults[:10], sep="\n  ")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
