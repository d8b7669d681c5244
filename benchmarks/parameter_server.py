"""Seconds until held-out accuracy is reached where sites are not equally fast: the parameter server and others.

    sudo python benchmarks/parameter_server.py --data-dir FOLDER           MNIST's files, over a link of 100 Mbit/s
    sudo python benchmarks/parameter_server.py --data-dir FOLDER --quick   one seed, two ways, a low target
    python benchmarks/parameter_server.py --quick                          scikit-learn's digits, on loopback
    sudo python benchmarks/parameter_server.py --batches 60 --round-trip 40     milliseconds a batch, no target

MNISTNet, Adam, batches of 32 on each of two sites with one thread. Cases: `equal` sites; site 1 is four times `slow`er;
the slow site `moves`, drawn anew every two seconds. A site is slowed down by sleeping three times the processor time
of its steps. The clock runs through training alone, and is that of the site that takes longer. Between laps of
training, of two seconds each or of 20 synchronous steps, site 0's model is evaluated; the target is reached when the
mean of two evaluations in succession is. Ways, with options after a colon:
server:rank=16+wire=bf16+staleness=8      dadplug.ParameterServer with mode rankdad, or mode=..., with deal=shared,
                                          batches of all data on demand, or deal=own, of a site's own
rankdad:rank=16+sync_batchnorm=true       synchronous steps; any mode of dadplug.GradientReduction
localsgd:every=32+wire=bf16               dadplug.LocalSGD; diloco:... with DiLoCo's outer optimizer
ddp, postlocal:every=16                   DistributedDataParallel, alone and with torch's PostLocalSGD
rpc                                       a server by torch.distributed.rpc and distributed autograd, beside site 0
With --keep and --stop-after a long table is measured in pieces: the same command until it exits with 0. With --batches
each site makes so many batches, and the table has milliseconds a batch of the site that takes longer. --round-trip is
that of the link, in milliseconds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rpc_server
import torch
import torch.distributed as dist
from attach import parse
from command import parser_of
from drive import PIECES, append, begin, check_rates, may_begin, read, run_sites, title
from held_out import accuracy, batches, dealt_batches
from libraries import use_library
from link import may_make_links, reshape
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import dadplug
from dadplug.data import DataPair, load_dataset
from dadplug.models import build_for

SERVER = "server:rank=16+wire=bf16"
SYNCHRONOUS = "rankdad:rank=16+wire=bf16+sync_batchnorm=true"
METHODS = f"{SYNCHRONOUS},{SERVER}+deal=shared,{SERVER},{SERVER}+quorum=2,diloco:every=32+wire=bf16,postlocal:every=32"
CASES = ("equal", "slow", "moves")
TARGETS = {"mnist": 0.955, "digits": 0.95}
WARM_UP, FACTOR = 3, 4.0
LAP_STEPS, LAP_SECONDS, WINDOW = 20, 2.0, 2.0


class Way:
    """A model in training.

    Args:
        model: the model.
        name: the way's name with its options.
        optimizer: adam or sgd.

    Attributes:
        plain_model: the model without DDP.
        waits: whether each step waits for the other site, so that laps have as many steps at both.
        deals: whether the server has a part in which batches a site gets.
        private: whether these are of the site's own data.
    """

    def __init__(self, model: nn.Module, name: str, optimizer: str) -> None:
        kind, options = parse(name)
        self.model, self.plain_model, self.waits, self.deals, self.private = model, model, True, False, False
        parameters = model.parameters()
        self.optimizer: Any = (
            torch.optim.Adam(parameters, lr=1e-3) if optimizer == "adam" else torch.optim.SGD(parameters, lr=0.05)
        )
        self.trainer: rpc_server.RpcTrainer | None = None
        if kind == "rpc":
            self.exchange, self.waits = None, False
            settings = {"lr": 1e-3 if optimizer == "adam" else 0.05}
            self.trainer = rpc_server.RpcTrainer(model, type(self.optimizer), **settings)
        elif kind == "server":
            self.exchange: Any = dadplug.ParameterServer(model, self.optimizer, **options)
            self.step, self.waits = self.exchange.step, False
            self.deals, self.private = "deal" in options, options.get("deal") == "own"
        elif kind in ("localsgd", "diloco"):
            outer = {"outer_lr": 0.7, "outer_momentum": 0.9} if kind == "diloco" else {}
            self.exchange = dadplug.LocalSGD(model, self.optimizer, **outer | options)
            self.step = self.exchange.step
        elif kind in ("ddp", "postlocal"):
            self.exchange, self.step = None, self.optimizer.step
            self.model = nn.parallel.DistributedDataParallel(model)
            if kind == "postlocal":
                every = int(options.get("every", 16))
                state = post_localSGD_hook.PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
                self.model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
                averager = PeriodicModelAverager(period=every, warmup_steps=0)
                self.optimizer = PostLocalSGDOptimizer(self.optimizer, averager)
                self.step = self.optimizer.step
        else:
            self.exchange = dadplug.GradientReduction(model, mode=kind, **options)
            self.step = self._synchronous_step

    def _synchronous_step(self) -> None:
        self.exchange.synchronize()
        self.optimizer.step()

    def train(self, inputs: Tensor, labels: Tensor) -> None:
        """Make the step of a batch."""
        if self.trainer is not None:
            self.trainer.train(inputs, labels)
            return
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), labels).backward()
        self.step()

    def prepare_evaluation(self) -> None:
        """Average the statistics of batch normalisation, or fetch the model of a server."""
        if self.trainer is not None:
            self.trainer.fetch()
        if self.exchange is not None and self.waits:  # a server's finish() has done so
            self.exchange.average_buffers()

    @property
    def megabytes(self) -> float | None:
        return None if self.exchange is None else self.exchange.traffic.total_bytes_sent / 1e6

    def finish(self) -> None:
        """Wait until all that has been sent has been applied."""
        if self.exchange is not None and not self.waits:
            self.exchange.finish()

    def close(self) -> None:
        self.finish()
        if self.exchange is not None:
            self.exchange.detach(discard=True)


class Slowness:
    """Factor by which this site is slowed down, by the time of training.

    Args:
        case: one of `CASES`.
        seed: seed of the draws.
    """

    def __init__(self, case: str, seed: int) -> None:
        self.case, self.seed, self.rank = case, seed, dist.get_rank()

    def factor(self, seconds: float) -> float:
        if self.case == "moves":
            slow = random.Random(f"{self.seed} {int(seconds / WINDOW)}").randrange(2)
        else:
            slow = 1 if self.case == "slow" else -1
        return FACTOR if slow == self.rank else 1.0


def train_lap(
    way: Way, source: Iterable[tuple[Tensor, Tensor]], slowness: Slowness, before: float
) -> tuple[float, int]:
    """Train for a lap; return its seconds and steps.

    Args:
        way: the way.
        source: the batches, which end with the lap where they are dealt.
        slowness: of this site.
        before: seconds of training before the lap.
    """
    start, steps, spent = time.perf_counter(), 0, time.thread_time()
    for inputs, labels in source:
        way.train(inputs, labels)
        factor = slowness.factor(before + time.perf_counter() - start)
        if factor > 1:
            time.sleep((factor - 1) * (time.thread_time() - spent))
        steps += 1
        spent = time.thread_time()
        ended = steps >= LAP_STEPS if way.waits else time.perf_counter() - start >= LAP_SECONDS
        if ended and not way.deals:
            break
    way.finish()  # a site that waits elsewhere applies nothing, and the other one could not go on
    return time.perf_counter() - start, steps


def train(arguments: argparse.Namespace, way: Way, data: DataPair, case: str, seed: int) -> dict[str, Any]:
    """Train until the target, or the limit of seconds."""
    slowness = Slowness(case, seed)
    sources: Any = itertools.repeat(batches(data, arguments.split, seed))
    if way.deals:
        sources = dealt_batches(way.exchange, data, seed, arguments.split if way.private else None)
    seconds, steps, curve = 0.0, 0, []
    for source in sources:
        dist.barrier()
        lap = torch.tensor(train_lap(way, source, slowness, seconds))
        laps = [torch.zeros(2) for _ in range(2)]
        dist.all_gather(laps, lap)
        seconds += float(max(each[0] for each in laps))
        steps += int(sum(each[1] for each in laps))
        way.prepare_evaluation()
        curve.append((seconds, accuracy(way.plain_model, data)))
        reached = len(curve) > 1 and statistics.fmean(value for _, value in curve[-2:]) >= arguments.target
        if reached or seconds > arguments.limit:
            means = [statistics.fmean(value for _, value in curve[end - 2 : end]) for end in range(2, len(curve) + 1)]
            run = {"seconds": seconds if reached else None, "batches": steps, "best": max(means, default=curve[0][1])}
            return run | {"MB": way.megabytes, "curve": curve}
    raise AssertionError("batches do not end")


def time_batches(arguments: argparse.Namespace, way: Way, data: DataPair, case: str, seed: int) -> dict[str, Any]:
    """Make a number of batches at each site; return the seconds a batch of the site that takes longer."""
    source, slowness = batches(data, arguments.split, seed), Slowness(case, seed)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(arguments.batches):
        inputs, labels = next(source)
        spent = time.thread_time()
        way.train(inputs, labels)
        if (factor := slowness.factor(time.perf_counter() - start)) > 1:
            time.sleep((factor - 1) * (time.thread_time() - spent))
    way.finish()
    seconds = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(seconds, torch.tensor([time.perf_counter() - start]))
    failed = 0 if way.trainer is None else way.trainer.failed
    longest = float(max(seconds)) / arguments.batches
    return {"seconds": longest, "batches": 2 * arguments.batches, "failed": failed, "MB": way.megabytes}


def run_once(arguments: argparse.Namespace, data: DataPair, case: str, seed: int) -> dict[str, Any]:
    """Make some steps on an unshaped link, and then measure the way in a case."""
    for warms in (True, False):
        torch.manual_seed(seed)
        model, sized = build_for(data, "MNISTNet")
        if not arguments.loopback:
            dist.barrier()
            reshape("none" if warms else arguments.rate)
        way = Way(model, arguments.method, arguments.optimizer)
        if warms:
            source = batches(sized, arguments.split, seed)
            for _ in range(WARM_UP):
                inputs, labels = next(source)
                way.train(inputs, labels)
        elif arguments.batches:
            run = time_batches(arguments, way, sized, case, seed)
        else:
            run = train(arguments, way, sized, case, seed)
        way.close()
    return run


def run_site(arguments: argparse.Namespace) -> None:
    """Measure one way in all cases; site 0 writes the results."""
    torch.set_num_threads(1)
    use_library(arguments.method, "mkl")
    dadplug.connect()
    data = load_dataset(arguments.dataset, arguments.data_dir)
    runs = missing(arguments, arguments.method)
    dist.barrier()  # both have read the results
    if arguments.method == "rpc":
        rpc_server.join()
    for run in runs:
        if not may_begin(arguments.deadline):
            break
        line = run | run_once(arguments, data, run["case"], run["seed"])
        if dist.get_rank() == 0:
            append(arguments.result, line)
            print({key: value for key, value in line.items() if key != "curve"}, flush=True)
    if arguments.method == "rpc":
        rpc_server.leave()


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what distinguishes the runs of one table from those of others."""
    return {
        "split": arguments.split,
        "optimizer": arguments.optimizer,
        "rate": arguments.rate,
        "round_trip": arguments.round_trip,
        "target": None if arguments.batches else arguments.target,
        "timed": arguments.batches,
    }


