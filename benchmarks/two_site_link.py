"""Step times over models, methods and rates of the link, in one run: a table and a picture.

    sudo python benchmarks/two_site_link.py
    sudo python benchmarks/two_site_link.py --models mnistnet,vit --rates 100mbit,none --picture steps.png

For each rate and model it starts benchmarks/step_time.py on two sites joined by benchmarks/link.py. Peers are DDP, DDP
with fp16 compression, and DDP with PowerSGD's hook (rank 4). Linux, root; about an hour for everything.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
METHODS = "alone,ddp,ddp-fp16,ddp-powersgd,dsgd,dad,auto,rankdad,rankdad:wire=bf16,rankdad:wire=int8,powersgd,topk"


def measure(arguments: argparse.Namespace) -> list[dict]:
    """Runs everything; returns a row a model, rate and method."""
    with tempfile.NamedTemporaryFile(suffix=".json") as results:
        for rate in arguments.rates.split(","):
            for model in arguments.models.split(","):
                slow = "2" if rate == "10mbit" else "8"
                program = [str(HERE / "step_time.py"), "--model", model, "--methods", arguments.methods]
                program += ["--json", results.name, "--rate", rate, "--slow-steps", slow, "--steps", "30"]
                command = [sys.executable, str(HERE / "link.py"), rate, sys.executable, *program]
                print(f"== {model} at {rate}", flush=True)
                if subprocess.run(command, check=False).returncode:
                    print(f"{model} at {rate} failed; its rows are left out", flush=True)
        return [json.loads(line) for line in Path(results.name).read_text().splitlines()]


def table(rows: list[dict], rates: list[str]) -> str:
    """Writes a table in Markdown: a line a model and method, milliseconds and times faster than DDP by rate."""
    found = {(row["model"], row["method"], row["rate"]): row for row in rows}
    lines = ["| model | method | MB a step | " + " | ".join(rates) + " |", "| --- " * (3 + len(rates)) + "|"]
    for model, method in dict.fromkeys((row["model"], row["method"]) for row in rows):
        cells = []
        for rate in rates:
            row, ddp = found.get((model, method, rate)), found.get((model, "ddp", rate))
            ratio = f" ({ddp['ms'] / row['ms']:.1f} x)" if row and ddp else ""
            cells.append(f"{row['ms']:,.0f} ms{ratio}" if row else "-")
        sent = next(row["bytes"] for row in rows if (row["model"], row["method"]) == (model, method))
        lines.append(f"| {model} | {method} | {sent / 1e6:.3f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[dict], rates: list[str], file: str) -> None:
    """Draws step times against the rate, a panel a model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = pyplot.subplots(1, len(models), figsize=(4 * len(models), 4), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        for method in dict.fromkeys(row["method"] for row in rows if row["model"] == model):
            times = {row["rate"]: row["ms"] for row in rows if (row["model"], row["method"]) == (model, method)}
            known = [rate for rate in rates if rate in times]
            style = {"linestyle": "--"} if method.startswith(("ddp", "alone")) else {}
            panel.plot(known, [times[rate] for rate in known], marker="o", markersize=3, label=method, **style)
        panel.set(title=model, yscale="log", xlabel="link", ylabel="ms a step")
        panel.grid(alpha=0.3)
    panels[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mnistnet,vit,gpt,resnet,lstm")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--rates", default="10mbit,100mbit,1gbit,none")
    parser.add_argument("--picture", help="file to draw into")
    arguments = parser.parse_args()
    rows, rates = measure(arguments), arguments.rates.split(",")
    print(table(rows, rates))
    if arguments.picture:
        draw(rows, rates, arguments.picture)


if __name__ == "__main__":
    main()
