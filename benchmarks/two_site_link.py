"""Step times over models, methods and rates of the link, in one run: a table and a picture.

    sudo python benchmarks/two_site_link.py                                       everything, about a quarter of an hour
    sudo python benchmarks/two_site_link.py --models mnistnet,vit --rates 100mbit,none --methods ddp,rankdad
    python benchmarks/two_site_link.py --rates none                               without root, on loopback
    python benchmarks/two_site_link.py --draw-only                                table and picture of an earlier run

For each model it starts benchmarks/step_time.py on two sites joined by benchmarks/link.py, which give the link one rate
after the other. All methods multiply by MKL, but for the rows with oneDNN (benchmarks/libraries.py). Peers are DDP, DDP
with torch's hook for fp16, and DDP with its PowerSGD hook (rank 4). If a method fails or hangs, the table has the
reason, and the others go on. The table names the processor; for another one see docs/performance.md.

Writes OUT.md, OUT.png, and OUT.json, a line a cell as it is measured. Rates need Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from pathlib import Path

from command import parser_of
from drive import append, check_rates, colours_of, processors, read, run_sites, title
from link import may_make_links
from workloads import WORKLOADS

METHODS = "alone,ddp,ddp-fp16,ddp-powersgd,dsgd,dad,auto,rankdad,rankdad:wire=bf16,rankdad:wire=int8,"
METHODS += "rankdad:dense=lowrank,powersgd,topk,alone:library=onednn,ddp:library=onednn,rankdad:library=onednn,"
METHODS += "edad"  # edad last: it refuses models without chains of layers


def measure(arguments: argparse.Namespace, results: Path) -> None:
    """Run everything; the results file gets a line a model, method and rate, with an error where there is no time."""
    rates = arguments.rates.split(",")
    for model in arguments.models.split(","):
        methods = arguments.methods.split(",")
        while methods:
            print(f"== {model}: {', '.join(methods)}", flush=True)
            reason = run(model, methods, rates, arguments, results)
            done = {(row["method"], row["rate"]) for row in read(results) if row["model"] == model}
            failed = next((name for name in methods if any((name, rate) not in done for rate in rates)), None)
            if failed is None:
                break
            print(f"{failed} failed: {reason}", flush=True)
            for rate in (rate for rate in rates if (failed, rate) not in done):
                append(results, {"model": model, "method": failed, "rate": rate, "error": reason})
            methods = methods[methods.index(failed) + 1 :]


def run(model: str, methods: list[str], rates: list[str], arguments: argparse.Namespace, results: Path) -> str:
    """Run methods of a model on two sites; return why they ended early, or an empty string."""
    program = ["step_time.py", "--model", model, "--methods", ",".join(methods), "--json", str(results)]
    program += ["--steps", str(arguments.steps), "--seconds", str(arguments.seconds), "--rank", str(arguments.rank)]
    program += ["--label", rates[0]] if arguments.loopback else ["--rates", ",".join(rates)]
    return run_sites(program, arguments.loopback, results, arguments.limit)


def table(rows: list[dict], rates: list[str]) -> str:
    """Write a table in Markdown: a line a model and method, milliseconds and times faster than DDP by rate."""
    found = {(row["model"], row["method"], row["rate"]): row for row in rows}
    lines = [
        "| model | method | MB a step | " + " | ".join(map(title, rates)) + " |",
        "| --- " * (3 + len(rates)) + "|",
    ]
    reasons: list[str] = []
    for model, method in dict.fromkeys((row["model"], row["method"]) for row in rows):
        cells = [_cell(found.get((model, method, rate)), found.get((model, "ddp", rate)), reasons) for rate in rates]
        sent = [row["bytes"] for row in rows if (row["model"], row["method"]) == (model, method) and "bytes" in row]
        size = "-" if not sent else "0" if max(sent) < 1000 else f"{sent[-1] / 1e6:.3g}"
        lines.append(f"| {title(model)} | {title(method)} | {size} | " + " | ".join(cells) + " |")
    notes = [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n\n".join(["\n".join(lines), *notes, *processors(rows)])


def _cell(row: dict | None, ddp: dict | None, reasons: list[str]) -> str:
    if row is None:
        return ""
    if "error" in row:
        if row["error"] not in reasons:
            reasons.append(row["error"])
        return f"failed [{reasons.index(row['error']) + 1}]"
    known = ddp is not None and "ms" in ddp and not row["method"].startswith("alone") and row["method"] != "ddp"
    ratio = f" ({ddp['ms'] / row['ms']:.3g} x)" if known else ""
    return f"{row['ms']:,.0f}{ratio}" if row["ms"] >= 100 else f"{row['ms']:.3g}{ratio}"


def draw(rows: list[dict], rates: list[str], file: Path) -> None:
    """Draw step times by MKL, a panel a model, a group of bars a rate; those marked as a ``guess`` hatched."""
    from matplotlib.figure import Figure

    models, methods = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "method"))
    bars = [method for method in methods if not method.startswith("alone") and "library=" not in method]
    high = math.ceil(len(models) / 2)
    figure = Figure(figsize=(13 if len(models) > 1 else 7, 3.1 * high + 0.8), layout="constrained")
    panels = figure.subplots(high, min(2, len(models)), squeeze=False).flat
    for rest in panels[len(models) :]:
        rest.axis("off")
    colours = colours_of(bars)
    found = {(row["model"], row["method"], row["rate"]): row["ms"] for row in rows if "ms" in row}
    guesses = {(row["model"], row["method"], row["rate"]) for row in rows if row.get("guess")}
    for panel, model in zip(panels, models, strict=False):
        shown = [ms for (of, _, _), ms in found.items() if of == model] or [1.0]
        bottom = 0.6 * min(shown)
        for place, method in enumerate(bars):
            times = [found.get((model, method, rate), math.nan) for rate in rates]
            shift = (place - (len(bars) - 1) / 2) * 0.84 / len(bars)
            heights = [time - bottom for time in times]
            places = [group + shift for group in range(len(rates))]
            hatches = ["////" if (model, method, rate) in guesses else "" for rate in rates]
            look = {"color": colours[method], "edgecolor": "white", "linewidth": 0, "hatch": hatches}
            panel.bar(places, heights, 0.76 / len(bars), bottom, label=title(method), **look)
            for x, time_ in zip(places, times, strict=True):
                if math.isnan(time_) and any((row["model"], row["method"]) == (model, method) for row in rows):
                    panel.annotate("x", (x, bottom), ha="center", va="bottom", fontsize=7, color=colours[method])
        alone = [ms for (of, method, _), ms in found.items() if (of, method) == (model, "alone")]
        if alone:
            panel.axhline(min(alone), color="black", linewidth=1, linestyle=":", label=title("alone"))
        panel.set(title=title(model), yscale="log", ylim=(bottom, 1.6 * max(shown)), ylabel="ms a step")
        panel.set_xticks(range(len(rates)), [title(rate) for rate in rates])
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    handles, labels = panels[0].get_legend_handles_labels()
    longest = max(map(len, labels))
    columns = (3 if longest < 25 else 2) if len(models) == 1 else 6 if longest < 30 else 4
    figure.legend(handles, labels, loc="outside lower center", frameon=False, ncols=columns)
    figure.savefig(file, dpi=110)


def main() -> int:
    parser = parser_of(
        __doc__,
        models=",".join(WORKLOADS),
        methods=(METHODS, "as benchmarks/attach.py names them"),
        rates="10mbit,100mbit,1gbit,none",
        steps=(30, "most steps of a method at a rate (least: 3)"),
        seconds=(2.0, "time after which steps of a cell are enough"),
        rank=4,
        limit=(180.0, "seconds without a result until a method hangs"),
        out=("two_site_link", "name of the files, without .md, .png and .json"),
        draw_only=(False, "measure nothing, show what is in OUT.json"),
    )
    arguments = parser.parse_args()
    for model in arguments.models.split(","):
        if model not in WORKLOADS:
            parser.error(f"no model {model!r}; models are {', '.join(WORKLOADS)}")
    arguments.loopback = not may_make_links()
    if not arguments.draw_only:
        check_rates(parser, arguments.rates, arguments.loopback)
    results = Path(f"{arguments.out}.json")
    results.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    if not arguments.draw_only:
        results.unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sites end, too
        measure(arguments, results)
    rows = read(results)
    if not rows:
        parser.error(f"there is nothing in {results}")
    rates = list(dict.fromkeys(row["rate"] for row in rows)) if arguments.draw_only else arguments.rates.split(",")
    Path(f"{arguments.out}.md").write_text(table(rows, rates) + "\n")
    print(table(rows, rates))
    draw(rows, rates, Path(f"{arguments.out}.png"))
    print(f"\n{arguments.out}.md, .png and .json, in {(time.monotonic() - start) / 60:.1f} minutes")
    return int(not any("ms" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
