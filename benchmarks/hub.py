"""Step times and bytes over the hub and over plain streams, between two sites, in alternating blocks of one run.

    sudo python benchmarks/hub.py                                       100 Mbit/s and unshaped; rankdad, dad and dsgd
    sudo python benchmarks/hub.py --rates none --model vit --blocks 20
    sudo python benchmarks/hub.py --quick                               a few steps, to see that it works
    python benchmarks/hub.py --rates none                               without root, on loopback; bytes are left out

Two pairs of sites are connected over the same link, one by plain streams and one over a hub that runs beside site 0.
The pairs take turns: while one executes a block of steps, the processes of the other wait for their next order. A
short block of each is not counted. Both pairs build the same models and draw the same data.

A step is forward, backward, the exchange and the optimizer's step, timed at site 0; quartiles are in parentheses. Bytes
are those that the interfaces of both sites have sent, with all that the kernel and TLS add, a step. One thread a site.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from attach import Attached
from command import parser_of
from drive import append, check_rates, title
from kits import end, hub_command, make_kits
from link import ADDRESSES, Link, Loopback, may_make_links
from step_time import sent
from workloads import WORKLOADS, loss

import dadplug
from dadplug.processes import free_port

HUB_PORT = 8470
PLAIN, HUB = "plain", "hub"
_SETTLE = 0.05  # seconds until the last bytes of a block have left the interfaces


# A site


class Steps:
    """Training of a site by one method.

    Args:
        model: name of the model.
        method: name of the method, see `attach`.
        rank: number of the site.
    """

    def __init__(self, model: str, method: str, rank: int) -> None:
        torch.manual_seed(0)
        workload = WORKLOADS[model]
        self._attached = Attached(workload.build(), method)
        self._optimizer = torch.optim.SGD(self._attached.model.parameters(), lr=1e-3)
        self._batch = workload.draw(workload.batch_size, torch.Generator().manual_seed(rank))

    def run(self, count: int) -> list[float]:
        """Execute steps, and return their times in seconds."""
        inputs, targets = self._batch
        times = []
        for _ in range(count):
            start = time.perf_counter()
            loss(self._attached.model(inputs), targets).backward()
            self._attached.synchronize()
            self._optimizer.step()
            self._optimizer.zero_grad()
            times.append(time.perf_counter() - start)
        return times

    def digest(self) -> int:
        """Return a check sum of the parameters."""
        return zlib.crc32(torch.cat([each.detach().reshape(-1) for each in self._attached.model.parameters()]).numpy())

    def end(self) -> None:
        """Detach the method."""
        self._attached.detach()


def run_site(kit: str | None) -> None:
    """Execute the orders on the standard input, and answer each by a line.

    Args:
        kit: folder of this site's kit; None to connect by plain streams.
    """
    torch.set_num_threads(1)
    dadplug.connect(kit=kit)
    steps: Steps | None = None
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = None
        if order["do"] == "begin":
            steps = Steps(order["model"], order["method"], torch.distributed.get_rank())
            steps.run(order["warm_up"])
        elif order["do"] == "sent":
            answer = sent()
        elif order["do"] == "digest" and steps is not None:
            answer = steps.digest()
        elif steps is not None:
            answer = steps.run(order["steps"]) if order["do"] == "run" else steps.end()
        print(json.dumps(answer), flush=True)


# The driver


class Site:
    """A process of a site that gets orders.

    Args:
        link: the link.
        rank: number of the site.
        kit: folder of its kit; None for plain streams.
        port: port of the meeting point of plain streams.
    """

    def __init__(self, link: Link | Loopback, rank: int, kit: Path | None, port: int) -> None:
        program = [sys.executable, __file__, "--site", *([] if kit is None else [str(kit)])]
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._rank = rank
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors, "text": True}
        self.process = link.start(rank, program, port, **streams)

    def order(self, **order: object) -> None:
        """Send an order."""
        with contextlib.suppress(BrokenPipeError):  # `answer` finds out why
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the answer to an order."""
        line = self.process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise SystemExit("\n".join([f"-- site {self._rank}", *self._errors.read().splitlines()[-15:]]))
        return json.loads(line)


class Pair:
    """The sites of a way to connect, two by default."""

    def __init__(self, link: Link | Loopback, kits: Path | None, port: int, names: Sequence[str] = ("a", "b")) -> None:
        self.sites = [Site(link, rank, kits and kits / name, port) for rank, name in enumerate(names)]

    def ask(self, **order: object) -> list[Any]:
        """Let all sites execute an order; return their answers."""
        for site in self.sites:
            site.order(**order)
        return [site.answer() for site in self.sites]


@dataclass
class Way:
    """Times of steps over one way to connect, in seconds, by block; bytes of all of them."""

    blocks: list[list[float]] = field(default_factory=list)
    nbytes: int = 0

    @property
    def times(self) -> list[float]:
        return [time for block in self.blocks for time in block]

    @property
    def bytes_per_step(self) -> float:
        return self.nbytes / len(self.times)


def run_block(pair: Pair, steps: int, way: Way) -> None:
    """Let a pair execute a block of steps, and add times and bytes."""
    before = sum(pair.ask(do="sent"))
    times = pair.ask(do="run", steps=steps)[0]
    time.sleep(_SETTLE)
    way.nbytes += sum(pair.ask(do="sent")) - before
    way.blocks.append(times)