def missing(arguments: argparse.Namespace, method: str) -> list[dict[str, Any]]:
    """Return the runs of a way that the results do not have."""
    known = read(Path(arguments.result))
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    runs = [
        {"method": method, "case": case, "seed": seed} | settings_of(arguments)
        for seed in seeds
        for case in arguments.cases.split(",")
    ]
    return [run for run in runs if not any(run.items() <= row.items() for row in known)]


def table(rows: list[dict[str, Any]]) -> str:
    """Write a table in Markdown: a line a way, a column a case; seconds, and their ratio to the first way's."""
    cases = list(dict.fromkeys(row["case"] for row in rows if "case" in row))
    lines = ["| way | " + " | ".join(cases) + " |", "| --- " * (len(cases) + 1) + "|"]
    first: dict[str, float] = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for case in cases:
            runs = [row for row in rows if row["method"] == method and row.get("case") == case]
            if not runs:
                cells.append("-")
            elif any(row["seconds"] is None for row in runs):
                cells.append(f"not reached: {statistics.fmean(row['best'] for row in runs):.3f}")
            else:
                mean = statistics.fmean(row["seconds"] for row in runs)
                unit = f"{1000 * mean:.1f} ms" if "failed" in runs[0] else f"{mean:.1f} s"
                cells.append(f"{unit} ({mean / first.setdefault(case, mean):.2f})")
        lines.append(f"| {title(method)} | " + " | ".join(cells) + " |")
    errors = [f"{row['method']}: {row['error']}" for row in rows if "error" in row]
    return "\n\n".join(["\n".join(lines), *errors])


