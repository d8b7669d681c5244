"""Eight hospitals with a hub: one comes late, one is cut off again and again, one is killed and returns.

    sudo python benchmarks/eight_hospitals.py                        30 minutes, 10 Mbit/s, round trips of 40 ms
    sudo python benchmarks/eight_hospitals.py --minutes 3 --cut 10 --every 60
    sudo python benchmarks/eight_hospitals.py --merge all            factors to all sites in place of owners
    sudo python benchmarks/eight_hospitals.py --photos data          photos of cats and dogs in place of digits
    python benchmarks/eight_hospitals.py --minutes 1 --rate none     without root, on loopback; nothing is cut off

Each site is a network namespace of its own behind a link of the given rate to a namespace in which the hub runs, and
has one or two classes of the embedded digits; of photos, half of the sites have cats and the others dogs. Messages are
sealed. Training starts without the site that comes late. A site that is cut off hears nothing and is heard by none for
a while: the link drops all packets.

Printed are the held-out accuracy; steps; the share of the time that the sites which were there have trained, which is
what steps of more than three median times leave; the longest step; and what a site sends and receives in a step, as its
interface counts it. Beside it: one process with the rows of all sites and as many steps, and plain code of methods that
average models, with all sites present and as many rounds as the link lets them have in the same time; the time in which
they compute is not counted. With ``--picture FILE`` the accuracy of all is drawn over seconds and megabytes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from command import parser_of
from kits import end, hub_command
from link import Relay, make_device, may_make_links, run, shaping
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dadplug
from dadplug.data import load_dataset, site_indices
from dadplug.hub import Project
from dadplug.hub.pki.provision import provision
from dadplug.support.processes import free_port

HUB, PORT = "10.79.0.254", 8470
LATE, CUT, KILLED = 7, 3, 5
BATCH = 32
LOCAL_STEPS = 8
SIZE = 32  # pixels of a photo
LOOK_EVERY = 10  # steps between two looks at the accuracy


class Line(Relay):
    """Link of a site, which drops all packets while it is cut.

    Args:
        name: name of the site's end.
        delay: seconds that a packet takes.
    """

    def __init__(self, name: str, delay: float) -> None:
        super().__init__([make_device(f"{name}{side}") for side in "sh"], delay)
        self.cut = False

    def passes(self) -> bool:
        return not self.cut


class HubStar:
    """Namespaces of some sites and of a hub, each site with a link of its own; they go when the block ends.

    Args:
        sites: number of sites.
        rate: rate of each link, as tc writes it.
        round_trip: milliseconds.
    """

    def __init__(self, sites: int, rate: str, round_trip: float) -> None:
        self.middle = f"hub-{os.getpid()}"
        self.spaces = [f"hospital{rank}-{os.getpid()}" for rank in range(sites)]
        self._rate, self._delay = rate, round_trip / 2000
        self.lines: list[Line] = []

    def __enter__(self) -> HubStar:
        run("ip", "netns", "add", self.middle)
        inside = ("ip", "netns", "exec", self.middle)
        run(*inside, "ip", "link", "set", "lo", "up")
        run(*inside, "ip", "addr", "add", f"{HUB}/32", "dev", "lo")
        for rank, space in enumerate(self.spaces):
            run("ip", "netns", "add", space)
            self.lines.append(Line(f"l{rank}-{os.getpid()}", self._delay))
            for place, side, own, far in ((space, "s", 1, 2), (self.middle, "h", 2, 1)):
                name, here = f"l{rank}-{os.getpid()}{side}", ("ip", "netns", "exec", place)
                run("ip", "link", "set", name, "netns", place)
                run(*here, "ip", "addr", "add", f"10.80.{rank}.{own}", "peer", f"10.80.{rank}.{far}", "dev", name)
                run(*here, "ip", "link", "set", "lo", "up")
                run(*here, "ip", "link", "set", name, "up")
                run(*here, *shaping(name, self._rate))
            run("ip", "netns", "exec", space, "ip", "route", "add", f"{HUB}/32", "via", f"10.80.{rank}.2")
            self.lines[-1].start()
        return self

    def __exit__(self, *exc: object) -> None:
        for space in (*self.spaces, self.middle):
            subprocess.run(["ip", "netns", "del", space], check=False)


# A site


@cache
def data(photos: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return inputs and labels for training and held-out ones; of digits, or of the photos in a folder."""
    pair = load_dataset("dogsvscats", photos).resized(SIZE) if photos else load_dataset("digits")
    train, test = (next(iter(torch.utils.data.DataLoader(part, len(part)))) for part in (pair.train.plain(), pair.test))
    return (train[0], train[1]), (test[0], test[1])


