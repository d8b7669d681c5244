"""Hogwild! against one process with one and with two threads, and against a simple Hogwild, with peak memory.

    python benchmarks/hogwild.py --mnist FOLDER --criteo DIR/criteo-sample.npz
    python benchmarks/hogwild.py --quick              scikit-learn's digits and generated clicks, one short round

Two models: the network of PyTorch's MNIST example by SGD with momentum, and Wide & Deep on clicks by Adagrad, with
sparse gradients of its tables, which have a row for each id that occurs. Every way goes through the same number of
samples: --passes over them by one process, or half as many each by two. The ways run in turns. The table has the median
and the range of samples a second, from the start of the processes to their end, the median of the ratios to one process
with one thread in the same round, and the result on held-out samples. "simple" is a Hogwild in the manner of PyTorch's
example: shared parameters, each process with the whole data set, and an optimizer of its own.

Memory is the peak of the proportional set size (PSS) of all processes together, a launching one included, against DDP's
under a launcher. Exits with 1 where a bar does not hold.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dadplug.examples.zoo.clicks import split_by_time
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dadplug.data import load_dataset, read_criteo
from dadplug.hogwild import Hogwild
from dadplug.models import build_model
from dadplug.support.processes import launch_sites

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from command import parser_of
from hogwild import Network

PROCESSES = 2
OPTIMIZERS = {"adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


class Samples(Dataset):
    """Tensors of inputs and targets, read a batch at a time."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return tuple(tensor[indices] for tensor in self.tensors)

    def loader(self, batch_size: int, sampler: Any = None) -> DataLoader:
        return DataLoader(self, batch_size, shuffle=sampler is None, sampler=sampler, collate_fn=_same)


def _same(batch: Any) -> Any:
    return batch


class Task(NamedTuple):
    """A model with its data.

    Attributes:
        build: returns the model.
        optimizer: returns its optimizer, from the model.
        loss: returns the loss of a batch, from the model and the batch.
        score: returns accuracy or log loss, from the model and held-out samples.
        train: samples to train on.
        held_out: samples to test on.
    """

    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[nn.Module, Any], Tensor]
    score: Callable[[nn.Module, Samples], float]
    train: Samples
    held_out: Samples


