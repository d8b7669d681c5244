"""Time to the held-out loss that DDP has after some steps, at two sites, by method and rate of the link.

    sudo python benchmarks/time_to_loss.py                                   the small transformer, about ten minutes
    sudo python benchmarks/time_to_loss.py --model bert --pretraining 120 --seeds 1 --steps 48 --every 8 --most 1.6 \
        --limit 3600 --methods ddp,ddp-powersgd,rankdad:rank=auto+dense=lowrank
    python benchmarks/time_to_loss.py --rates none                           without root, on loopback
    python benchmarks/time_to_loss.py --draw-only                            table and picture of an earlier run

A step that takes a tenth of DDP's time is not ten times faster if twice as many are needed. So each method trains, from
the same weights on the same batches, until its held-out loss is what DDP's is after --steps steps (means over seeds,
straight lines between evaluations every --every steps), for --most times as many steps at most. Times are that number
of steps times the median time of a step at the rate: no evaluation is counted. The median is over intervals of 16
steps, where these are short. All methods multiply by MKL, unless a name asks for oneDNN (benchmarks/libraries.py).

Models: `bytes`, the small transformer of benchmarks/fine_tuning.py, and `bert`, a transformer of BERT-base's size; both
are trained on the bytes of the documentation (--pretraining) and fine-tuned on those of the sources. Where a step would
take longer than --longest seconds at a rate, its time is predicted as the time unshaped plus bytes over rate, and
marked by ~. Writes OUT.json, a line a curve, OUT.pt, OUT.md and OUT.png.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path

import step_time
import torch
import torch.distributed as dist
from attach import parse
from command import connect_site, parser_of
from drive import append, check_rates, colours_of, processor, processors, read, run_sites, title
from fine_tuning import BATCH, LENGTH, WINDOWS, start_weights, text, tied_model, windows
from large_models import bits_per_second
from link import may_make_links, reshape
from local_ways import Way
from step_time import meet
from torch import Tensor, nn
from workloads import Transformer, loss

METHODS = (
    "ddp,ddp-fp16,ddp-powersgd,diloco:every=16,rankdad:rank=auto,rankdad:rank=8+wire=int8,rankdad:rank=4+wire=int8,"
    "rankdad:rank=8+wire=int8+dense=allreduce,alone"
)
TRAINING, FINE_TUNING, FROM_SCRATCH = 2e-3, 5e-4, 1e-4  # learning rates of Adam
WARM_UP = 3
INTERVAL, FAST = 16, 0.3  # steps that are timed together where one is expected to take fewer seconds


def bert() -> nn.Module:
    """Make a transformer of BERT-base's size that predicts the next byte, with random weights."""
    options = {"is_decoder": True, "vocab_size": 256, "use_cache": False, "max_position_embeddings": LENGTH}
    return Transformer("BertLMHeadModel", "BertConfig", "input_ids", **options)


def train(way: Way, data: Tensor, held_out: Tensor, seed: int, steps: int, every: int) -> list[float]:
    """Train a model; return the held-out loss every few steps."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    check = windows(held_out, WINDOWS, torch.Generator().manual_seed(0))
    curve = []
    for step in range(steps + 1):
        if step % every == 0:
            way.evaluated.eval()  # without dropout
            with torch.no_grad():
                curve.append(float(loss(way.evaluated(check[0]), check[1])))
            way.evaluated.train()
        if step < steps:
            take_step(way, *windows(data, BATCH, generator))
    return curve


def take_step(way: Way, inputs: Tensor, targets: Tensor) -> None:
    way.optimizer.zero_grad()
    loss(way.model(inputs), targets).backward()
    way.step()


def time_steps(way: Way, data: Tensor, arguments: argparse.Namespace) -> dict[str, dict]:
    """Return by rate the median seconds of a step, the bytes that a site sends in it, and whether it is predicted."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = windows(data, BATCH, generator)
    for _ in range(max(WARM_UP, way.every)):
        take_step(way, *batch)
    found: dict[str, dict] = {}
    for rate in sorted({"none", *arguments.rates.split(",")}, key=bits_per_second, reverse=True):
        unshaped = found.get("none", {"seconds": 0.0, "bytes": 0})
        expected = unshaped["seconds"] + 8 * unshaped["bytes"] / bits_per_second(rate)
        if not meet(way.every * expected < arguments.longest):
            found[rate] = {"seconds": expected, "bytes": unshaped["bytes"], "predicted": True}
            continue
        if not arguments.loopback:
            reshape(rate)
        # Sites that wait for one another in turn over a long link have long and short steps.
        found[rate] = time_step(way, batch, max(way.every, INTERVAL if expected < FAST else 1), arguments)
    if not arguments.loopback:
        reshape("none")
    return found


