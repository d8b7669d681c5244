"""Loss curves of fine-tuning a small pretrained language model at two sites, by rankdad and by DDP, over some seeds.

    python benchmarks/fine_tuning.py                               five seeds, both sites on this machine
    python benchmarks/fine_tuning.py --seeds 2 --steps 40 --pretraining 60
    python benchmarks/fine_tuning.py --methods rankdad:rank=16+dense=lowrank --seeds 1 --first-seed 4 --keep
                                                                   one more curve, beside those of earlier runs
    python benchmarks/fine_tuning.py --draw-only                   table and picture of earlier runs

A transformer of two blocks on bytes, with its table tied to its output layer, as GPT-2 has it. It is trained on the
Markdown text of this repository's documentation, and then fine-tuned, all of its weights, on the Python sources of the
package: each site has half of the files, in windows of 64 bytes, 8 a step, Adam. Every tenth file is held out. The loss
is that on windows of the held-out files, in nats a byte. Seeds draw other batches; both ways get the same ones.

Writes OUT.json, a line a curve as it is measured, OUT.pt, the weights that are fine-tuned, OUT.md and OUT.png.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from attach import Attached
from command import connect_site, parser_of
from drive import append, colours_of, read, title
from torch import Tensor, nn
from workloads import SmallGPT, loss

from dadplug.support.processes import launch_sites

ROOT = Path(__file__).resolve().parents[1]
UNTRAINED = "untrained"
COMPRESSED = "rankdad:dense=lowrank"
FEEDBACKS = ("error_feedback=false", "rank=8", "error_feedback=true", "rank=16+wire=int8", "rank=auto")
METHODS = ",".join(["ddp", "rankdad:rank=auto", *(f"{COMPRESSED}+{more}" for more in FEEDBACKS), UNTRAINED])
LENGTH, BATCH, WINDOWS = 64, 8, 64


def tied_model() -> nn.Module:
    """Make the model with random weights."""
    model = SmallGPT(width=128, depth=2, vocabulary=256, length=LENGTH)
    model.head = nn.Linear(128, 256, bias=False)
    nn.init.normal_(model.words.weight, std=0.02)
    model.head.weight = model.words.weight
    return model


def text(pattern: str, folders: tuple[str, ...], part: str) -> Tensor:
    """Return the bytes of files of this repository: those of this site, or those that are held out.

    Args:
        pattern: pattern of the files' names.
        folders: the folders.
        part: "site" or "held out".
    """
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob(pattern))
    held_out = files[::10]
    rest = [file for file in files if file not in held_out]
    chosen = held_out if part == "held out" else rest[dist.get_rank() :: dist.get_world_size()]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in chosen)), dtype=torch.uint8).long()


def windows(data: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw windows of a text; return their bytes, and the bytes that follow each."""
    starts = torch.randint(len(data) - LENGTH, (count, 1), generator=generator)
    found = data[starts + torch.arange(LENGTH + 1)]
    return found[:, :-1], found[:, 1:]


def train(model: nn.Module, method: str, data: Tensor, held_out: Tensor, arguments: argparse.Namespace, **options):
    """Train a model; return the held-out loss every few steps, and the bytes that this site sends in a step."""
    steps, seed, rate = options["steps"], options["seed"], options["rate"]
    attached = Attached(model, method, arguments.rank)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    check = windows(held_out, WINDOWS, torch.Generator().manual_seed(0))
    curve = []
    for step in range(steps + 1):
        if step % arguments.every == 0:
            with torch.no_grad():
                curve.append(float(loss(model(check[0]), check[1])))
        inputs, targets = windows(data, BATCH, generator)
        optimizer.zero_grad()
        loss(attached.model(inputs), targets).backward()
        attached.step(optimizer)
    attached.detach()
    return curve, dense_bytes(model) if attached.reduction is None else attached.reduction.traffic.bytes_sent


