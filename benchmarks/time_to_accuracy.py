"""Seconds of training until a test accuracy is first reached, by method and rate of the link: a table and a picture.

    sudo python benchmarks/time_to_accuracy.py --dataset mnist --data-dir DIR         MNIST's files: MNISTNet to 0.93
    sudo python benchmarks/time_to_accuracy.py --dataset dogsvscats --data-dir DIR/train.zip         a small ViT to 0.62
    python benchmarks/time_to_accuracy.py --rates none                    the embedded digits; without root, on loopback

Two sites, the same seeds and batches for every method; Adam. The clock runs through training steps alone: evaluation,
start-up and the compilation of kernels do not count. Site 0 evaluates. A run that has not got there within --limit
seconds is given up; where the same method got there at another rate, the table then has an estimate, marked by ~:
the steps that it took there, times the median step here.

Writes OUT.md, OUT.png, and OUT.json, a line a run. Rates need Linux, root and iproute2.
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
from pathlib import Path

import torch
import torch.distributed as dist
from attach import Attached
from command import connect_site, parser_of
from drive import append, check_rates, colours_of, read, run_sites, title
from held_out import accuracy
from link import may_make_links, reshape
from torch import nn
from torch.utils.data import DataLoader

from dadplug.data import DataPair, load_dataset, site_indices
from dadplug.experiment import OPTIMIZERS
from dadplug.models import build_for

METHODS = "ddp,ddp-fp16,ddp-powersgd,dad,rankdad,rankdad:wire=bf16,powersgd"
TASKS = {  # by data set: model, its settings, batch of a site, learning rate, target
    "mnist": ("MNISTNet", {}, 32, 1e-3, 0.93),
    "digits": ("MNISTNet", {}, 32, 1e-3, 0.95),
    "dogsvscats": ("ViT", {"image_size": 64, "patch_size": 8, "dim": 128, "depth": 6}, 32, 5e-4, 0.62),
}
WARM_UP = 5


def batches(data: DataPair, rank: int, size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This site's batches, epoch after epoch; as many at all sites."""
    share = site_indices(data.train.labels, rank, 2, "iid", seed)[: len(data.train) // 2]
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from DataLoader(data.train.subset(share), size, shuffle=True, drop_last=True, generator=generator)


def train(arguments: argparse.Namespace, model: nn.Module, data: DataPair, seed: int) -> dict:
    """Train until the target or the limit; return the run as a line of results has it."""
    rank = dist.get_rank()
    _, _, size, lr, target = TASKS[arguments.dataset]
    target = arguments.target or target
    attached = Attached(model, arguments.method, arguments.rank)
    optimizer = OPTIMIZERS["adam"](model.parameters(), lr=arguments.lr or lr)
    criterion = nn.CrossEntropyLoss()
    curve, times = [], []
    for inputs, labels in batches(data, rank, arguments.batch_size or size, seed):
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        criterion(attached.model(inputs), labels).backward()
        attached.synchronize()
        optimizer.step()
        times.append(time.perf_counter() - start)
        spent = torch.tensor([sum(times)])
        dist.broadcast(spent, 0)
        over = float(spent) > arguments.limit or len(times) >= arguments.steps
        if len(times) % arguments.every == 0 or over:
            curve.append((float(spent), accuracy(model, data)))
            if over or curve[-1][1] >= target:
                break
    attached.detach()
    return {"target": target, "curve": curve, "steps": len(times), "step": statistics.median(times)}


def run_site(arguments: argparse.Namespace) -> None:
    connect_site()
    data = load_dataset(arguments.dataset, arguments.data_dir)
    name, settings, *_ = TASKS[arguments.dataset]
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        fresh, sized = build_for(data, name, **settings)
        for rate in arguments.rates.split(","):
            if not arguments.loopback:
                reshape("none")
            warm = argparse.Namespace(**vars(arguments) | {"steps": WARM_UP, "every": WARM_UP})
            train(warm, deepcopy(fresh), sized, seed)
            model = deepcopy(fresh)
            if not arguments.loopback:
                reshape(rate)
            run = train(arguments, model, sized, seed)
            if dist.get_rank() == 0:
                label = {"dataset": arguments.dataset, "method": arguments.method, "rate": rate, "seed": seed}
                append(arguments.result, label | run)
                best = max(value for _, value in run["curve"])
                print(
                    f"{arguments.method} at {rate}, seed {seed}: {best:.4f} in {run['curve'][-1][0]:.1f} s", flush=True
                )


def seconds_to_target(run: dict) -> float | None:
    """Seconds until the run got there; None if it did not."""
    return next((seconds for seconds, value in run["curve"] if value >= run["target"]), None)


def table(rows: list[dict], rates: list[str]) -> str:
    """Write a table in Markdown: a line a method; seconds and times faster than DDP by rate, medians over seeds."""
    head = ["method", "steps", *map(title, rates)]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    cells: dict[tuple[str, str], tuple[float, str]] = {}
    reasons: list[str] = []
    for method in dict.fromkeys(row["method"] for row in rows):
        runs = [row for row in rows if row["method"] == method]
        errors = [row["error"] for row in runs if "error" in row]
        runs = [row for row in runs if "curve" in row]
        took = [row["steps"] for row in runs if seconds_to_target(row) is not None]
        shown = []
        for rate in rates:
            here = [row for row in runs if row["rate"] == rate]
            cells[method, rate] = _cell(here, took)
            seconds, text = cells[method, rate]
            ddp = cells.get(("ddp", rate), (float("nan"), ""))[0]
            shown.append(f"{text} ({ddp / seconds:.3g} x)" if ddp == ddp and seconds == seconds else text)
        steps = "failed" if errors else f"{statistics.median(took):.0f}" if took else "-"
        lines.append(f"| {title(method)} | {steps} | " + " | ".join(shown) + " |")
        reasons += [f"{title(method)}: {error}" for error in errors]
    return "\n\n".join(["\n".join(lines), *reasons])


def _cell(runs: list[dict], took: list[int]) -> tuple[float, str]:
    """Seconds, and how the table says them, for a method's runs at a rate; NaN where there is nothing to compare."""
    if not runs:
        return float("nan"), "-"
    reached = [seconds for run in runs if (seconds := seconds_to_target(run)) is not None]
    if len(reached) == len(runs):
        seconds = statistics.median(reached)
        return seconds, f"{seconds:.3g} s"
    if took:
        seconds = statistics.median(took) * statistics.median(run["step"] for run in runs)
        return seconds, f"~ {seconds:,.0f} s"
    best = max(value for run in runs for _, value in run["curve"])
    return float("nan"), f"not reached: {best:.3f} in {max(run['curve'][-1][0] for run in runs):.0f} s"


def draw(rows: list[dict], rates: list[str], file: Path) -> None:
    """Draw test accuracy against seconds of training, a panel a rate; of the first seed."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(4.2 * len(rates) + 1, 4.6), layout="constrained")
    panels = figure.subplots(1, len(rates), sharex=True, sharey=True, squeeze=False)[0]
    curves = [row for row in rows if "curve" in row and row["seed"] == 0]
    colours = colours_of(list(dict.fromkeys(row["method"] for row in curves)))
    for panel, rate in zip(panels, rates, strict=True):
        for row in (row for row in curves if row["rate"] == rate):
            seconds, values = zip(*row["curve"], strict=True)
            panel.plot(seconds, values, marker=".", label=title(row["method"]), color=colours[row["method"]])
        panel.axhline(curves[0]["target"], color="black", linewidth=1, linestyle=":")
        panel.set(title=title(rate), xscale="log", xlabel="seconds of training")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
    panels[0].set(ylabel=f"test accuracy on {curves[0]['dataset']}")
    known = {text: handle for panel in panels for handle, text in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(known.values(), known, loc="outside lower center", frameon=False, ncols=4 if len(panels) > 1 else 2)
    figure.savefig(file, dpi=110)


def measure(arguments: argparse.Namespace, results: Path) -> None:
    """Run each method in processes of its own; the results file gets a line a run, or an error."""
    for method in arguments.methods.split(","):
        program = ["time_to_accuracy.py", *sys.argv[1:], "--method", method, "--result", str(results)]
        program += ["--loopback"] if arguments.loopback else []
        reason = run_sites(program, arguments.loopback, results, 3 * arguments.limit + 120)
        if reason:
            print(f"{method} failed: {reason}", flush=True)
            append(results, {"method": method, "error": reason})


def main() -> int:
    parser = parser_of(
        __doc__,
        dataset={"default": "digits", "choices": list(TASKS)},
        data_dir=(None, "folder or file of the data set"),
        target={"type": float, "help": "test accuracy from 0 to 1; by default each data set's own"},
        methods=(METHODS, "as benchmarks/attach.py names them; ddp first"),
        rates="100mbit,1gbit,none",
        rank=8,
        lr={"type": float},
        batch_size={"type": int, "help": "samples of a site"},
        every=(20, "steps between evaluations"),
        limit=(120.0, "seconds of training after which a run is given up"),
        steps=(5000, "steps after which a run is given up"),
        seeds=1,
        out=("time_to_accuracy", "name of the files, without .md, .png and .json"),
        draw_only=(False, "measure nothing, show what is in OUT.json"),
        method=(None, argparse.SUPPRESS),
        result=(None, argparse.SUPPRESS),
        loopback=(False, argparse.SUPPRESS),
    )
    arguments = parser.parse_args()
    if arguments.method is not None and "RANK" in os.environ:
        run_site(arguments)
        return 0
    arguments.loopback = not may_make_links()
    results = Path(f"{arguments.out}.json")
    results.parent.mkdir(parents=True, exist_ok=True)
    if not arguments.draw_only:
        check_rates(parser, arguments.rates, arguments.loopback)
        load_dataset(arguments.dataset, arguments.data_dir)  # an error now, and not at each site
        results.unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sites end, too
        measure(arguments, results)
    rows = read(results)
    if not any("curve" in row for row in rows):
        parser.error(f"there is no run in {results}")
    rates = list(dict.fromkeys(row["rate"] for row in rows if "rate" in row))
    Path(f"{arguments.out}.md").write_text(table(rows, rates) + "\n")
    print(table(rows, rates))
    draw(rows, rates, Path(f"{arguments.out}.png"))
    print(f"\n{arguments.out}.md, .png and .json")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
