"""Median time of a training step at two sites, by DDP and by each method, in one run.

    sudo python benchmarks/link.py 100mbit python benchmarks/step_time.py
    torchrun --nproc-per-node 2 benchmarks/step_time.py                     unshaped, on loopback
    sudo python benchmarks/link.py none python benchmarks/step_time.py --rates 10mbit,100mbit,none

With --rates the sites themselves give the link one rate after the other, and build and warm each method up before,
while it is unshaped (but for auto, which chooses by the link). See benchmarks/two_site_link.py for all models.

One thread a site, and one library of products for all methods (benchmarks/libraries.py). A step is forward, backward,
the exchange and the optimizer's step; before each the sites wait for
one another, outside of the measured time. Bytes are those of the network interface's counter where the link has one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from attach import Attached, parse
from command import connect_site, parser_of
from drive import processor
from link import reshape
from workloads import LARGE, WORKLOADS, loss

MODELS = WORKLOADS | LARGE
WARM_UP = 5  # steps; kernels compile, payloads find their sizes, DDP makes its buckets anew, PowerSGD's hook begins
LEAST = 3


def sent() -> int:
    """Bytes that this site's interface has sent; on loopback, which all sites share, its part of them."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    sharing = dist.get_world_size() if interface == "lo" else 1
    return int(counter.read_text()) // sharing if counter.exists() else 0


@dataclass(frozen=True)
class Measured:
    """Step times by a method at a rate.

    Attributes:
        seconds: median time of a step.
        nbytes: bytes a step.
        steps: number of steps.
        peak: largest resident memory of the process until then, in bytes; 0 where the system does not report it.
    """

    seconds: float
    nbytes: int
    steps: int
    peak: int


def peak() -> int:
    """Return the largest resident memory of this process so far, in bytes (Linux)."""
    status = Path("/proc/self/status")
    return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0]) if status.exists() else 0


def meet(go_on: bool = True) -> bool:
    """Wait for the other sites; return whether all want to go on."""
    wanted = torch.full((dist.get_world_size(),), int(go_on))
    answers = torch.empty_like(wanted)
    dist.all_to_all_single(answers, wanted)  # all leave at once; from an all-reduce one leaves later by a latency
    return bool(answers.all())


def time_steps(step: Callable[[], None], most: int, seconds: float, least: int = LEAST, interval: int = 1) -> Measured:
    """Time intervals of steps until there are enough, or they have taken long enough.

    Args:
        step: takes a step.
        most: intervals that are enough.
        seconds: time that is long enough.
        least: intervals at least.
        interval: steps of an interval.
    """
    times: list[float] = []
    meet()
    before = sent()
    while meet(len(times) < least or (len(times) < most and sum(times) * interval < seconds)):
        start = time.perf_counter()
        for _ in range(interval):
            step()
        times.append((time.perf_counter() - start) / interval)
    steps = interval * len(times)
    return Measured(statistics.median(times), (sent() - before) // steps, steps, peak())


def measure(name: str, arguments: argparse.Namespace) -> Iterator[tuple[str, Measured]]:
    """Measure a method at each rate."""
    for rates in [[rate] for rate in arguments.rates] if parse(name)[0] == "auto" else [arguments.rates]:
        if arguments.shape:
            reshape("none")
        torch.manual_seed(0)
        workload = MODELS[arguments.model]
        model = workload.build()
        attached = Attached(model, name, arguments.rank)
        make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[arguments.optimizer]
        optimizer = make(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(dist.get_rank())
        inputs, targets = workload.draw(arguments.batch_size or workload.batch_size, generator)

        def step(attached=attached, optimizer=optimizer, inputs=inputs, targets=targets) -> None:
            loss(attached.model(inputs), targets).backward()
            attached.step(optimizer)
            optimizer.zero_grad()

        chooses = parse(name)[0] == "auto"
        if arguments.shape and chooses:
            reshape(rates[0])
        for _ in range(arguments.warm_up):
            step()
        for rate in rates:
            meet()
            if arguments.shape:
                reshape(rate)
            yield rate, time_steps(step, arguments.steps, arguments.seconds)
        if arguments.shape:
            reshape("none")
        attached.detach()


def main() -> None:
    parser = parser_of(
        __doc__,
        methods=("alone,ddp,ddp-powersgd,dsgd,dad,rankdad", "as benchmarks/attach.py"),
        model={"choices": list(MODELS), "default": "mnistnet"},
        json=(None, "file to append the results to, a line a method and rate"),
        rates=(None, "rates to give the link, such as 10mbit,1gbit,none; by default as it is"),
        label=("", "what the file calls the rate, without --rates"),
        rank=4,
        batch_size={"type": int, "help": "samples a site; by default each model's own"},
        warm_up={"type": int, "default": WARM_UP, "help": "steps of a method before any is timed"},
        steps=(60, "most steps of a method at a rate"),
        seconds=(20.0, "time after which steps of a method are enough"),
        optimizer={"choices": ("sgd", "adam"), "default": "sgd"},
    )
    arguments = parser.parse_args()
    arguments.shape = arguments.rates is not None
    if arguments.shape and "GLOO_SOCKET_IFNAME" not in os.environ:
        parser.error("--rates needs a link: run it by `sudo python benchmarks/link.py none python …`")
    arguments.rates = arguments.rates.split(",") if arguments.shape else [arguments.label]
    connect_site()
    peers: dict[str, float] = {}
    for name in arguments.methods.split(","):
        for rate, measured in measure(name, arguments):
            if dist.get_rank() == 0:
                show(name, rate, measured, peers, arguments)


def show(name: str, rate: str, measured: Measured, ddp: dict[str, float], arguments: argparse.Namespace) -> None:
    """Print a line, and append it to the file."""
    if name == "ddp":
        ddp[rate] = measured.seconds
    ratio = f"{ddp[rate] / measured.seconds:6.1f} x faster than ddp" if rate in ddp else ""
    print(f"{name:24} {rate:8} {1e3 * measured.seconds:8.1f} ms   {measured.nbytes:12,} bytes   {ratio}", flush=True)
    if arguments.json:
        row = {"model": arguments.model, "rate": rate, "method": name, "ms": 1e3 * measured.seconds}
        row |= {"processor": processor()}
        with open(arguments.json, "a") as results:
            results.write(
                json.dumps(row | {"bytes": measured.nbytes, "steps": measured.steps, "peak": measured.peak}) + "\n"
            )


if __name__ == "__main__":
    main()