def time_step(way: Way, batch: tuple[Tensor, Tensor], interval: int, arguments: argparse.Namespace) -> dict:
    """Return the median seconds of a step on the present link, over intervals, and the bytes that a site sends."""
    measured = step_time.time_steps(partial(take_step, way, *batch), 15, arguments.seconds, 3, interval)
    return {"seconds": measured.seconds, "bytes": measured.nbytes, "predicted": False}


def run_site(arguments: argparse.Namespace) -> None:
    """Train and time by each method; site 0 writes a line for each seed."""
    connect_site()
    torch.manual_seed(0)
    small = arguments.model == "bytes"
    start = start_weights(arguments, *((tied_model(), TRAINING) if small else (bert(), FROM_SCRATCH)))
    data, held_out = (text("*.py", ("dadplug", "hooks", "runners"), part) for part in ("site", "held out"))
    rate = FINE_TUNING if small else FROM_SCRATCH
    for seed in range(arguments.seeds):
        model = deepcopy(start)
        way = Way(model, arguments.methods, 8, torch.optim.Adam(model.parameters(), rate))
        name = parse(arguments.methods)[0]
        steps = int(arguments.steps * (1.0 if name in ("ddp", "alone") else arguments.most))
        curve = [] if name == "alone" else train(way, data, held_out, seed, steps, arguments.every)
        curves, settled = {}, {}
        if "rank=auto" in arguments.methods and not arguments.loopback:
            for link in arguments.rates.split(","):
                reshape(link)
                copy = deepcopy(start)
                chooses = Way(copy, arguments.methods, 8, torch.optim.Adam(copy.parameters(), rate))
                curves[link] = train(chooses, data, held_out, seed, steps, arguments.every)
                batch = windows(data, BATCH, torch.Generator().manual_seed(dist.get_rank()))
                settled[link] = time_step(chooses, batch, INTERVAL, arguments)
                chooses.detach()
            reshape("none")
        row = {"model": arguments.model, "method": arguments.methods, "seed": seed, "every": arguments.every}
        row |= {"steps": arguments.steps, "curve": curve, "curves": curves, "processor": processor()}
        row["times"] = time_steps(way, data, arguments) | settled if seed == 0 else {}
        way.detach()
        if dist.get_rank() == 0:
            append(arguments.result, row)
            print(arguments.methods, seed, *(f"{each:.3f}" for each in curve[-1:]), flush=True)
        if name == "alone":
            break


def mean_curve(rows: list[dict], method: str, rate: str = "") -> list[float]:
    curves = [
        row.get("curves", {}).get(rate, row["curve"]) for row in rows if row["method"] == method and row.get("curve")
    ]
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]


def steps_to(curve: list[float], every: int, target: float) -> float | None:
    """Return after how many steps a curve first reaches a loss, along straight lines; None if it does not."""
    for place, (before, after) in enumerate(itertools.pairwise(curve)):
        if after <= target:
            share = 0.0 if before <= target else (before - target) / (before - after)
            return every * (place + share)
    return None


def summary(rows: list[dict]) -> dict[str, dict]:
    """Return by method its steps to DDP's last loss, by rate, and its times of a step."""
    target, found = mean_curve(rows, "ddp")[-1], {}
    for method in dict.fromkeys(row["method"] for row in rows if "times" in row):
        times = next(row["times"] for row in rows if row["method"] == method and row["times"])
        steps = dict.fromkeys(times, rows[0]["steps"])
        if method not in ("ddp", "alone"):
            steps = {rate: steps_to(mean_curve(rows, method, rate), rows[0]["every"], target) for rate in times}
        found[method] = {"steps": steps, "times": times}
    return found


def _whole(steps: float | None) -> str:
    return "not reached" if steps is None else f"{steps:.0f}"


def _kilobytes(times: dict[str, dict]) -> Iterator[str]:
    return (f"{one['bytes'] / 1e3:,.0f}" for one in times.values())


