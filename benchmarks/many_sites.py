"""Eight sites with slow links: step times and bytes of rankdad with and without owners, and steps to an accuracy.

    sudo python benchmarks/many_sites.py                              MNISTNet, 8 sites, 10 and 100 Mbit/s
    python benchmarks/many_sites.py --rates none --sites 4            without root, on loopback
    python benchmarks/many_sites.py --digits --seeds 3                steps to 0.93 on the embedded digits, on loopback
    sudo python benchmarks/many_sites.py --by-class 200 --rates 10mbit --methods dsgd,rankdad:rank=auto
                                                                      accuracy and bytes after 200 steps on the digits,
                                                                      each site with one or two classes
    sudo python benchmarks/many_sites.py --rates 10mbit --methods alone,powersgd --results rows.jsonl
                                                                      in pieces: rows are added to the file as they are
                                                                      found, and the table is of all of them

Each site is a network namespace of its own behind a link of the given rate in both directions; a bridge joins them. A
step is forward, backward, the exchange and the optimizer's step, timed at site 0 after a barrier. Bytes are those that
a site hands to the transport in a step: the mean over sites, and those of the site that sends most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from attach import Attached
from command import connect_site, parser_of
from drive import check_rates, read, title
from held_out import accuracy
from link import KEEP_MEMORY, may_make_links, run, shaping
from torch import nn
from workloads import WORKLOADS, loss

from dadplug.data import load_dataset, site_indices
from dadplug.exchange import Traffic
from dadplug.models import build_for
from dadplug.support.processes import free_port

METHODS = "alone,rankdad:merge=all,rankdad:merge=owner,powersgd"
DIGITS_METHODS = "rankdad:merge=all,rankdad:merge=owner"
WARM_UP = 5
LAST = 10  # steps whose accuracies are averaged


class Star:
    """Namespaces of some sites, each with a shaped link to a bridge; they go when the block ends.

    Args:
        rate: rate of each link, as tc writes it, or none.
        sites: number of sites.
    """

    def __init__(self, rate: str, sites: int) -> None:
        self.rate = rate
        self.middle = f"middle-{os.getpid()}"
        self.spaces = [f"site{rank}-{os.getpid()}" for rank in range(sites)]

    def __enter__(self) -> Star:
        run("ip", "netns", "add", self.middle)
        inside = ("ip", "netns", "exec", self.middle)
        run(*inside, "ip", "link", "add", "br0", "type", "bridge")
        run(*inside, "ip", "link", "set", "br0", "up")
        for rank, space in enumerate(self.spaces):
            own, far = f"own{rank}", f"far{rank}"
            run("ip", "netns", "add", space)
            own_place, far_place = ("netns", space), ("netns", self.middle)
            run("ip", "link", "add", own, *own_place, "type", "veth", "peer", "name", far, *far_place)
            run(*inside, "ip", "link", "set", far, "master", "br0")
            run(*inside, "ip", "link", "set", far, "up")
            here = ("ip", "netns", "exec", space)
            run(*here, "ip", "addr", "add", f"10.78.0.{rank + 1}/24", "dev", own)
            run(*here, "ip", "link", "set", "lo", "up")
            run(*here, "ip", "link", "set", own, "up")
            if self.rate != "none":
                run(*here, *shaping(own, self.rate))
                run(*inside, *shaping(far, self.rate))
        return self

    def __exit__(self, *exc: object) -> None:
        for space in (*self.spaces, self.middle):
            subprocess.run(["ip", "netns", "del", space], check=False)

    def command(self, rank: int, program: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.spaces[rank], *program]


def start(arguments: argparse.Namespace, rate: str) -> Iterator[dict]:
    """Run this program at all sites, and yield what site 0 finds."""
    program = [sys.executable, __file__, *sys.argv[1:], "--site"]
    star = None if arguments.loopback else Star(rate, arguments.sites)
    shared = KEEP_MEMORY | os.environ | {"WORLD_SIZE": str(arguments.sites), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "10.78.0.1" if star else "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    with star or contextlib.nullcontext():
        try:
            for rank in reversed(range(arguments.sites)):
                own = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": f"own{rank}" if star else "lo"}
                command = star.command(rank, program) if star else program
                output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                processes.append(subprocess.Popen(command, env=shared | own, stdout=output, text=True))
            for line in processes[-1].stdout:
                if line.startswith("{"):
                    yield {"rate": rate, "sites": arguments.sites} | json.loads(line)
            if any(process.wait() for process in processes):
                raise SystemExit("a site has failed")
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()


def time_steps(arguments: argparse.Namespace) -> None:
    """Time the steps of each method, and count its bytes."""
    rank = dist.get_rank()
    for method in arguments.methods.split(","):
        torch.manual_seed(0)
        workload = WORKLOADS[arguments.model]
        attached = Attached(workload.build(), method, arguments.rank)
        optimizer = torch.optim.SGD(attached.model.parameters(), lr=1e-3)
        inputs, targets = workload.draw(workload.batch_size, torch.Generator().manual_seed(rank))
        times = []
        for _ in range(WARM_UP + arguments.steps):
            dist.barrier()
            begin = time.perf_counter()
            optimizer.zero_grad()
            loss(attached.model(inputs), targets).backward()
            attached.synchronize()
            optimizer.step()
            times.append(time.perf_counter() - begin)
        sent: list[int] = [0] * arguments.sites
        dist.all_gather_object(sent, 0 if attached.reduction is None else attached.reduction.traffic.bytes_sent)
        if rank == 0:
            row = {"method": method, "ms": 1e3 * statistics.median(times[WARM_UP:])}
            print(json.dumps(row | {"mean": statistics.mean(sent) / 1e6, "most": max(sent) / 1e6}), flush=True)
        attached.detach()


def batches(
    data, rank: int, sites: int, size: int, seed: int, split: str = "iid"
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Draw this site's batches, epoch after epoch; as many at all sites in an i.i.d. split."""
    share = site_indices(data.train.labels, rank, sites, split, seed)[: len(data.train) // sites]
    generator = torch.Generator().manual_seed(seed)
    while True:
        loader = torch.utils.data.DataLoader(
            data.train.subset(share), size, shuffle=True, drop_last=True, generator=generator
        )
        yield from loader


def count_steps(arguments: argparse.Namespace) -> None:
    """Count the steps to the target by each method, for some seeds."""
    rank, sites = dist.get_rank(), arguments.sites
    data = load_dataset("digits")
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        torch.manual_seed(seed)
        fresh, sized = build_for(data, "MNISTNet")
        for method in arguments.methods.split(","):
            attached = Attached(deepcopy(fresh), method, arguments.rank)
            optimizer = torch.optim.Adam(attached.model.parameters(), lr=1e-3)
            best = 0.0
            for step, (inputs, labels) in enumerate(batches(sized, rank, sites, 16, seed), 1):
                optimizer.zero_grad()
                nn.functional.cross_entropy(attached.model(inputs), labels).backward()
                attached.synchronize()
                optimizer.step()
                if step % 2:
                    continue
                best = max(best, accuracy(attached.model, sized))
                if best >= arguments.target or step >= arguments.most_steps:
                    break
            attached.detach()
            if rank == 0:
                reached = step if best >= arguments.target else 0
                print(json.dumps({"method": method, "seed": seed, "steps": reached, "best": best}), flush=True)


def train_by_class(arguments: argparse.Namespace) -> None:
    """Train by each method for so many steps, for some seeds, and report the accuracy and what a site has sent."""
    rank, sites = dist.get_rank(), arguments.sites
    data = load_dataset("digits")
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        torch.manual_seed(seed)
        fresh, sized = build_for(data, "MNISTNet")
        for index, layer in enumerate(fresh.middle):  # statistics of batches of one class are those of no other site
            if isinstance(layer, nn.BatchNorm1d):
                fresh.middle[index] = nn.LayerNorm(layer.num_features)
        for method in arguments.methods.split(","):
            attached = Attached(deepcopy(fresh), method, arguments.rank)
            optimizer = torch.optim.Adam(attached.model.parameters(), lr=1e-3)
            traffic = Traffic() if attached.reduction is None else attached.reduction.traffic
            before, begin, found = 0, time.perf_counter(), []
            rows = batches(sized, rank, sites, 16, seed, "by-class")
            for step, (inputs, labels) in zip(range(1, arguments.by_class + 1), rows, strict=False):
                optimizer.zero_grad()
                nn.functional.cross_entropy(attached.model(inputs), labels).backward()
                attached.synchronize()
                optimizer.step()
                before = before or traffic.total_bytes_sent  # of the first step, in which the link is measured
                if step > arguments.by_class - LAST:
                    found.append(accuracy(attached.model, sized))
            ms = 1e3 * (time.perf_counter() - begin) / arguments.by_class
            sent: list[int] = [0] * sites
            dist.all_gather_object(sent, traffic.total_bytes_sent - before)
            attached.detach()
            if rank == 0:
                row = {"method": method, "seed": seed, "accuracy": statistics.mean(found), "ms": ms}
                print(json.dumps(row | {"mean": statistics.mean(sent) / 1e6, "most": max(sent) / 1e6}), flush=True)


def print_accuracies(rows: list[dict]) -> None:
    """Print accuracies, times and bytes by rate and method, the mean over seeds."""
    head = (
        "rate",
        "method",
        f"accuracy of the last {LAST} steps",
        "ms a step",
        "MB a site after the first step",
        "at most",
    )
    print(f"| {' | '.join(head)} |")
    print("| --- " * 6 + "|")
    for rate, method in dict.fromkeys((row["rate"], row["method"]) for row in rows):
        case = [row for row in rows if (row["rate"], row["method"]) == (rate, method)]
        accuracy, ms, mean, most = (
            statistics.mean(row[key] for row in case) for key in ("accuracy", "ms", "mean", "most")
        )
        print(f"| {title(rate)} | {title(method)} | {accuracy:.4f} | {ms:.0f} | {mean:.1f} | {most:.1f} |")


def show(arguments: argparse.Namespace) -> None:
    """Run the sites at each rate, keep the rows, and print the table of all of them."""
    rows = [] if arguments.results is None else read(arguments.results)
    for rate in ["none"] if arguments.digits else arguments.rates.split(","):
        for row in start(arguments, rate):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            if arguments.results is not None:
                with arguments.results.open("a") as file:
                    print(json.dumps(row), file=file)
    if arguments.by_class:
        print_accuracies([row for row in rows if "accuracy" in row])
        return
    (print_steps if arguments.digits else print_times)([row for row in rows if ("seed" in row) == arguments.digits])


def print_steps(rows: list[dict]) -> None:
    """Print the steps to the target, by method and seed."""
    seeds = sorted({row["seed"] for row in rows})
    print("| | " + " | ".join(f"seed {seed}" for seed in seeds) + " |")
    print("| --- " * (len(seeds) + 1) + "|")
    for method in dict.fromkeys(row["method"] for row in rows):
        found = {row["seed"]: row for row in rows if row["method"] == method}
        cells = [
            str(found[seed]["steps"] or f"not: {found[seed]['best']:.3f}") if seed in found else "" for seed in seeds
        ]
        print(f"| {title(method)} | " + " | ".join(cells) + " |")


def print_times(rows: list[dict]) -> None:
    """Print times and bytes of a step; the median where a case was measured several times."""
    print("| rate | sites | method | ms a step | MB a step, mean | MB, the site that sends most |")
    print("| --- | --- | --- | --- | --- | --- |")
    for rate, sites, method in dict.fromkeys((row["rate"], row["sites"], row["method"]) for row in rows):
        case = [row for row in rows if (row["rate"], row["sites"], row["method"]) == (rate, sites, method)]
        ms, last = statistics.median(row["ms"] for row in case), case[-1]
        shown = f"| {title(rate)} | {sites} | {title(method)} | {ms:.0f} |"
        print(f"{shown} {last['mean']:.3f} | {last['most']:.3f} |")


def main() -> None:
    parser = parser_of(
        __doc__,
        sites=8,
        rates="10mbit,100mbit",
        methods=(None, f"as benchmarks/attach.py names them; {METHODS}, or {DIGITS_METHODS} with --digits"),
        model={"default": "mnistnet", "choices": list(WORKLOADS)},
        rank=4,
        steps=15,
        digits=(False, "count steps to an accuracy instead"),
        by_class=(0, "train for so many steps on digits by class instead"),
        seeds=3,
        first_seed=0,
        results={"type": Path, "help": "file of rows, to which those found are added"},
        target=0.93,
        most_steps=400,
        site=(False, argparse.SUPPRESS),
    )
    arguments = parser.parse_args()
    arguments.methods = arguments.methods or (DIGITS_METHODS if arguments.digits else METHODS)
    arguments.loopback = arguments.digits or not may_make_links()
    if arguments.site:
        connect_site()
        if arguments.by_class:
            train_by_class(arguments)
            return
        (count_steps if arguments.digits else time_steps)(arguments)
        return
    if not arguments.digits:
        check_rates(parser, arguments.rates, arguments.loopback)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that sites and namespaces go, too
    show(arguments)


if __name__ == "__main__":
    main()