def make_model(photos: str) -> nn.Module:
    torch.manual_seed(0)
    if photos:
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU(), nn.MaxPool2d(2)]
        wide = nn.Linear(64 * (SIZE // 8) ** 2, 256)
        return nn.Sequential(*layers, nn.Flatten(), wide, nn.ReLU(), nn.Linear(256, 2))
    inputs = data(photos)[0][0][0].numel()
    hidden = [nn.Linear(inputs, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 512), nn.LayerNorm(512), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(512, 10))


def site_rows(rank: int, sites: int, photos: str) -> tuple[Tensor, Tensor]:
    """Return the rows of a site: classes of its own, or a part of the rows of a class that several sites have."""
    inputs, labels = data(photos)[0]
    classes = int(labels.max()) + 1
    if classes < sites:
        chosen = (labels == rank % classes).nonzero().flatten()[rank // classes :: -(-sites // classes)]
    else:
        chosen = site_indices(labels, rank, sites, "by-class")
    return inputs[chosen], labels[chosen]


def batches(rows: tuple[Tensor, Tensor], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(rows[1]), (BATCH,), generator=generator)
        yield rows[0][chosen], rows[1][chosen]


@torch.no_grad()
def accuracy(model: nn.Module, photos: str) -> float:
    inputs, labels = data(photos)[1]
    return float((model(inputs).argmax(1) == labels).double().mean())


def counted() -> int:
    """Return the bytes that this site's interface has sent and received."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line]
    fields = [values.split() for name, values in lines if name.strip() != "lo"]
    return sum(int(values[0]) + int(values[8]) for values in fields)


def train_site(arguments: argparse.Namespace) -> None:
    """Train as one site, and write a line for each step, and one at the end."""
    torch.set_num_threads(1)
    rank, sites = arguments.site, arguments.sites
    rows = site_rows(rank, sites, arguments.photos)
    model = make_model(arguments.photos)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dadplug.connect(kit=arguments.kit, start_sites=min(sites, LATE), start_after=5, timeout=600)
    reduction = dadplug.GradientReduction(
        model,
        mode="rankdad",
        min_sites=2,
        late="skip",
        site_timeout=10,
        merge=arguments.merge,
        state={"optimizer": optimizer},
        timeout=600,
    )
    before, first, last = counted(), reduction.step, time.monotonic()
    with Path(arguments.log).open("a", buffering=1) as log:
        for inputs, labels in batches(rows, 100 * rank + first):
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            reduction.synchronize(stop=rank == 0 and time.time() >= arguments.until)
            optimizer.step()
            now = time.monotonic()
            line = {"seconds": now - last, "present": reduction.present_sites, "bytes": counted() - before}
            if rank == 0 and reduction.step % LOOK_EVERY == 0:
                line["accuracy"] = accuracy(model, arguments.photos)
            log.write(json.dumps(line) + "\n")
            last = now
            if reduction.stopped:
                break
        values = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
        made = reduction.step - first
        found = {
            "accuracy": accuracy(model, arguments.photos),
            "bytes": (counted() - before) / made,
            "sum": float(values.double().sum()),
        }
        log.write(json.dumps(found) + "\n")


# The driver


class Scenario:
    """Processes of hub and sites, and what happens to them.

    Args:
        arguments: arguments of the program.
        folder: folder for kits and logs.
        star: the namespaces; None on loopback.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path, star: HubStar | None) -> None:
        self._arguments, self._folder, self._star = arguments, folder, star
        self.begin = time.time()
        self._until = self.begin + 60 * arguments.minutes
        names = [f"hospital{rank}" for rank in range(arguments.sites)]
        address = f"127.0.0.1:{free_port()}" if star is None else f"{HUB}:{PORT}"
        project = {"name": "hospitals", "hub": address, "sites": names, "sealed": True}
        provision(Project.parse(project), folder / "kits")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def _start(self, name: str, space: str | None, command: list[str]) -> None:
        inside = [] if space is None else ["ip", "netns", "exec", space]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with (self._folder / f"{name}.out").open("ab") as output:
            self.processes[name] = subprocess.Popen([*inside, *command], env=environment, stdout=output, stderr=output)

    def start_site(self, rank: int) -> None:
        options = {"site": rank, "sites": self._arguments.sites, "merge": self._arguments.merge, "until": self._until}
        options["photos"] = self._arguments.photos
        options |= {"kit": self._folder / "kits" / f"hospital{rank}", "log": self._folder / f"{rank}.log"}
        command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in options.items())]
        self._start(f"site{rank}", None if self._star is None else self._star.spaces[rank], command)

    def run(self) -> None:
        """Start all, let happen what is to happen, and wait for the end."""
        self._start("hub", None if self._star is None else self._star.middle, hub_command(self._folder / "kits"))
        for rank in range(self._arguments.sites):
            if rank != LATE:
                self.start_site(rank)
        events = [(0.1, self.start_site, LATE), (0.4, self._kill, KILLED), (0.45, self.start_site, KILLED)]
        duration = self._until - self.begin
        for share, event, rank in events:
            self._wait(self.begin + share * duration)
            if rank < self._arguments.sites:
                event(rank)
        self._wait(self._until)
        for name, process in self.processes.items():
            if name != "hub" and process.wait(300):
                raise SystemExit(f"{name} has failed:\n{(self._folder / f'{name}.out').read_text()[-3000:]}")

    def _wait(self, until: float) -> None:
        """Wait, and cut the link of one site off from time to time."""
        every, cut = self._arguments.every, self._arguments.cut
        lines = [] if self._star is None else self._star.lines
        while time.time() < until:
            time.sleep(0.2)
            passed = time.time() - self.begin
            if len(lines) > CUT:
                near_end = time.time() > self._until - max(60.0, 2 * cut)  # so that it is back at the end
                lines[CUT].cut = passed > every and passed % every < cut and not near_end

    def _kill(self, rank: int) -> None:
        process = self.processes[f"site{rank}"]
        inner = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False).stdout
        for pid in (*map(int, inner.split()), process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()

    def lines(self, rank: int) -> list[dict[str, Any]]:
        return [*map(json.loads, (self._folder / f"{rank}.log").read_text().splitlines())]


def alone(steps: int, sites: int, photos: str) -> float:
    """Train in one process with the rows of all sites, and return the accuracy."""
    drawn = [batches(site_rows(rank, sites, photos), 100 * rank) for rank in range(sites)]
    model = make_model(photos)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        inputs, labels = map(torch.cat, zip(*map(next, drawn), strict=True))
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return accuracy(model, photos)


def averaged(kind: str, rounds: int, sites: int, photos: str) -> list[float]:
    """Train by local steps and averages of models, in one process, and return the accuracy after each round.

    Args:
        kind: "fedavg", "fedprox" (mu = 0.1), "scaffold" or "diloco" (Adam inside, Nesterov's momentum outside).
        rounds: number of rounds.
        sites: number of sites.
        photos: folder of photos; empty for digits.
    """
    drawn = [batches(site_rows(rank, sites, photos), 100 * rank) for rank in range(sites)]
    model, found = make_model(photos), []
    adam, lr = kind == "diloco", 0.1
    momentum = {"lr": 0.7, "momentum": 0.9, "nesterov": True} if adam else {"lr": 1.0}
    outer = torch.optim.SGD(model.parameters(), **momentum)
    make = partial(torch.optim.Adam, lr=1e-3) if adam else partial(torch.optim.SGD, lr=lr)
    locals_ = [deepcopy(model) for _ in range(sites)]
    inner = [make(each.parameters()) for each in locals_]
    own = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(sites)]  # control variates of SCAFFOLD
    for _ in range(rounds):
        common = [torch.stack(each).mean(0) for each in zip(*own, strict=True)]
        for local, optimizer, rows, variate in zip(locals_, inner, drawn, own, strict=True):
            local.load_state_dict(model.state_dict())
            for _ in range(LOCAL_STEPS):
                inputs, labels = next(rows)
                optimizer.zero_grad()
                cross_entropy(local(inputs), labels).backward()
                for p, start, c, mine in zip(local.parameters(), model.parameters(), common, variate, strict=True):
                    if kind == "fedprox":
                        p.grad += 0.1 * (p.detach() - start.detach())
                    elif kind == "scaffold":
                        p.grad += c - mine
                optimizer.step()
            if kind == "scaffold":
                for p, start, c, mine in zip(local.parameters(), model.parameters(), common, variate, strict=True):
                    mine += (start - p).detach() / (LOCAL_STEPS * lr) - c
        for p, *each in zip(model.parameters(), *(local.parameters() for local in locals_), strict=True):
            p.grad = p.detach() - torch.stack([own.detach() for own in each]).mean(0)
        outer.step()
        found.append(accuracy(model, photos))
    return found


