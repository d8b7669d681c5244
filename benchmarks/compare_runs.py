"""How often `dadplug.compare` names the same winner: the comparison several times, with a table of the verdicts.

    python benchmarks/compare_runs.py                        MNISTNet's shape of data: scikit-learn's digits, five times
    python benchmarks/compare_runs.py --runs 1 --seconds 5   one short comparison

The network of the guide (one hidden layer of 512) is trained on this machine in all ways that apply. Each comparison
has a line in OUT.json. With --keep and --stop-after they are made in pieces: the same command until it exits with 0.
Exits with 1 if fewer than four of five comparisons have the verdict that is the most frequent one.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

import torch
from command import parser_of
from drive import PIECES, append, begin, read
from torch import nn

import dadplug
from dadplug.data import load_dataset

AGREEING = 0.8  # share of the comparisons that have to agree


def build() -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, torch.optim.Adam(model.parameters(), 1e-3), nn.CrossEntropyLoss()


def verdict_of(row: dict) -> str:
    return row["best"] or "no difference between " + ", ".join(sorted(row["leaders"]))


def table(rows: list[dict], runs: int) -> str:
    """Format the verdicts by their number, and whether they agree."""
    counts = Counter("no difference" if row["best"] is None else row["best"] for row in rows)
    lines = ["| comparison | verdict | loss of the first, of the second |", "| --- | --- | --- |"]
    for number, row in enumerate(rows):
        losses = ", ".join(f"{loss:.4f}" for loss in row["losses"][:2])
        lines.append(f"| {number + 1} | {verdict_of(row)} | {losses} |")
    for name, count in counts.most_common(1):
        lines.append(f"\nThe most frequent verdict, {name}, in {count} of {len(rows)} comparisons ({runs} asked for)")
    return "\n".join(lines)


def agrees(rows: list[dict]) -> bool:
    counts = Counter(row["best"] for row in rows)
    return max(counts.values()) >= AGREEING * len(rows)


def main() -> int:
    parser = parser_of(
        __doc__,
        runs=5,
        seconds=(30.0, "training time of a way"),
        dataset={"default": "digits", "choices": ("digits", "mnist")},
        data_dir=(None, "folder of MNIST's files"),
        out=("compare_runs", "name of the files, without .md and .json"),
        **PIECES,
    )
    arguments = parser.parse_args()
    results = Path(f"{arguments.out}.json")
    begin(results, arguments.keep)
    data = load_dataset(arguments.dataset, arguments.data_dir).train
    start = time.monotonic()
    while len(read(results)) < arguments.runs:
        if arguments.stop_after is not None and time.monotonic() - start > arguments.stop_after:
            print("comparisons are missing: the same command with --keep goes on")
            return 2
        found = dadplug.compare(build, data, seconds=arguments.seconds)
        losses = [row.loss for row in found.rows if row.way in found.finalists]
        line = {"best": found.best, "leaders": list(found.leaders), "losses": losses}
        append(results, line)
    rows = read(results)
    Path(f"{arguments.out}.md").write_text(table(rows, arguments.runs) + "\n")
    print(table(rows, arguments.runs))
    return 0 if agrees(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
