"""Goodput by batch, method and rate of the link, and the batch that training chooses: a table and a picture.

    sudo python benchmarks/goodput.py                     dsgd, dad and rankdad at 10 and 100 Mbit/s, about five minutes
    python benchmarks/goodput.py --rates none             without root, on loopback
    python benchmarks/goodput.py --slow-site              an epoch with a site that is four times slower
    python benchmarks/goodput.py --quick                  a few steps on loopback, to see that it runs

For each method and rate, two sites train a small network on the digits by a dadplug.AdaptiveDataLoader until the
batch stays. Then steps of given batches are timed. Goodput = B / T(B) * (noise scale + B0) / (noise scale + B), with
the noise scale at the end of the training. With --slow-site, the network is a convolutional one, and the second site
sleeps for three times as long as it has loaded samples, and as it has computed. The bound is what the sum of both
sites' speeds allows, which are measured just before and after the epoch: each alone, at the same time, with batches of
half of the samples of a step, without an exchange.

Writes OUT.md, OUT.png, and OUT.json, a line a method and rate. Rates need Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from command import connect_site, parser_of
from drive import append, check_rates, colours_of, read, run_sites, title
from link import may_make_links, reshape
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

import dadplug
from dadplug.adaptive import reset_progress
from dadplug.adaptive.goodput import efficiency
from dadplug.data import load_dataset

METHODS = "dsgd,dad,rankdad"
BASE = 32
SLOW_BASE, SLOW_COPIES = 512, 32  # with a slow site
COPIES = 8  # of the digits, for epochs of more steps


def network(width: int = 128) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


def convolutions() -> nn.Module:
    """Return a network that computes for much longer than it exchanges."""
    torch.manual_seed(0)
    first = [nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, 10)]
    return nn.Sequential(nn.Flatten(), *first, *second)


def digits(copies: int = COPIES) -> ConcatDataset:
    train = load_dataset("digits").train
    return ConcatDataset([TensorDataset(train.images, train.labels)] * copies)


class SlowData(Dataset):
    """Data set that takes longer.

    Args:
        data: the data set.
        delay: times of loading that it sleeps after a batch.
    """

    def __init__(self, data: Dataset, delay: float) -> None:
        self.data, self.delay = data, delay

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self.data[place]

    def __getitems__(self, places: list[int]) -> list[tuple[Tensor, Tensor]]:
        start = time.perf_counter()
        found = [self.data[place] for place in places]
        time.sleep(self.delay * (time.perf_counter() - start))
        return found


class Training:
    """Training of one method.

    Args:
        method: mode of the reduction; None for a site alone.
        model: the network.
        delay: times of computing that the site sleeps after backward.
        base: the base batch.
    """

    def __init__(self, method: str | None, model: nn.Module, delay: float = 0.0, base: int = BASE) -> None:
        self.model, self.delay = model, delay
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.reduction = None if method is None else dadplug.GradientReduction(model, method, rank=4)
        scales = method is not None
        self.scaler = dadplug.AdaScale(self.optimizer, self.reduction, base_batch=base) if scales else None

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), targets).backward()
        if self.delay:
            time.sleep(self.delay * (time.perf_counter() - start))
        if self.reduction is not None:
            self.reduction.synchronize()
        self.optimizer.step()

    def end(self) -> None:
        if self.scaler is not None:
            self.scaler.detach()
            self.reduction.detach()


def adapt(training: Training, largest: int, steps: int, base: int = BASE) -> dadplug.AdaptiveDataLoader:
    """Train with a batch that follows goodput, for some steps; return the loader."""
    reset_progress()
    data = SlowData(digits(COPIES if base == BASE else SLOW_COPIES), training.delay)
    loader = dadplug.AdaptiveDataLoader(data, base, shuffle=True, drop_last=True)
    loader.autoscale_batch_size(largest, local_bsz_bounds=(4, largest), reduction=training.reduction)
    taken = 0
    while taken < steps:
        for inputs, targets in loader:
            training.step(inputs, targets)
            taken += 1
            if taken >= steps:
                break
    return loader


def seconds_of(training: Training, rows: int, steps: int, limit: float) -> float:
    """Return the median seconds of a step with so many samples at this site, by the slowest site."""
    data, times, began = digits(), [], time.perf_counter()
    places = torch.randint(len(data), (steps, rows), generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(steps):
        start = time.perf_counter()
        batch = [data[place] for place in places[step].tolist()]
        training.step(torch.stack([image for image, _ in batch]), torch.stack([label for _, label in batch]))
        times.append(time.perf_counter() - start)
        over = torch.tensor([float(time.perf_counter() - began > limit and step >= 4)])
        dist.all_reduce(over)
        if over:
            break
    median = torch.tensor([statistics.median(times[2:] or times)])
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return float(median)


def sweep(method: str, arguments: argparse.Namespace) -> dict:
    """Train one method, then time steps of given batches; return a line of results."""
    training = Training(method, network())
    loader = adapt(training, arguments.largest, arguments.steps)
    chosen, scale = loader.current_batch_size, training.reduction.noise.scale
    batches = [BASE]
    while batches[-1] < arguments.largest:
        batches.append(batches[-1] * 2)
    seconds = {}
    seconds_of(training, BASE // 2, 20, math.inf)  # payloads shrink after 16 steps with fewer rows, and grow at once
    for batch in sorted({*batches, chosen}):
        seconds[batch] = seconds_of(training, max(1, batch // 2), arguments.sweep, arguments.seconds)
    training.end()
    goodput = {batch: batch / spent * efficiency(batch, scale, BASE) for batch, spent in seconds.items()}
    best = max(goodput, key=lambda batch: goodput[batch])
    row = {"chosen": chosen, "noise_scale": scale, "seconds": seconds, "goodput": goodput, "best": best}
    return row | {"reached": goodput[chosen] / goodput[best]}


def speed_alone(rows: int, delay: float, seconds: float) -> float:
    """Return the samples per second of this site without an exchange, while the other one computes as well."""
    training, taken = Training(None, convolutions(), delay), 0
    batches = iter(DataLoader(SlowData(digits(SLOW_COPIES), delay), rows, drop_last=True))
    training.step(*next(batches))
    dist.barrier()
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        training.step(*next(batches))
        taken += rows
    return taken / spent


def slow_site(arguments: argparse.Namespace) -> dict:
    """Train an epoch with a site that is four times slower; return its time and what the sum of speeds allows."""
    rank = dist.get_rank()
    delay = 3.0 * (rank == 1)
    training = Training("dsgd", convolutions(), delay, arguments.base)
    loader = adapt(training, 2 * arguments.base, arguments.steps, arguments.base)
    speeds = [speed_alone(loader.current_batch_size // 2, delay, arguments.seconds / 2)]
    dist.barrier()
    sizes, began, rows, steps = [], time.perf_counter(), 0, 0
    for inputs, targets in loader:
        training.step(inputs, targets)
        sizes.append(len(inputs))
        rows, steps = rows + len(inputs), steps + 1
    spent = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    training.end()
    speeds.append(speed_alone(loader.current_batch_size // 2, delay, arguments.seconds / 2))
    shares = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(shares, torch.tensor([statistics.median(sizes)], dtype=torch.float64))
    both = torch.tensor([rows, statistics.fmean(speeds)], dtype=torch.float64)
    dist.all_reduce(both)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    bound = float(both[0] / both[1])
    row = {"method": "slow site", "rate": "none", "sizes": [int(each) for each in shares], "steps": steps}
    return row | {"seconds": float(spent), "bound": bound, "ratio": float(spent) / bound}


def run_site(arguments: argparse.Namespace) -> None:
    connect_site()

    def write(row: dict) -> None:
        if dist.get_rank() == 0:
            append(arguments.result, row)
            print(json.dumps(row), flush=True)

    measured: list[tuple[str, str, Callable[[], dict]]] = []
    if arguments.slow_site:
        measured.append(("slow site", "none", lambda: slow_site(arguments)))
    else:
        for rate in arguments.rates.split(","):
            for method in arguments.methods.split(","):
                measured.append((method, rate, lambda method=method: sweep(method, arguments)))
    for method, rate, measure in measured:
        if not arguments.loopback:
            dist.barrier()
            reshape(rate)
        write({"method": method, "rate": rate} | measure())


def table(rows: list[dict]) -> str:
    """Write a table in Markdown: a line a method and rate."""
    lines = [
        "| method | link | noise scale | best batch | chosen batch | of the best goodput |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if "reached" in row:
            cells = [title(row["method"]), title(row["rate"]), f"{row['noise_scale']:.0f}", f"{row['best']}"]
            lines.append("| " + " | ".join([*cells, f"{row['chosen']}", f"{100 * row['reached']:.0f} %"]) + " |")
    slow = [row for row in rows if "ratio" in row]
    lines = lines if len(lines) > 2 else []
    for row in slow:
        lines.append(
            f"An epoch with a site four times slower: {row['seconds']:.2f} s in {row['steps']} steps of "
            f"{' + '.join(map(str, row['sizes']))} samples; the sum of speeds allows {row['bound']:.2f} s "
            f"({row['ratio']:.2f} times)."
        )
    return "\n".join(lines)


def draw(rows: list[dict], file: Path) -> None:
    """Draw goodput against the batch, a panel a rate, with the chosen batches."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if "goodput" in row]
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    if not rates:
        return
    figure = Figure(figsize=(4.6 * len(rates), 3.8), layout="constrained")
    panels = figure.subplots(1, len(rates), sharex=True, sharey=True, squeeze=False)[0]
    colours = colours_of(list(dict.fromkeys(row["method"] for row in rows)))
    for panel, rate in zip(panels, rates, strict=True):
        for row in (row for row in rows if row["rate"] == rate):
            curve = sorted((int(batch), value) for batch, value in row["goodput"].items())
            colour = colours[row["method"]]
            panel.plot(*zip(*curve, strict=True), marker=".", label=title(row["method"]), color=colour)
            panel.plot([row["chosen"]], [row["goodput"][str(row["chosen"])]], "o", markersize=10, color=colour)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set_title(title(rate))
        panel.set_xlabel("samples of both sites in a step")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("goodput, samples/s")
    figure.legend(*panels[0].get_legend_handles_labels(), title="o: chosen in training", loc="outside right center")
    figure.savefig(file, dpi=110)


