"""Seconds until held-out accuracy is reached by local steps, against peers, by rate of the link and split of the data.

    sudo python benchmarks/local_steps.py --data-dir FOLDER            MNIST's files; half an hour or more
    sudo python benchmarks/local_steps.py --data-dir FOLDER --round-trip 40     with the latency of a long link
    python benchmarks/local_steps.py --data-dir FOLDER --sites 4       steps, accuracy and MB alone, on loopback
    sudo python benchmarks/local_steps.py --data-dir FOLDER --quick    one seed, few ways, a low target
    python benchmarks/local_steps.py --quick                           scikit-learn's digits; without root, unshaped

MNISTNet, Adam, batches of 32 on each of two (or --sites) sites with one thread. The target is reached when the mean of
two evaluations in succession is. All ways are evaluated at the same steps, every 64, after agreements: the
agreed model, or with average=160 in a way's name the running average of its models.

1. On an unshaped link: how many steps a way takes to the target, for each split and seed. Each way computes the same
   bits at every rate, so that these are the steps there, too.
2. At each rate: the time of a step, over the steps of one seed in succession, without evaluations in between, up to
   --limit seconds. The table has the mean number of steps times that.

Each line of results is written to OUT.json as it is measured; --keep measures only what is not there yet. With
--stop-after, too, a long table is measured in pieces: the same command until it exits with 0. OUT.png has the curves of
seed 0 over megabytes, and over seconds at each rate.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from attach import parse
from command import connect_site, parser_of
from drive import PIECES, append, begin, check_rates, colours_of, may_begin, read, run_sites, title
from held_out import accuracy, batches
from link import may_make_links, reshape
from local_ways import Way
from torch import Tensor, nn

from dadplug.data import DataPair, load_dataset
from dadplug.models import build_for

OURS = "localsgd:every=32+outer_lr=0.7+outer_momentum=0.9+rank=32+wire=int8+overlap=false"
SYNCHRONOUS = "rankdad:rank=8+wire=bf16+error_feedback=true+sync_batchnorm=true"
AVERAGED = ",".join(f"{name}+average=160" for name in ("diloco:every=32", "diloco:every=64", OURS, SYNCHRONOUS))
SPARSE = "localsgd:every=32+density=0.02+wire=int2+overlap=false+fused=true"
SPARSELOCO = "localsgd:every=32+density=0.015625+wire=int2+outer_lr=1+overlap=false"
"""The published setting: 64 of 4,096 entries, decay 0.95, outer rate 1."""
FP32 = "localsgd:every=32+outer_lr=0.7+outer_momentum=0.9+overlap=false"
"""DiLoCo whose deltas travel in fp32."""
PEERS = "ddp,ddp-powersgd,mean:every=16,mean:every=64,diloco:every=32,diloco:every=64"
METHODS = f"{SPARSE},{SPARSELOCO},{FP32},{PEERS},{OURS},{AVERAGED}"
TARGETS = {"mnist": 0.955, "digits": 0.95}
LAP = 64
"""Steps between two evaluations, of every way."""
WARM_UP = 3
SHORTEST_PIECE = 4  # steps between two looks at the clock


def take(way: Way, source: Iterator[tuple[Tensor, Tensor]], steps: int) -> None:
    for _ in range(steps):
        inputs, labels = next(source)
        way.optimizer.zero_grad()
        nn.functional.cross_entropy(way.model(inputs), labels).backward()
        way.step()


def find_steps(arguments: argparse.Namespace, model: nn.Module, data: DataPair, split: str, seed: int) -> dict:
    """Train until the target, or the limit of steps."""
    way, source, curve = Way(model, arguments.method, arguments.rank), batches(data, split, seed), []
    while LAP * len(curve) < arguments.steps and not has_reached(curve, arguments.target):
        take(way, source, LAP)
        if LAP * (len(curve) + 1) >= arguments.steps:
            way.finish()
        with way.evaluating():
            curve.append(accuracy(way.evaluated, data))
    way.detach()
    return {
        "steps": LAP * len(curve) if has_reached(curve, arguments.target) else None,
        "best": max(map(statistics.fmean, pairwise(curve)), default=curve[-1]),
        "last": curve[-1],
        "megabytes": way.megabytes_sent(),
        "curve": curve,
    }


def has_reached(curve: list[float], target: float) -> bool:
    """Return whether the mean of the last two evaluations is at the target; one alone does not count."""
    return len(curve) > 1 and statistics.fmean(curve[-2:]) >= target


def time_steps(arguments: argparse.Namespace, model: nn.Module, data: DataPair, run: dict, rate: str) -> dict:
    """Time the steps of a run at a rate, in whole rounds, up to the limit of seconds."""
    source = batches(data, run["split"], run["seed"])
    reshape_to(arguments, "none")
    warm = Way(deepcopy(model), arguments.method, arguments.rank)
    take(warm, source, WARM_UP)
    warm.detach()
    way = Way(model, arguments.method, arguments.rank)
    reshape_to(arguments, rate)
    dist.barrier()
    start, taken, over = time.perf_counter(), 0, torch.zeros(1)
    piece = max(way.every, SHORTEST_PIECE)
    while taken < run["steps"] and not over:
        take(way, source, piece)
        taken += piece
        over.fill_(time.perf_counter() - start > arguments.limit)
        dist.broadcast(over, 0)
    seconds = time.perf_counter() - start
    way.detach()
    return {"rate": rate, "taken": taken, "step": seconds / taken}


def reshape_to(arguments: argparse.Namespace, rate: str) -> None:
    if not arguments.loopback:
        dist.barrier()
        reshape(rate)


def run_site(arguments: argparse.Namespace) -> None:
    """Measure one way; site 0 writes the results."""
    connect_site()
    data = load_dataset(arguments.dataset, arguments.data_dir)
    results = Path(arguments.result)

    def record(line: dict) -> None:
        if dist.get_rank() == 0:
            append(results, line)
            said = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in line.items()}
            print(*(f"{key}={value}" for key, value in said.items() if key != "curve"))
        dist.barrier()  # the other site reads what is there

    for label, known, rate in missing(arguments, arguments.method):
        torch.manual_seed(label["seed"])
        model, sized = build_for(data, "MNISTNet")
        if not may_begin(arguments.deadline):
            break
        if known is None:
            record(label | find_steps(arguments, model, sized, label["split"], label["seed"]))
        else:
            record(label | time_steps(arguments, model, sized, known, rate))


def missing(arguments: argparse.Namespace, method: str) -> Iterator[tuple[dict, dict | None, str]]:
    """Yield the runs of a way that the results do not have, read again for each.

    Yields:
        Method, split and seed; the run that has found the number of steps, or None for that run itself; the rate.
    """
    for split in arguments.splits.split(","):
        for seed in range(arguments.seeds):
            label = {"method": method, "split": split, "seed": seed}
            if not (known := results_of(arguments, label)):
                yield label, None, ""
                known = results_of(arguments, label)
            run = next((row for row in known if "best" in row), None)
            done = {row.get("rate") for row in known}
            if run is not None and run["steps"] and seed == 0:
                yield from ((label, run, rate) for rate in arguments.rates.split(",") if rate and rate not in done)


def results_of(arguments: argparse.Namespace, label: dict) -> list[dict]:
    return [row for row in read(Path(arguments.result)) if label.items() <= row.items()]


def table(rows: list[dict]) -> str:
    """Format the results: a line for each way, means over seeds, and the ratio to the fastest peer."""
    rates = list(dict.fromkeys(row["rate"] for row in rows if "rate" in row))
    parts = []
    for split in dict.fromkeys(row["split"] for row in rows if "split" in row):
        here = [row for row in rows if row.get("split") == split]
        methods = list(dict.fromkeys(row["method"] for row in here))
        head = [split, "steps", "MB", *map(title, rates)]
        lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
        best = {rate: fastest_peer(here, methods, rate) for rate in rates}
        for method in methods:
            own = [row for row in here if row["method"] == method]
            runs = [row for row in own if "best" in row]
            cells = [time_cell(seconds_of(here, method, rate), best[rate]) for rate in rates]
            lines.append("| " + " | ".join([label(method), *step_cells(runs), *cells]) + " |")
        parts.append("\n".join(lines))
    parts += [f"{label(row['method'])}: {row['error']}" for row in rows if "error" in row]
    return "\n\n".join(parts)


def is_peer(method: str) -> bool:
    return method.split(":")[0] in ("ddp", "ddp-powersgd", "ddp-fp16", "mean", "diloco")


def label(method: str) -> str:
    return title(method) + (" (peer)" if is_peer(method) else "")


def step_cells(runs: list[dict]) -> list[str]:
    """Format the steps, with the number of seeds that got there, and the megabytes that a site has sent."""
    reached = [row for row in runs if row["steps"]]
    if not reached:
        return [f"not reached: {statistics.fmean(row['best'] for row in runs):.3f}", "-"]
    part = "" if len(reached) == len(runs) else f" ({len(reached)} of {len(runs)})"
    sent = [row["megabytes"] for row in reached if row["megabytes"] is not None]
    return [
        f"{statistics.fmean(row['steps'] for row in reached):.0f}{part}",
        f"{statistics.fmean(sent):.0f}" if sent else "-",
    ]


def seconds_of(rows: list[dict], method: str, rate: str) -> float:
    """Return the mean seconds over seeds; Inf where one has not reached the target."""
    runs = [row for row in rows if row["method"] == method and "best" in row]
    timed = [row["step"] for row in rows if row["method"] == method and row.get("rate") == rate]
    if not timed or any(row["steps"] is None for row in runs):
        return float("inf")
    return statistics.fmean(row["steps"] for row in runs) * timed[0]


def fastest_peer(rows: list[dict], methods: list[str], rate: str) -> float:
    return min((seconds_of(rows, method, rate) for method in methods if is_peer(method)), default=float("inf"))


def time_cell(seconds: float, best: float) -> str:
    if seconds == float("inf"):
        return "-"
    return f"{seconds:.1f} s" + (f" ({seconds / best:.2f})" if best < float("inf") else "")


def draw(rows: list[dict], file: str) -> None:
    """Draw accuracy of seed 0 over megabytes, and over seconds at each rate; a row of panels for each split."""
    from matplotlib.figure import Figure

    runs = [row for row in rows if row.get("curve") and row["seed"] == 0]
    splits = list(dict.fromkeys(row["split"] for row in runs))
    rates = list(dict.fromkeys(row["rate"] for row in rows if row.get("rate", "none") != "none"))
    if not runs:
        return
    figure = Figure(figsize=(max(7, 4 + 4 * len(rates)), 0.8 + 3.2 * len(splits)), layout="constrained")
    panels = figure.subplots(len(splits), 1 + len(rates), squeeze=False, sharey="row")
    colours = colours_of(list(dict.fromkeys(row["method"] for row in runs)))
    for line, split in zip(panels, splits, strict=True):
        for run in (row for row in runs if row["split"] == split):
            steps = [LAP * (place + 1) for place in range(len(run["curve"]))]
            step = {"MB": (run["megabytes"] or 0) / steps[-1]}
            timed = [row for row in rows if row["method"] == run["method"] and row.get("split") == split]
            step |= {row["rate"]: row["step"] for row in timed if "rate" in row}
            for panel, unit in zip(line, ("MB", *rates), strict=True):
                if step.get(unit):
                    shown = {"color": colours[run["method"]], "label": label(run["method"])}
                    panel.plot([each * step[unit] for each in steps], run["curve"], marker=".", **shown)
        line[0].set_ylabel(f"held-out accuracy, {title(split)}")
    for panel, unit in zip(panels[-1], ("MB", *rates), strict=True):
        panel.set_xlabel("MB a site" if unit == "MB" else f"seconds, {title(unit)}")
    for panel in panels.flat:
        panel.set_xscale("log")
        panel.grid(alpha=0.3)
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), loc="outside lower center", frameon=False, fontsize="small"
    )
    figure.savefig(file, dpi=110)


def measure(arguments: argparse.Namespace, results: Path) -> None:
    """Measure each way in processes of its own; the results file gets a line a run, or an error."""
    for method in arguments.methods.split(","):
        if next(missing(arguments, method), None) is None or time.time() > arguments.deadline:
            continue
        program = ["local_steps.py", *sys.argv[1:], "--method", method, "--result", str(results)]
        program += ["--loopback", "--rates", "none"] if arguments.loopback else []
        program += ["--deadline", str(arguments.deadline)]
        how = {"round_trip": arguments.round_trip, "sites": arguments.sites}
        if reason := run_sites(program, arguments.loopback, results, arguments.patience, **how):
            print(f"{method} failed: {reason}", flush=True)
            append(results, {"method": method, "error": reason})


def main() -> int:
    parser = parser_of(
        __doc__,
        dataset={"default": None, "choices": list(TARGETS), "help": "mnist if there is a --data-dir"},
        data_dir=(None, "folder of MNIST's files"),
        target={"type": float, "help": "held-out accuracy from 0 to 1"},
        methods=(METHODS, "as benchmarks/local_ways.py names them"),
        splits=("iid", "iid, by-class"),
        rates=("100mbit,10mbit", "may be empty: steps alone"),
        round_trip=(0.0, "milliseconds of the link's round trip"),
        sites=(2, "more than two meet on loopback, unshaped"),
        rank=(8, "of the methods of gradients"),
        steps=(1500, "steps after which a run is given up"),
        limit=(30.0, "seconds in which steps are timed at a rate"),
        patience=(900.0, "seconds without a result that end a way"),
        seeds=3,
        quick=(False, "one seed, two ways, a low target"),
        out=("local_steps", "name of the files, without .md and .json"),
        method=(None, argparse.SUPPRESS),
        result=(None, argparse.SUPPRESS),
        loopback=(False, argparse.SUPPRESS),
        **PIECES,
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.methods, arguments.target = 1, f"diloco:every=32,{OURS}", arguments.target or 0.8
    arguments.dataset = arguments.dataset or ("mnist" if arguments.data_dir else "digits")
    arguments.target = arguments.target or TARGETS[arguments.dataset]
    if arguments.method is not None and "RANK" in os.environ:
        run_site(arguments)
        return 0
    arguments.loopback = arguments.sites != 2 or not may_make_links()
    if arguments.loopback:
        arguments.rates = "none"
    check_rates(parser, arguments.rates or "none", arguments.loopback)
    for name in arguments.methods.split(","):
        if LAP % parse(name)[1].get("every", 1):
            parser.error(f"{name}: agreements have to take place at every {LAP} steps, when all ways are evaluated")
    load_dataset(arguments.dataset, arguments.data_dir)  # an error now, and not at each site
    results = Path(f"{arguments.out}.json")
    arguments.result = str(results)
    if arguments.stop_after is not None:
        arguments.deadline = time.time() + arguments.stop_after
    begin(results, arguments.keep)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sites end, too
    measure(arguments, results)
    rows = read(results)
    Path(f"{arguments.out}.md").write_text(table(rows) + "\n")
    draw(rows, f"{arguments.out}.png")
    print(table(rows))
    if any("error" in row for row in rows):
        return 1
    open_ways = [name for name in arguments.methods.split(",") if next(missing(arguments, name), None) is not None]
    if open_ways:
        print(f"{', '.join(open_ways)}: not complete, the same command with --keep goes on")
    return 2 if open_ways else 0


if __name__ == "__main__":
    sys.exit(main())