@contextlib.contextmanager
def running_pairs(link: Link | Loopback) -> Iterator[dict[str, Pair]]:
    """Start a hub beside site 0, and both pairs."""
    loopback = isinstance(link, Loopback)
    port = free_port() if loopback else HUB_PORT
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        kits = Path(folder, "kits")
        make_kits(kits, "127.0.0.1" if loopback else ADDRESSES[0], port, ("a", "b"))
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        hub = link.start(0, hub_command(kits), 0, **quiet)
        stack.callback(end, hub)
        raise_priority(hub.pid)
        meeting_point = free_port() if loopback else 29500
        pairs = {}
        for name in (PLAIN, HUB):
            pairs[name] = Pair(link, kits if name == HUB else None, meeting_point)
            stack.callback(end, *(site.process for site in pairs[name].sites))
        yield pairs


def raise_priority(process: int) -> None:
    """Let a process go before this one and its children, if they run at real-time priority.

    Ordinary scheduling gives a core at once to a process that was mostly asleep, as the hub; that at real-time priority
    would let it wait until a site blocks.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        priority = os.sched_getparam(0).sched_priority + 1
        os.sched_setscheduler(process, os.sched_getscheduler(0), os.sched_param(priority))


def measure(pairs: dict[str, Pair], method: str, arguments: argparse.Namespace) -> dict[str, Way]:
    """Measure a method over both ways, in turns."""
    ways: dict[str, Way] = {}
    for pair in pairs.values():
        pair.ask(do="begin", model=arguments.model, method=method, warm_up=arguments.warm_up)
    first = Way()  # not counted
    for pair in pairs.values():
        run_block(pair, min(3, arguments.steps), first)
    most = int(arguments.seconds / statistics.median(first.times))
    steps = max(2, min(arguments.steps, most))
    for block in range(arguments.blocks):
        for name in [HUB, PLAIN] if block % 2 else [PLAIN, HUB]:
            run_block(pairs[name], steps, ways.setdefault(name, Way()))
    for pair in pairs.values():
        pair.ask(do="end")
    return ways


def spread(values: list[float]) -> str:
    """Return median and quartiles as text, in milliseconds."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{1e3 * middle:7.2f} ({1e3 * low:.2f} to {1e3 * high:.2f})"


def row(method: str, rate: str, model: str, ways: dict[str, Way]) -> dict[str, Any]:
    """Return the figures of a method at a rate: medians in milliseconds, bytes a step, and their relations.

    The ratio and the difference are medians over pairs of blocks, of the ratios and differences of their means. Medians
    of blocks would say less: a site that is ahead of the other one in one step is behind it in the next one, so that
    short and long steps alternate.
    """
    pairs = [
        (statistics.fmean(plain), statistics.fmean(hub))
        for plain, hub in zip(ways[PLAIN].blocks, ways[HUB].blocks, strict=True)
    ]
    return {
        "model": model,
        "rate": rate,
        "method": method,
        "plain": 1e3 * statistics.median(ways[PLAIN].times),
        "hub": 1e3 * statistics.median(ways[HUB].times),
        "ratio": statistics.median(hub / plain for plain, hub in pairs),
        "difference": 1e3 * statistics.median(hub - plain for plain, hub in pairs),
        "steps": len(ways[HUB].times),
        "plain bytes": ways[PLAIN].bytes_per_step,
        "hub bytes": ways[HUB].bytes_per_step,
    }


def show(found: dict[str, Any], ways: dict[str, Way], counts: bool) -> None:
    """Print the figures of a method at a rate."""
    print(
        f"{found['method']:10} {title(found['rate']):12} plain {spread(ways[PLAIN].times)} ms   hub "
        f"{spread(ways[HUB].times)} ms   ratio {found['ratio']:.3f}   difference {found['difference']:+.2f} ms",
        flush=True,
    )
    if counts:
        plain, hub = found["plain bytes"], found["hub bytes"]
        print(f"{'':23} plain {plain:,.0f} bytes a step, hub {hub:,.0f}, ratio {hub / plain:.3f}", flush=True)


def main() -> int:
    parser = parser_of(
        __doc__,
        methods=("rankdad,dad,dsgd", "as benchmarks/attach.py names them"),
        model={"choices": list(WORKLOADS), "default": "mnistnet"},
        rates="100mbit,none",
        steps=(20, "most steps of a block"),
        seconds=(4.0, "time after which steps of a block are enough"),
        blocks=(12, "blocks of each way"),
        warm_up=(10, "steps of a method before its first block"),
        quick=(False, "three blocks of five steps"),
        json=(None, "file to append the figures to, a line a method and rate"),
        site={"nargs": "?", "const": "", "help": argparse.SUPPRESS},  # a process of a site, with its kit
    )
    arguments = parser.parse_args()
    if arguments.site is not None:
        run_site(arguments.site or None)
        return 0
    if arguments.quick:
        arguments.steps, arguments.blocks = 5, 3
    loopback = not may_make_links()
    check_rates(parser, arguments.rates, loopback)
    for rate in arguments.rates.split(","):
        with Loopback() if loopback else Link(rate) as link, running_pairs(link) as pairs:
            for method in arguments.methods.split(","):
                ways = measure(pairs, method, arguments)
                found = row(method, rate, arguments.model, ways)
                show(found, ways, counts=not loopback)
                if arguments.json:
                    append(arguments.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
