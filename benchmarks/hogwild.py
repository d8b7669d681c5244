"""Hogwild! against one process with one and with two threads, and against a simple Hogwild, on MNIST's network.

    python benchmarks/hogwild.py --data-dir FOLDER     MNIST's files; without it scikit-learn's digits

Every way trains on the same number of samples: two passes over them by one process, or one pass each by two. The ways
run in turns, several times; the table has the median and the range of the samples in a second, from the start of the
processes to their end, and the accuracy on held-out samples. "simple" is a Hogwild in the manner of PyTorch's example:
shared parameters, each process with the whole data set and a momentum of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Subset

from dadplug.data import load_dataset
from dadplug.hogwild import Hogwild

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from hogwild import Network

PASSES, PROCESSES = 2, 2


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.5)


def train_pass(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def train_alone(model: nn.Module, loader: DataLoader, threads: int, passes: int) -> None:
    torch.set_num_threads(threads)
    optimizer = optimizer_of(model)
    for _ in range(passes):
        train_pass(model, optimizer, loader)


def alone(threads: int) -> Callable[[nn.Module, DataLoader], None]:
    """Return a way that trains in one process, started as the others are."""

    def train(model: nn.Module, loader: DataLoader) -> None:
        start_processes(model, loader, 1, threads, PASSES)

    return train


def simple(model: nn.Module, loader: DataLoader) -> None:
    start_processes(model, loader, PROCESSES, 1, PASSES // PROCESSES)


def start_processes(model: nn.Module, loader: DataLoader, processes: int, threads: int, passes: int) -> None:
    model.share_memory()
    context = mp.get_context("fork")
    started = [context.Process(target=seeded, args=(rank, model, loader, threads, passes)) for rank in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join()


def seeded(rank: int, *arguments: Any) -> None:
    torch.manual_seed(1 + rank)
    train_alone(*arguments)


def dealt(state: str) -> Callable[[nn.Module, DataLoader], None]:
    def train(model: nn.Module, loader: DataLoader) -> None:
        Hogwild(model, optimizer_of(model), PROCESSES, state, threads=1, start="fork").run(train_dealt, loader)

    return train


def train_dealt(hogwild: Hogwild, loader: DataLoader) -> None:
    batches = hogwild.deal(loader)
    for _ in range(PASSES):
        train_pass(hogwild.model, hogwild.optimizer, batches)


WAYS = {
    "1 process, 1 thread": alone(1),
    "1 process, 2 threads": alone(2),
    "simple Hogwild, 2 processes": simple,
    "dadplug, 2 processes, shared state": dealt("shared"),
    "dadplug, 2 processes, own state": dealt("own"),
}


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    correct = [(model(images).argmax(1) == labels).float() for images, labels in loader]
    return float(torch.cat(correct).mean())


def measure(data: Any, samples: int, batch: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Return samples per second and accuracy of each way and repetition."""
    size = min(samples, len(data.train))
    train, test = Subset(data.train, range(size)), DataLoader(data.test, batch_size=256)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for repeat in range(repeats):
        for name, way in WAYS.items():
            torch.manual_seed(repeat)
            model = Network()
            start = time.perf_counter()
            way(model, DataLoader(train, batch_size=batch, shuffle=True))
            seconds = time.perf_counter() - start
            found[name].append((PASSES * size / seconds, accuracy(model, test)))
    return found


def table(found: dict[str, list[tuple[float, float]]]) -> str:
    first = statistics.median(rate for rate, _ in next(iter(found.values())))
    lines = [f"{'way':36} {'samples/s':>10} {'range':>15} {'speed-up':>9} {'accuracy':>9}"]
    for name, runs in found.items():
        rates = [rate for rate, _ in runs]
        median, mean = statistics.median(rates), statistics.mean(value for _, value in runs)
        spread = f"{min(rates):.0f} to {max(rates):.0f}"
        lines.append(f"{name:36} {median:10.0f} {spread:>15} {median / first:9.2f} {mean:9.2%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder of MNIST's files; without it scikit-learn's digits")
    parser.add_argument("--samples", type=int, default=16000, help="training samples of a pass at most")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads of OpenMP that exist here would not survive a fork
    data = load_dataset("mnist" if options.data_dir else "digits", options.data_dir or Path("."))
    print(table(measure(data, options.samples, options.batch_size, options.repeats)))


if __name__ == "__main__":
    main()
