"""Time, bytes and memory of a training step of large models at two sites, by method and rate of the link.

    sudo python benchmarks/large_models.py                                         everything, about an hour
    sudo python benchmarks/large_models.py --models bert --methods alone,rankdad:rank=8+wire=bf16 --rates 100mbit
    python benchmarks/large_models.py --rates none                                 without root, on loopback
    python benchmarks/large_models.py --table                                      tables of what has been measured

BERT-base (8 texts of 64 tokens a site), ViT-Base (4 images of 224 x 224) and GPT-2 small (4 texts of 128 tokens) of
transformers with random weights, plain SGD, one thread a site. All methods multiply by MKL, unless a name asks for
oneDNN (benchmarks/libraries.py). Each method runs in processes of its own, so that their peak memory is the method's.
Steps are first timed on an unshaped link (rate none), then at each rate. "one process alone" is the same without any
exchange, while the other site computes at the same time. Local steps and DiLoCo are timed over a whole interval between
two agreements.

A cell whose step, or interval, would take longer than --longest seconds is not measured but predicted, as the time
unshaped plus bytes over rate, and marked by ~; the tables are followed by how that prediction agrees with cells that
were measured and in which the exchange takes most of the time. Each cell is appended to OUT.json as it is measured, so
that a table can be put together from several runs; of cells that were measured several times it has the median. The
mode auto chooses by the link in its first step, which therefore takes as long as its cell. No method is begun after
--budget seconds.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from attach import parse
from command import connect_site, parser_of
from drive import append, check_rates, processor, processors, read, run_sites, title
from link import may_make_links, reshape
from local_ways import Way
from step_time import meet, time_steps
from two_site_link import draw
from workloads import LARGE, loss

OURS = "rankdad:rank=auto+dense=lowrank"  # which compresses GPT-2's table, too, that is tied to its output layer
RANK_8 = "rankdad:rank=8+dense=lowrank"
RANKDAD = f"{OURS},{RANK_8},{RANK_8}+wire=int8"
LOCAL = "diloco:every=16,localsgd:every=16+rank=32+wire=bf16"
OTHER = f"alone:library=onednn,ddp:library=onednn,{OURS}+library=onednn"
METHODS = f"alone,{RANKDAD},auto,dad,ddp-powersgd,ddp-fp16,ddp-bf16,ddp,{LOCAL},{OTHER}"
WARM_UP = 3  # steps; DDP makes its buckets anew, PowerSGD's hook begins, payloads find their sizes


def bits_per_second(rate: str) -> float:
    """Return what a rate as tc writes it stands for; infinity for none."""
    if rate == "none":
        return float("inf")
    number, unit = re.fullmatch(r"([\d.]+)([kmg])bit", rate).groups()
    return float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit]


def predict(unshaped: dict, rate: str) -> float:
    """Return the seconds of a step at a rate if nothing overlaps with the exchange."""
    return unshaped["seconds"] + 8 * unshaped["bytes"] / bits_per_second(rate)


def run_site(arguments: argparse.Namespace) -> None:
    """Time the steps of one model by one method at each rate; site 0 writes the results."""
    connect_site()
    torch.manual_seed(0)
    workload = LARGE[arguments.models]
    model = workload.build()
    inputs, targets = workload.draw(workload.batch_size, torch.Generator().manual_seed(dist.get_rank()))
    rates = arguments.rates.split(",")
    if not arguments.loopback:
        reshape(rates[-1] if parse(arguments.methods)[0] == "auto" else "none")  # auto chooses in its first step
    way = Way(model, arguments.methods, 8, torch.optim.SGD(model.parameters(), lr=1e-3))

    def step() -> None:
        way.optimizer.zero_grad()
        loss(way.model(inputs), targets).backward()
        way.step()

    for _ in range(arguments.warm_up):
        step()
        meet()
        if not arguments.loopback:
            reshape("none")
    interval = parse(arguments.methods)[1].get("every", 1)
    unshaped: dict = {}
    for rate in rates:
        longest = interval * predict(unshaped, rate) if unshaped else 0.0
        if not meet(longest <= arguments.longest):
            continue
        if not arguments.loopback:
            reshape(rate)
        row = {"model": arguments.models, "method": arguments.methods, "rate": rate, "processor": processor()}
        measured = time_steps(step, arguments.steps, arguments.seconds, 1, interval)
        row |= {"seconds": measured.seconds, "bytes": measured.nbytes, "steps": measured.steps, "peak": measured.peak}
        if rate == "none":
            unshaped = row
        if dist.get_rank() == 0:
            append(arguments.result, row)
            print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if not arguments.loopback:
        reshape("none")
    way.detach()


def measure(arguments: argparse.Namespace, results: Path) -> None:
    """Measure each model by each method in processes of its own, until the budget is spent."""
    start = time.monotonic()
    rates = ",".join(sorted(arguments.rates.split(","), key=bits_per_second, reverse=True))
    for model in arguments.models.split(","):
        for method in arguments.methods.split(","):
            if time.monotonic() - start > arguments.budget:
                print(f"not begun: {model}, {method}", flush=True)
                continue
            together = "none" if parse(method)[0] == "alone" else rates
            for some in rates.split(",") if parse(method)[0] == "auto" else [together]:
                program = ["large_models.py", "--models", model, "--methods", method, "--rates", some]
                program += ["--steps", str(arguments.steps), "--seconds", str(arguments.seconds)]
                program += ["--longest", str(arguments.longest), "--warm-up", str(arguments.warm_up)]
                program += ["--result", str(results)]
                program += ["--loopback"] if arguments.loopback else []
                if reason := run_sites(program, arguments.loopback, results, arguments.limit):
                    print(f"{model}, {method} failed: {reason}", flush=True)
                    append(results, {"model": model, "method": method, "rate": some, "error": reason})


def cells(rows: list[dict]) -> dict[tuple[str, str, str], dict]:
    """Return the cells by model, method and rate: medians of what was measured, and predictions in between."""
    found: dict[tuple[str, str, str], dict] = {}
    rates = sorted({row["rate"] for row in rows if "seconds" in row}, key=bits_per_second)
    for model, method in dict.fromkeys((row["model"], row["method"]) for row in rows if "seconds" in row):
        own = [row for row in rows if (row["model"], row["method"]) == (model, method) and "seconds" in row]
        for rate in rates:
            here = [row for row in own if row["rate"] == rate]
            if here:
                medians = {key: statistics.median(row[key] for row in here) for key in ("seconds", "bytes", "peak")}
                found[model, method, rate] = here[0] | medians
        unshaped = found.get((model, method, "none"))
        for rate in rates if unshaped and parse(method)[0] != "alone" else []:
            seconds = predict(unshaped, rate)
            cell = found.setdefault((model, method, rate), unshaped | {"seconds": seconds, "rate": rate})
            cell["predicted"] = seconds
    return found


def table(rows: list[dict]) -> str:
    """Write a table in Markdown for each model: a line a method, seconds a step by rate, and how many times alone."""
    found = cells(rows)
    rates = sorted({rate for _, _, rate in found}, key=bits_per_second)
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        head = [title(model), "MB a step", "peak memory, GB", *map(title, rates)]
        lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
        alone = found.get((model, "alone", "none"))
        for method in dict.fromkeys(row["method"] for row in rows if row["model"] == model):
            own = [found[model, method, rate] for rate in rates if (model, method, rate) in found]
            if not own:
                errors = [row["error"] for row in rows if (row["model"], row["method"]) == (model, method)]
                lines.append(f"| {title(method)} | {errors[-1]} |" + " |" * (len(rates) + 1))
                continue
            size = f"{own[0]['bytes'] / 1e6:.3g}" if own[0]["bytes"] > 10_000 else "0"
            memory = f"{max(cell['peak'] for cell in own) / 1e9:.2f}"
            shown = [_shown(found.get((model, method, rate)), alone) for rate in rates]
            lines.append("| " + " | ".join([title(method), size, memory, *shown]) + " |")
        parts.append("\n".join(lines))
    ratios = {
        key: cell["predicted"] / cell["seconds"]
        for key, cell in found.items()
        if "predicted" in cell and not _is_guess(cell)
        if cell["predicted"] > 2 * found[key[0], key[1], "none"]["seconds"]
    }
    if ratios:
        lines = [f"{title(rate)}, {title(model)}, {title(of)}: {x:.2f}" for (model, of, rate), x in ratios.items()]
        parts.append("Predicted over measured:\n\n- " + "\n- ".join(lines))
    return "\n\n".join([*parts, *processors(rows)])


def _is_guess(cell: dict) -> bool:
    return cell["rate"] != "none" and cell.get("predicted") == cell["seconds"]


def _shown(cell: dict | None, alone: dict | None) -> str:
    if cell is None:
        return ""
    ratio = f" ({cell['seconds'] / alone['seconds']:.3g})" if alone and cell is not alone else ""
    return ("~ " if _is_guess(cell) else "") + f"{cell['seconds']:.3g}{ratio}"


def main() -> int:
    parser = parser_of(
        __doc__,
        models=",".join(LARGE),
        methods=(METHODS, "as benchmarks/attach.py and local_ways.py name them"),
        rates="none,1gbit,100mbit,10mbit",
        steps=(10, "most steps of a cell"),
        seconds=(15.0, "time after which steps of a cell are enough"),
        longest=(60.0, "seconds of a step from which it is predicted"),
        warm_up={"type": int, "default": WARM_UP, "help": "steps of a method before any is timed"},
        budget={"type": float, "default": float("inf"), "help": "seconds after which no method is begun"},
        limit=(600.0, "seconds without a result until a method hangs"),
        out=("large_models", "name of the files, without .json, .md and .png"),
        table=(False, "measure nothing, show what is in OUT.json"),
        result=(None, argparse.SUPPRESS),
        loopback=(False, argparse.SUPPRESS),
    )
    arguments = parser.parse_args()
    if arguments.result is not None:
        run_site(arguments)
        return 0
    for model in arguments.models.split(","):
        if model not in LARGE:
            parser.error(f"no model {model!r}; models are {', '.join(LARGE)}")
    arguments.loopback = not may_make_links()
    results = Path(f"{arguments.out}.json")
    if not arguments.table:
        check_rates(parser, arguments.rates, arguments.loopback)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sites end, too
        measure(arguments, results)
    rows = read(results)
    if not rows:
        parser.error(f"there is nothing in {results}")
    Path(f"{arguments.out}.md").write_text(table(rows) + "\n")
    print(table(rows))
    found = [cell | {"ms": 1e3 * cell["seconds"], "guess": _is_guess(cell)} for cell in cells(rows).values()]
    draw(found, sorted({cell["rate"] for cell in found}, key=bits_per_second), Path(f"{arguments.out}.png"))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