def show(scenario: Scenario, arguments: argparse.Namespace) -> None:
    """Print what has been found."""
    *steps, last = scenario.lines(0)
    seconds = [line["seconds"] for line in steps[1:]]
    if not seconds:
        raise SystemExit(f"the sites have not trained in {arguments.minutes:g} minutes: start more --minutes")
    median = statistics.median(seconds)
    lost = sum(max(0.0, each - 3 * median) for each in seconds) / sum(seconds)
    ends = [scenario.lines(rank)[-1] for rank in range(arguments.sites)]
    nbytes = max(each["bytes"] for each in ends)
    print(f"all sites hold the same parameters: {len({each['sum'] for each in ends}) == 1}")
    print(f"sites present: {sorted({len(line['present']) for line in steps})}; at the end {steps[-1]['present']}")
    print(
        f"median step {1e3 * median:.0f} ms, longest {max(seconds):.1f} s, trained {100 * (1 - lost):.1f} % of the time"
    )
    print("\n| | accuracy | MB a site | steps or rounds |\n| --- | --- | --- | --- |")
    made = len(steps)
    whole = f"{nbytes * made / 1e6:.0f} | {made} steps, {nbytes / 1e6:.3f} MB each"
    print(f"| rankdad, merge={arguments.merge} | {last['accuracy']:.3f} | {whole} |")
    photos = arguments.photos
    best = alone(made, arguments.sites, photos)
    print(f"| one process with all rows | {best:.3f} | | {made} steps |")
    size = 4 * sum(each.numel() for each in make_model(photos).parameters())
    looks = [
        (sum(seconds[:place]), line["bytes"] / 1e6, line["accuracy"])
        for place, line in enumerate(steps)
        if "accuracy" in line
    ]
    curves = {f"rankdad, merge={arguments.merge}": looks}
    for kind, copies in (("fedavg", 2), ("fedprox", 2), ("scaffold", 4), ("diloco", 2)):
        travel = 0.0 if arguments.rate == "none" else 8 * copies * size / bits(arguments.rate)
        rounds = min(arguments.most_rounds, int(sum(seconds) / (travel + 2e-3 * arguments.round_trip)) or 1)
        found, one = averaged(kind, rounds, arguments.sites, photos), copies * size / 1e6
        print(f"| {kind} | {found[-1]:.3f} | {rounds * one:.0f} | {rounds} rounds of {LOCAL_STEPS} steps |")
        each = travel + 2e-3 * arguments.round_trip
        curves[kind] = [(place * each, place * one, value) for place, value in enumerate(found, 1)]
    if arguments.picture:
        draw(curves, best, arguments)