def mnist(folder: Path | None, limit: int | None) -> Task:
    data = load_dataset("mnist" if folder else "digits", folder)
    parts = []
    for part in (data.train, data.test):
        images, labels = zip(*(part[index] for index in range(min(len(part), limit or len(part)))), strict=True)
        parts.append(Samples(torch.stack(images), torch.tensor(labels)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def accuracy(model: nn.Module, samples: Samples) -> float:
        images, labels = samples.tensors
        return float((model(images).argmax(1) == labels).float().mean())

    return Task(Network, lambda m: torch.optim.SGD(m.parameters(), 0.01, momentum=0.5), loss, accuracy, *parts)


def wide_deep(file: Path | None, limit: int | None, kind: Any, lr: float) -> Task:
    data = split_by_time(read_criteo(file, limit=limit)) if file else load_dataset("clicks")
    size = min(len(data.train), limit or len(data.train))
    known, ids = torch.unique(torch.cat([data.train.ids[:size], data.test.ids]), return_inverse=True)
    rows = [(data.train.dense[:size], data.train.labels[:size]), (data.test.dense, data.test.labels)]
    parts = [
        Samples(dense, numbers, labels.float())
        for (dense, labels), numbers in zip(rows, ids.split([size, len(data.test.ids)]), strict=True)
    ]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(*batch[:2]), batch[2])

    def log_loss(model: nn.Module, samples: Samples) -> float:
        return float(loss(model, samples.tensors))

    def build() -> nn.Module:
        return build_model("wide_deep", rows=len(known), sparse=True)

    return Task(build, lambda model: kind(model.parameters(), lr), loss, log_loss, *parts)


def train_pass(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for batch in batches:
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()


# Ways to train a model in place: function of the task, the model, the batch size and the passes


def train_alone(rank: int, task: Task, model: nn.Module, batch: int, passes: int, threads: int) -> None:
    torch.manual_seed(1 + rank)
    torch.set_num_threads(threads)
    optimizer = task.optimizer(model)
    for _ in range(passes):
        train_pass(task, model, optimizer, task.train.loader(batch))


def started(processes: int, threads: int) -> Callable[[Task, nn.Module, int, int], None]:
    """Return a way with processes that share the parameters alone, and divide the passes."""

    def way(task: Task, model: nn.Module, batch: int, passes: int) -> None:
        model.share_memory()
        context = mp.get_context("fork")
        rest = (task, model, batch, passes // processes, threads)
        workers = [context.Process(target=train_alone, args=(rank, *rest)) for rank in range(processes)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return way


def dealt(state: str) -> Callable[[Task, nn.Module, int, int], None]:
    def way(task: Task, model: nn.Module, batch: int, passes: int) -> None:
        optimizer = task.optimizer(model)
        Hogwild(model, optimizer, PROCESSES, state, threads=1, start="fork").run(train_dealt, task, batch, passes)

    return way


def train_dealt(hogwild: Hogwild, task: Task, batch: int, passes: int) -> None:
    batches = hogwild.deal(task.train.loader(batch))
    for _ in range(passes):
        train_pass(task, hogwild.model, hogwild.optimizer, batches)


ALONE, THREADS, SIMPLE = "1 process, 1 thread", "1 process, 2 threads", "simple Hogwild, 2 processes"
SHARED, OWN = "dadplug, 2 processes, shared state", "dadplug, 2 processes, own state"
WAYS = {ALONE: started(1, 1), THREADS: started(1, 2), SIMPLE: started(2, 1), SHARED: dealt("shared"), OWN: dealt("own")}


class Run(NamedTuple):
    """Samples a second, and accuracy or log loss."""

    rate: float
    score: float


def measure(task: Task, batch: int, passes: int, rounds: int) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {name: [] for name in WAYS}
    for number in range(rounds):
        for name, way in WAYS.items():
            torch.manual_seed(number)
            model = task.build()
            start = time.perf_counter()
            way(task, model, batch, passes)
            seconds = time.perf_counter() - start
            model.eval()
            with torch.no_grad():
                found[name].append(Run(passes * len(task.train) / seconds, task.score(model, task.held_out)))
    return found


def ratio(found: dict[str, list[Run]], name: str, other: str) -> float:
    return statistics.median(a.rate / b.rate for a, b in zip(found[name], found[other], strict=True))


def table(found: dict[str, list[Run]], score: str) -> str:
    lines = [f"{'way':36} {'samples/s':>10} {'range':>18} {'speed-up':>9} {score:>9}"]
    for name, runs in found.items():
        rates = [run.rate for run in runs]
        spread = f"{min(rates):.0f} to {max(rates):.0f}"
        mean = statistics.mean(run.score for run in runs)
        line = f"{name:36} {statistics.median(rates):10.0f} {spread:>18} {ratio(found, name, ALONE):9.2f} {mean:9.4f}"
        lines.append(line)
    return "\n".join(lines)


# Memory


def pss(process: int) -> float:
    """Return the proportional set size of a process and all that it has started, in MB."""
    total = 0.0
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        total = next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("Pss:"))
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (OSError, StopIteration):
        return total
    return total + sum(pss(int(child)) for child in children)


def peak_memory(how: str, arguments: list[str]) -> float:
    """Train in a program of its own; return the peak of its memory in MB."""
    program = subprocess.Popen([sys.executable, __file__, "--train", how, *arguments])
    peak = 0.0
    while program.poll() is None:
        peak = max(peak, pss(program.pid))
        time.sleep(0.02)
    if program.returncode:
        raise RuntimeError(f"the training by {how} has failed")
    return peak


def train_for_memory(how: str, task: Task, batch: int) -> None:
    model = task.build()
    if how == "hogwild":
        dealt("shared")(task, model, batch, 2)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    replica = nn.parallel.DistributedDataParallel(model)
    sampler: Any = DistributedSampler(task.train)
    optimizer = task.optimizer(replica)
    for _ in range(2):
        train_pass(task, replica, optimizer, task.train.loader(batch, sampler))
    dist.destroy_process_group()


# Command line


def parse() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        models=("mnist,wide_deep", "mnist, wide_deep, or both by a comma"),
        mnist={"type": Path, "help": "folder of MNIST's files; without it scikit-learn's digits"},
        criteo={"type": Path, "help": "Criteo's train.txt or a sample in .npz (default: generated clicks)"},
        optimizer={"default": "adagrad", "choices": tuple(OPTIMIZERS), "help": "of Wide & Deep"},
        lr=(0.003, "learning rate of Wide & Deep"),
        samples={"type": int, "help": "training samples at most"},
        batch_size=64,
        passes=(4, "passes over the samples, an even number"),
        rounds=5,
        no_memory=(False, "do not measure memory"),
        quick=(False, "one round with 2 passes over 1,000 samples"),
        train={"choices": ("hogwild", "ddp"), "help": argparse.SUPPRESS},
    )
    options = parser.parse_args()
    if options.quick:
        options.samples, options.passes, options.rounds = 1000, 2, 1
    return options


def bars(name: str, found: dict[str, list[Run]]) -> list[tuple[str, float, str, float]]:
    """Return what is to hold: text, value, relation, limit."""
    scores = {way: statistics.mean(run.score for run in runs) for way, runs in found.items()}
    if name == "mnist":
        points = 100 * (scores[ALONE] - scores[SHARED])
        return [
            ("times one process, one thread", ratio(found, SHARED, ALONE), ">=", 1.6),
            ("times one process, two threads", ratio(found, SHARED, THREADS), ">=", 1.2),
            ("times the simple Hogwild", ratio(found, SHARED, SIMPLE), ">=", 1.0),
            ("points of accuracy lost", points, "<=", 0.5),
        ]
    loss = 100 * (scores[SHARED] / scores[ALONE] - 1)
    return [
        ("times one process, one thread", ratio(found, SHARED, ALONE), ">=", 1.5),
        ("% of log loss more", loss, "<=", 0.5),
    ]


def main() -> int:
    options = parse()
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, whose choice torch warns to make
    torch.set_num_threads(1)  # threads of OpenMP that exist here would not survive a fork
    failed = 0
    for name in options.models.split(","):
        if options.train == "ddp" and "RANK" not in os.environ:
            return launch_sites([__file__, *sys.argv[1:]], PROCESSES)
        if name == "mnist":
            task = mnist(options.mnist, options.samples)
        else:
            task = wide_deep(options.criteo, options.samples, OPTIMIZERS[options.optimizer], options.lr)
        if options.train:
            train_for_memory(options.train, task, options.batch_size)
            continue
        found = measure(task, options.batch_size, options.passes, options.rounds)
        print(f"{name}, {len(task.train):,} samples, batches of {options.batch_size}, {options.passes} passes")
        print(table(found, "accuracy" if name == "mnist" else "log loss"), flush=True)
        wanted = bars(name, found)
        if not options.no_memory:
            given = [*sys.argv[1:], "--models", name]  # the last one counts
            peaks = {how: peak_memory(how, given) for how in ("hogwild", "ddp")}
            print(f"peak PSS: Hogwild {peaks['hogwild']:.0f} MB, DDP {peaks['ddp']:.0f} MB")
            wanted.append(("times DDP's peak memory", peaks["hogwild"] / peaks["ddp"], "<=", 0.7))
        for text, value, relation, limit in wanted:
            holds = value >= limit if relation == ">=" else value <= limit
            failed += not holds
            print(f"{'holds' if holds else 'FAILS':6} {value:6.2f} {text} ({relation} {limit})", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
