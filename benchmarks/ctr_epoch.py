"""Wide & Deep on clicks at two sites: time of an epoch and test log loss, of one process, DDP and AdaPM.

    sudo python benchmarks/link.py 100mbit python benchmarks/ctr_epoch.py --data DIR/criteo-sample.npz
    torchrun --nproc-per-node 2 benchmarks/ctr_epoch.py                     unshaped, on generated clicks

All go through the same global batches in the same order, without shuffling, from the same first values, by Adagrad.
DDP has sparse gradients, which gloo gathers, and, in its favour, tables with a row for each id that occurs; AdaPM's and
the parameter server's are indexed by the ids as they are. "no-intent" is that server: rows stay at their home, and are
pulled and pushed when they are used. What is no table goes by --distributed-mode, by default rankdad of rank 4, in all
but DDP; a method may have its own, as in adapm:mode=dsgd. Methods alternate, since a machine's pace varies; times are
medians over rounds, and over epochs but for the first. A short run of each goes before, in which kernels compile.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from dadplug.examples.zoo.clicks import split_by_time

import dadplug
from dadplug.data import Clicks, DataPair, load_dataset, read_criteo
from dadplug.tools.cli import add_option_arguments, options_of, plain_errors

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from command import parser_of
from ctr_methods import METHODS, Outcome, Run

ALL = "alone,ddp,no-intent,adapm,adapm-manual,relocation-only,replication-only,adapm:mode=dsgd,no-intent:mode=dsgd"


def options_from(text: str) -> dict[str, Any]:
    """Read a method's own options, ``mode=dsgd:wire=bf16``."""
    given = dict(part.split("=", 1) for part in text.split(":") if part)
    return {name: int(value) if value.isdigit() else value for name, value in given.items()}


def run_method(name: str, run: Run) -> Outcome:
    """Train by one method; every site calls it."""
    method, _, own = name.partition(":")
    return METHODS[method](dataclasses.replace(run, options=run.options | options_from(own)))


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """Lays out the outcomes of all rounds, a line a method."""
    seconds = {
        name: (
            statistics.median(one.seconds[0] for one in rounds),
            statistics.median(time for one in rounds for time in one.seconds[1:] or one.seconds),
        )
        for name, rounds in outcomes.items()
    }
    epochs = len(next(iter(outcomes.values()))[0].log_losses)
    losses = "  ".join(f"{f'log loss {number}':>19}" for number in range(1, epochs + 1))
    lines = [
        f"{'method':22}  {losses}  {'s first':>7}  {'s later':>7}  {'of ddp':>12}  {'of no-intent':>12}  "
        f"{'MB first':>8}  {'MB later':>8}  {'local':>7}"
    ]
    for name, rounds in outcomes.items():
        cells = []
        for number in range(epochs):
            loss = statistics.median(one.log_losses[number] for one in rounds)
            alone = outcomes["alone"][0].log_losses[number] if "alone" in outcomes else loss
            cells.append(f"{loss:.4f} ({100 * (loss / alone - 1):+.2f} %)")
        ratios = [
            "/".join(f"{mine / its:.2f}" for mine, its in zip(seconds[name], seconds[peer], strict=True))
            if peer in seconds
            else "-"
            for peer in ("ddp", "no-intent")
        ]
        one = rounds[-1]
        sent = ["-" if count is None else f"{count / 1e6:.2f}" for count in (one.bytes_sent[0], one.bytes_sent[-1])]
        local = "-" if one.local_share[-1] is None else f"{100 * one.local_share[-1]:.1f} %"
        times = "  ".join(f"{time:7.2f}" for time in seconds[name])
        lines.append(
            f"{name:22}  {'  '.join(f'{cell:>19}' for cell in cells)}  {times}  {ratios[0]:>12}  {ratios[1]:>12}  "
            f"{sent[0]:>8}  {sent[1]:>8}  {local:>7}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark at this site."""
    parser = parser_of(
        __doc__,
        data=(None, "Criteo's train.txt or a sample in .npz (default: generated clicks)"),
        limit={"type": int, "help": "rows to read of it"},
        methods=ALL,
        rounds=3,
        epochs=2,
        batch_size=(128, "rows in a batch of one site"),
        lr=0.003,
        lookahead={"type": int, "default": Run.lookahead},
        interval={"type": float, "default": Run.interval},
    )
    add_option_arguments(parser)
    parser.set_defaults(option_mode="rankdad", option_rank=4)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "Sparse invariant checks")
    torch.set_num_threads(1)
    with plain_errors(ValueError):
        names = arguments.methods.split(",")
        if unknown := [name for name in names if name.partition(":")[0] not in METHODS]:
            raise ValueError(f"unknown methods {', '.join(unknown)}; valid ones are {', '.join(METHODS)}")
        data = load_dataset("clicks")
        if arguments.data is not None:
            data = split_by_time(read_criteo(arguments.data, limit=arguments.limit))
        dadplug.connect()
        rank, sites = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        own = ("epochs", "batch_size", "lr", "lookahead", "interval")
        run = Run(data, rank, sites, **{name: getattr(arguments, name) for name in own}, options=options_of(arguments))
        assert isinstance(data.train, Clicks)
        few = data.train.subset(torch.arange(min(len(data.train), 4 * sites * run.batch_size)))
        for name in names:
            run_method(name, dataclasses.replace(run, data=DataPair(few, few, 2), epochs=1))
        outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
        for _ in range(arguments.rounds):
            for name in names:
                outcomes[name].append(run_method(name, run))
    if rank == 0:
        print(f"{len(data.train):,} rows to train on, batches of {sites} x {run.batch_size}, {run.epochs} epochs")
        print(table(outcomes))


if __name__ == "__main__":
    main()