def dense_bytes(model: nn.Module) -> int:
    """Return what each of two sites sends in a step of DDP: one gradient, by a ring."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def start_weights(arguments: argparse.Namespace, untrained: nn.Module, rate: float = 2e-3) -> nn.Module:
    """Return the model that is fine-tuned: trained on the first text, or as an earlier run has stored it.

    Args:
        arguments: the program's.
        untrained: the model with random weights.
        rate: learning rate of Adam.
    """
    trained, file = deepcopy(untrained), Path(f"{arguments.out}.pt")
    if arguments.keep and file.exists():
        trained.load_state_dict(torch.load(file))
        return trained
    prose = [text("*.md", ("docs",), part) for part in ("site", "held out")]
    curve, _ = train(trained, "dsgd", *prose, arguments, steps=arguments.pretraining, seed=0, rate=rate)
    dist.barrier()  # the other site may still look for the file
    if dist.get_rank() == 0:
        print(f"training: held-out loss from {curve[0]:.2f} to {curve[-1]:.2f} nats a byte", flush=True)
        torch.save(trained.state_dict(), file)
    return trained


def run_site(arguments: argparse.Namespace) -> None:
    """Train the model on the first text, then fine-tune it on the second one by each method for each seed."""
    connect_site()
    torch.manual_seed(0)
    untrained = tied_model()
    trained = start_weights(arguments, untrained)
    code = [text("*.py", ("dadplug", "hooks", "runners"), part) for part in ("site", "held out")]
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for method, seed in ((method, seed) for seed in seeds for method in arguments.methods.split(",")):
        if method == UNTRAINED and seed:
            continue
        name, start = ("ddp", untrained) if method == UNTRAINED else (method, trained)
        curve, nbytes = train(deepcopy(start), name, *code, arguments, steps=arguments.steps, seed=seed, rate=5e-4)
        if dist.get_rank() == 0:
            print(f"{method}, seed {seed}: {curve[0]:.3f} to {curve[-1]:.3f}", flush=True)
            row = {"method": method, "seed": seed, "every": arguments.every, "curve": curve, "bytes": nbytes}
            append(f"{arguments.out}.json", row)


def curves_of(rows: list[dict], method: str) -> list[list[float]]:
    return [row["curve"] for row in rows if row["method"] == method]


def table(rows: list[dict]) -> str:
    """Write a table of held-out losses: mean and range over seeds at half of the steps and at the end."""
    peers = curves_of(rows, "ddp")
    lines = ["| | kB a step | half of the steps | all | points inside DDP's range |", "| --- " * 5 + "|"]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = curves_of(rows, method)
        cells = []
        for place in (len(own[0]) // 2, -1):
            values = [curve[place] for curve in own]
            cells.append(f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        means = [statistics.fmean(values) for values in zip(*own, strict=True)]
        ranges = [(min(values), max(values)) for values in zip(*peers, strict=True)]
        inside = sum(least <= mean <= most for mean, (least, most) in zip(means, ranges, strict=True))
        sent = next(row["bytes"] for row in rows if row["method"] == method)
        lines.append(f"| {title(method)} | {sent / 1e3:,.0f} | {cells[0]} | {cells[1]} | {inside} of {len(means)} |")
    return "\n".join(lines)


def draw(rows: list[dict], file: Path) -> None:
    """Draw the mean of each method's curves over the range of DDP's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    panel = figure.subplots()
    methods = list(dict.fromkeys(row["method"] for row in rows))
    colours = colours_of(methods)
    steps = [rows[0]["every"] * place for place in range(len(rows[0]["curve"]))]
    for method in methods:
        own = curves_of(rows, method)
        means = [statistics.fmean(values) for values in zip(*own, strict=True)]
        style = ":" if method == UNTRAINED else "-"
        panel.plot(steps, means, style, color=colours[method], label=title(method))
        if method != UNTRAINED:
            bounds = [min(values) for values in zip(*own)], [max(values) for values in zip(*own)]
            panel.fill_between(steps, *bounds, color=colours[method], alpha=0.2, linewidth=0)
    panel.set(
        xlabel="steps of fine-tuning", ylabel="held-out loss, nats a byte", ylim=(None, 1.1 * rows[0]["curve"][0])
    )
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    figure.savefig(file, dpi=110)


def main() -> int:
    parser = parser_of(
        __doc__,
        methods=(METHODS, "as benchmarks/attach.py names them; with ddp"),
        rank=8,
        seeds=5,
        first_seed=0,
        pretraining=(600, "steps on the first text"),
        steps=(200, "steps on the second text"),
        every=(10, "steps between two evaluations"),
        out=("fine_tuning", "name of the files, without .json, .md and .png"),
        keep=(False, "keep the curves and the weights of earlier runs"),
        draw_only=(False, "measure nothing, show what is in OUT.json"),
    )
    arguments = parser.parse_args()
    results = Path(f"{arguments.out}.json")
    if "RANK" in os.environ:
        run_site(arguments)
        return 0
    if not arguments.draw_only:
        if not arguments.keep:
            results.unlink(missing_ok=True)
        if status := launch_sites([__file__, *sys.argv[1:]], 2):
            return status
    rows = read(results)
    if not rows:
        parser.error(f"there is nothing in {results}")
    Path(f"{arguments.out}.md").write_text(table(rows) + "\n")
    print(table(rows))
    draw(rows, Path(f"{arguments.out}.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