def table(rows: list[dict], rates: list[str]) -> str:
    """Write a table: steps to DDP's loss, bytes, and by rate the seconds to it, with times faster than DDP."""
    found = summary(rows)
    head = (
        f"| to {mean_curve(rows, 'ddp')[-1]:.3f} nats a byte | steps | kB a step | "
        + " | ".join(map(title, rates))
        + " |"
    )
    lines = [head, "| --- " * (3 + len(rates)) + "|"]
    for method, one in found.items():
        cells = []
        for rate in rates:
            time_, ddp, steps = one["times"].get(rate), found["ddp"], one["steps"].get(rate)
            if steps is None or time_ is None:
                cells.append("")
                continue
            seconds = steps * time_["seconds"]
            ratio = ddp["steps"][rate] * ddp["times"][rate]["seconds"] / seconds
            mark = "~ " if time_["predicted"] or ddp["times"][rate]["predicted"] else ""
            cells.append(f"{mark}{seconds:,.1f} s ({ratio:.3g})")
        steps, sent_ = (
            ", ".join(dict.fromkeys(each)) for each in (map(_whole, one["steps"].values()), _kilobytes(one["times"]))
        )
        lines.append(f"| {title(method)} | {steps} | {sent_} | " + " | ".join(cells) + " |")
    failed = [f"{row['method']} failed: {row['error']}" for row in rows if "error" in row]
    return "\n\n".join(["\n".join(lines), *failed, *processors(rows)])


def draw(rows: list[dict], rate: str, file: Path) -> None:
    """Draw the mean held-out loss of each method against seconds of training at a rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    panel, found = figure.subplots(), summary(rows)
    found = {method: one for method, one in found.items() if mean_curve(rows, method)}
    colours = colours_of(list(found))
    for method, one in found.items():
        curve = mean_curve(rows, method)
        seconds = [one["times"][rate]["seconds"] * rows[0]["every"] * place for place in range(1, len(curve))]
        panel.plot(seconds, curve[1:], color=colours[method], label=title(method))
    panel.axhline(mean_curve(rows, "ddp")[-1], color="black", linewidth=1, linestyle=":")
    panel.set(xlabel=f"seconds of training, {title(rate)}", ylabel="held-out loss, nats a byte", xscale="log")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    figure.savefig(file, dpi=110)


def main() -> int:
    parser = parser_of(
        __doc__,
        model={"choices": ("bytes", "bert"), "default": "bytes"},
        methods=(METHODS, "as benchmarks/local_ways.py names them; ddp is the measure"),
        rates="10mbit,100mbit,1gbit",
        round_trip=(0.0, "milliseconds of the link's round trip"),
        seeds=3,
        steps=(192, "steps of DDP whose loss is the target"),
        most=(2.5, "times as many steps for the others, at most"),
        every=(16, "steps between two evaluations"),
        pretraining=(600, "steps on the first text"),
        seconds=(3.0, "time after which steps at a rate are enough"),
        longest=(15.0, "seconds of a step from which it is predicted"),
        limit=(900.0, "seconds without a result until a method hangs"),
        out=("time_to_loss", "name of the files, without .json, .md and .png"),
        keep=(False, "keep the curves and the weights of earlier runs"),
        draw_only=(False, "measure nothing, show what is in OUT.json"),
        loopback=(False, argparse.SUPPRESS),
        result=(None, argparse.SUPPRESS),
    )
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        arguments.rank = 8
        run_site(arguments)
        return 0
    results, loopback = Path(f"{arguments.out}.json"), not may_make_links()
    if not arguments.draw_only:
        check_rates(parser, arguments.rates, loopback)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sites end, too
        if not arguments.keep:
            results.unlink(missing_ok=True)
        measure(arguments, results, loopback)
    rows = read(results)
    if not any(row["method"] == "ddp" and row.get("curve") for row in rows):
        parser.error(f"there is no curve of ddp in {results}")
    rates = arguments.rates.split(",")
    Path(f"{arguments.out}.md").write_text(table(rows, rates) + "\n")
    print(table(rows, rates))
    draw(rows, "100mbit" if "100mbit" in rates else rates[0], Path(f"{arguments.out}.png"))
    return 0


def measure(arguments: argparse.Namespace, results: Path, loopback: bool) -> None:
    """Run each method at two sites, in processes of its own."""
    for number, method in enumerate(arguments.methods.split(",")):
        program = ["time_to_loss.py", "--result", str(results), "--out", arguments.out, "--methods", method]
        for name in ("model", "rates", "seeds", "steps", "most", "every", "pretraining", "seconds", "longest"):
            program += [f"--{name}", str(getattr(arguments, name))]
        program += ["--keep"] if arguments.keep or number else []  # the weights that the first one has trained
        program += ["--loopback"] if loopback else []
        if reason := run_sites(program, loopback, results, arguments.limit, arguments.round_trip):
            print(f"{method} failed: {reason}", flush=True)
            append(results, {"model": arguments.model, "method": method, "error": reason})


if __name__ == "__main__":
    sys.exit(main())