def parse() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        methods=METHODS,
        rates=(None, "of the link, as tc writes them; 10mbit,100mbit where root may"),
        largest=(1024, "largest batch of both sites"),
        steps=(140, "steps of the training that chooses"),
        sweep=(1000, "most steps of a given batch"),
        seconds=(3.0, "time after which steps of a batch are enough"),
        slow_site=(False, "measure an epoch with a site four times slower"),
        base={"type": int, "default": SLOW_BASE, "help": "base batch of both sites, with --slow-site"},
        quick=(False, "few steps, on loopback"),
        limit=(180.0, "seconds without a result until a run hangs"),
        out=("goodput", "name of the files, without .md, .png and .json"),
        draw_only=(False, "measure nothing, show what is in OUT.json"),
        result=(None, argparse.SUPPRESS),
        loopback=(False, argparse.SUPPRESS),
    )
    arguments = parser.parse_args()
    if not arguments.result:
        arguments.loopback = arguments.quick or arguments.slow_site or not may_make_links()
    if arguments.rates is None:
        arguments.rates = "none" if arguments.loopback else "10mbit,100mbit"
    if arguments.quick:
        arguments.steps, arguments.sweep, arguments.largest = 20, 4, 64
    check_rates(parser, arguments.rates, arguments.loopback)
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.result:
        run_site(arguments)
        return 0
    results = Path(f"{arguments.out}.json")
    results.parent.mkdir(parents=True, exist_ok=True)
    reason = ""
    if not arguments.draw_only:
        results.unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sites end, too
        given = [each for each in sys.argv[1:] if each != "--draw-only"]
        own = ["goodput.py", *given, "--result", str(results.resolve()), "--rates", arguments.rates]
        reason = run_sites([*own, *["--loopback"] * arguments.loopback], arguments.loopback, results, arguments.limit)
    rows = read(results)
    Path(f"{arguments.out}.md").write_text(table(rows) + "\n")
    print(table(rows))
    draw(rows, Path(f"{arguments.out}.png"))
    if reason:
        print(reason, file=sys.stderr)
    return int(bool(reason) or not rows)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