def draw(curves: dict[str, list[tuple[float, float, float]]], best: float, arguments: argparse.Namespace) -> None:
    """Draw the accuracy of each way over seconds, and over megabytes of a site.

    Args:
        curves: seconds, megabytes and accuracy, by way.
        best: accuracy of one process with all rows.
        arguments: arguments of the program.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for place, (panel, label) in enumerate(
        zip(panels, ("seconds", "megabytes of a site, sent and received"), strict=True)
    ):
        for name, curve in curves.items():
            panel.plot([point[place] for point in curve], [point[2] for point in curve], label=name)
        panel.axhline(best, color="black", linewidth=1, linestyle=":", label="one process with all rows")
        panel.set_xlabel(label)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("held-out accuracy")
    panels[1].legend(frameon=False)
    what = "photos" if arguments.photos else "digits"
    figure.suptitle(f"{arguments.sites} sites, {what} by class, {arguments.rate}, {arguments.minutes:g} minutes")
    figure.savefig(arguments.picture, dpi=110)


def bits(rate: str) -> float:
    """Return the bits a second of a rate as tc writes it."""
    return float(rate[:-4]) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[rate[-4:]]


def main() -> None:
    parser = parser_of(
        __doc__,
        sites=8,
        minutes=30.0,
        rate="10mbit",
        round_trip=(40.0, "milliseconds"),
        merge={"default": "owner", "choices": ["owner", "all", "auto"]},
        every=(300.0, "seconds from one cut to the next"),
        cut=(60.0, "seconds of a cut"),
        most_rounds=(2000, "rounds of averaged models, at most"),
        photos=("", "folder with the photos of cats and dogs; digits without it"),
        picture={"type": Path, "help": "file for a picture of the accuracy"},
        keep={"type": Path, "help": "folder for kits and logs; by default they are removed"},
        site={"type": int, "default": -1, "help": argparse.SUPPRESS},
        kit={"help": argparse.SUPPRESS},
        log={"help": argparse.SUPPRESS},
        until={"type": float, "help": argparse.SUPPRESS},
    )
    arguments = parser.parse_args()
    if arguments.site >= 0:
        train_site(arguments)
        return
    shaped = arguments.rate != "none"
    if shaped and not may_make_links():
        parser.error("a rate needs root, tc and TUN devices: pass --rate none")
    star = HubStar(arguments.sites, arguments.rate, arguments.round_trip) if shaped else None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that sites and namespaces go, too
    holder = nullcontext(arguments.keep) if arguments.keep else tempfile.TemporaryDirectory()
    with holder as folder, star or nullcontext():
        scenario = Scenario(arguments, Path(folder), star)
        try:
            scenario.run()
        finally:
            end(*scenario.processes.values())
        show(scenario, arguments)


if __name__ == "__main__":
    main()