def measure(arguments: argparse.Namespace, results: Path) -> None:
    """Measure each way in processes of its own; the results file gets a line a run, or an error."""
    for method in arguments.methods.split(","):
        if not missing(arguments, method) or time.time() > arguments.deadline:
            continue
        program = ["parameter_server.py", *sys.argv[1:], "--method", method, "--result", str(results)]
        program += ["--loopback", "--rate", "none"] if arguments.loopback else []
        program += ["--deadline", str(arguments.deadline)]
        if reason := run_sites(program, arguments.loopback, results, 2 * arguments.limit + 120, arguments.round_trip):
            append(results, {"method": method, "error": reason})


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = parser_of(
        __doc__,
        dataset={"default": None, "choices": list(TARGETS), "help": "mnist if there is a --data-dir"},
        data_dir=(None, "folder of MNIST's files"),
        target={"type": float, "help": "held-out accuracy from 0 to 1"},
        methods=(METHODS, "ways; ratios are to the first one"),
        cases=",".join(CASES),
        split=("iid", "iid or by-class"),
        optimizer={"default": "adam", "choices": ("adam", "sgd")},
        rate="100mbit",
        round_trip=(0.0, "milliseconds of the link's round trip"),
        batches=(0, "measure the time of so many batches, and no target"),
        limit=(90.0, "seconds of training after which a run is given up"),
        seeds=3,
        first_seed=0,
        quick=(False, "one seed, two ways, a low target"),
        out=("parameter_server", "name of the files, without .md and .json"),
        method=(None, argparse.SUPPRESS),
        result=(None, argparse.SUPPRESS),
        loopback=(False, argparse.SUPPRESS),
        **PIECES,
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.methods, arguments.target = 1, f"{SYNCHRONOUS},{SERVER}", arguments.target or 0.6
    if arguments.batches and arguments.cases == ",".join(CASES):
        arguments.cases = "equal"
    arguments.dataset = arguments.dataset or ("mnist" if arguments.data_dir else "digits")
    arguments.target = arguments.target or TARGETS[arguments.dataset]
    if arguments.method is None:
        arguments.result = f"{arguments.out}.json"
        if arguments.stop_after is not None:
            arguments.deadline = time.time() + arguments.stop_after
    return parser, arguments


def main() -> int:
    parser, arguments = parse_arguments()
    if arguments.method is not None and "RANK" in os.environ:
        run_site(arguments)
        return 0
    arguments.loopback = not may_make_links()
    if arguments.loopback:
        arguments.rate = "none"
    check_rates(parser, arguments.rate, arguments.loopback)
    load_dataset(arguments.dataset, arguments.data_dir)  # an error now, and not at each site
    results = Path(arguments.result)
    begin(results, arguments.keep)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sites end, too
    measure(arguments, results)
    settings = settings_of(arguments).items()
    rows = [row for row in read(results) if "error" in row or settings <= row.items()]
    Path(f"{arguments.out}.md").write_text(table(rows) + "\n")
    print(table(rows))
    if any("error" in row for row in rows):
        return 1
    open_runs = sum(len(missing(arguments, method)) for method in arguments.methods.split(","))
    if open_runs:
        print(f"{open_runs} runs are missing: the same command with --keep goes on")
    return 2 if open_runs else 0


if __name__ == "__main__":
    sys.exit(main())
