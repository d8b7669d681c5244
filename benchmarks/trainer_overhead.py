"""Time of a training step at two sites in a plain loop, by the drop-in for DDP and by trainers, with the same options.

    torchrun --nproc-per-node 2 benchmarks/trainer_overhead.py                      MNISTNet
    torchrun --nproc-per-node 2 benchmarks/trainer_overhead.py --model bert --steps 10
    torchrun --nproc-per-node 2 benchmarks/trainer_overhead.py --mode dad --ways plain,accelerate,trainer
    python benchmarks/trainer_overhead.py --ray --ways plain,drop-in                in workers of Ray Train

Each way trains a new model on the same rows, one way after the other, in several rounds. A step lasts from the end of
the step before to its own end, with the loader, forward, backward, the exchange and the optimizer's step. The overhead
of a way is its median step less that of the plain loop in the same round; the table has the medians of the rounds.

One thread a site, MKL in all rows. A further way is a function that is registered by `way`: it trains the model of a
`Task`, and calls its `tick` at the end of each step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from command import parser_of
from drive import processor
from libraries import use_library
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, TensorDataset
from workloads import LARGE, WORKLOADS, loss

import dadplug

MODELS = WORKLOADS | LARGE
WARM_UP = 5  # steps: kernels compile, and the plan is completed


@dataclass
class Task:
    """A training that a way has to do: one epoch over the data.

    Attributes:
        model: the model.
        data: inputs and targets of all sites.
        batch_size: rows of a site's batch.
        options: options of the reduction, with the mode.
        ticks: when each step has ended.
    """

    model: nn.Module
    data: TensorDataset
    batch_size: int
    options: dict[str, Any]
    ticks: list[float] = field(default_factory=list)

    def loader(self, sampler: Any = None) -> DataLoader:
        """Return a loader of the rows of all sites, or of those of a sampler."""
        return DataLoader(self.data, self.batch_size, sampler=sampler, generator=torch.Generator())

    def optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer of the model."""
        return torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def tick(self) -> None:
        """Record the end of a step."""
        self.ticks.append(time.perf_counter())


Way = Callable[[Task], None]
WAYS: dict[str, Way] = {}


def way(name: str) -> Callable[[Way], Way]:
    """Register a way to train.

    Args:
        name: its name in the table and on the command line.
    """

    def register(function: Way) -> Way:
        WAYS[name] = function
        return function

    return register


@way("plain")
def plain_loop(task: Task) -> None:
    """Train by `GradientReduction` in a loop."""
    reduction, optimizer = dadplug.GradientReduction(task.model, **task.options), task.optimizer()
    for inputs, targets in task.loader(Strided(task)):
        optimizer.zero_grad()
        loss(task.model(inputs), targets).backward()
        reduction.synchronize()
        optimizer.step()
        task.tick()
    reduction.detach()


@way("own-buffers")
def own_buffers(task: Task) -> None:
    """Train by `DistributedDataParallel`, whose sites keep buffers of their own as in the plain loop."""
    drop_in(task, broadcast_buffers=False)


@way("drop-in")
def drop_in(task: Task, **arguments: bool) -> None:
    """Train by `DistributedDataParallel` in a loop; buffers of rank 0 are sent before each forward pass."""
    model = dadplug.DistributedDataParallel(task.model, **task.options, **arguments)
    optimizer = task.optimizer()
    for inputs, targets in task.loader(Strided(task)):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
        task.tick()
    model.reduction.detach()


@way("accelerate-own-buffers")
def accelerator_with_own_buffers(task: Task) -> None:
    """Train by Accelerate, at sites that keep buffers of their own."""
    accelerator(task, broadcast_buffers=False)


@way("accelerate")
def accelerator(task: Task, **arguments: bool) -> None:
    """Train by Accelerate; buffers of rank 0 are sent before each forward pass."""
    from accelerate import DistributedDataParallelKwargs

    from dadplug.accelerate import Accelerator

    handlers = [DistributedDataParallelKwargs(**arguments)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, **task.options)
    model, optimizer, loader = accelerator.prepare(task.model, task.optimizer(), task.loader())
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(loss(model(inputs), targets))
            optimizer.step()
        task.tick()
    accelerator.free_memory()


class _WithLoss(nn.Module):
    """A model that returns its loss, as transformers' Trainer expects it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.model(inputs)
        return {"loss": loss(outputs, labels), "logits": outputs}


@way("trainer")
def trainer(task: Task) -> None:
    """Train by transformers' Trainer, at sites that keep buffers of their own."""
    import transformers

    from dadplug.transformers import attach

    class Tick(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            task.tick()

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(task.data)

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=task.batch_size,
            num_train_epochs=1,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            ddp_broadcast_buffers=False,
            dataloader_pin_memory=False,
        )
        training = InOrder(
            _WithLoss(task.model),
            settings,
            train_dataset=task.data,
            data_collator=_collate,
            optimizers=(task.optimizer(), None),
            callbacks=[Tick()],
        )
        attach(training, **task.options)
        training.train()
        training.reduction.detach()


def _collate(rows: list[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    inputs, labels = zip(*rows)
    return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}


class Strided(DistributedSampler):
    """The rows of this site: every n-th batch, as Accelerate gives them.

    Args:
        task: the task.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task.data, shuffle=False)
        self.batch_size = task.batch_size

    def __iter__(self) -> Any:
        for begin in range(self.rank * self.batch_size, len(self.dataset), self.num_replicas * self.batch_size):
            yield from range(begin, begin + self.batch_size)


def train(name: str, arguments: argparse.Namespace) -> Task:
    """Train a model by a way, with the same start values, rows and random numbers as by the others."""
    workload = MODELS[arguments.model]
    torch.manual_seed(0)
    model = workload.build()
    size = arguments.batch_size or workload.batch_size
    rows = size * dist.get_world_size() * (WARM_UP + arguments.steps)
    data = TensorDataset(*workload.draw(rows, torch.Generator().manual_seed(1)))
    task = Task(model, data, size, {"mode": arguments.mode, "timeout": 600.0})
    torch.manual_seed(2 + dist.get_rank())
    WAYS[name](task)
    return task


def measure(arguments: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Return for each way the median of its rounds' median steps, and of their differences to the plain loop's."""
    use_library(arguments.mode, "mkl")
    names = ["plain", *(name for name in arguments.ways.split(",") if name != "plain")]
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            ticks = train(name, arguments).ticks[WARM_UP - 1 :]
            found[name].append(statistics.median(after - before for before, after in itertools.pairwise(ticks)))
    differences = {name: [own - plain for own, plain in zip(found[name], found["plain"])] for name in names}
    return {name: (statistics.median(found[name]), statistics.median(differences[name])) for name in names}


def table(found: dict[str, tuple[float, float]]) -> str:
    """Return the table."""
    lines = ["| way | ms a step | overhead |", "| --- | --- | --- |"]
    for name, (seconds, more) in found.items():
        share = more / found["plain"][0]
        lines.append(f"| {name} | {1e3 * seconds:.2f} | {1e3 * more:+.2f} ms ({share:+.1%}) |")
    return "\n".join(lines)


def measure_in_ray(arguments: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Measure at two workers of Ray Train on this machine, which stand for the processes of torchrun."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def at_worker(_: dict[str, Any]) -> dict[str, tuple[float, float]]:
        torch.set_num_threads(1)
        return measure(arguments)

    path = {"PYTHONPATH": str(Path(__file__).resolve().parent)}
    settings = {"runtime_env": {"env_vars": path}, "object_store_memory": 80 << 20, "log_to_driver": False}
    ray.init(address="local", num_cpus=2, include_dashboard=False, **settings)
    with tempfile.TemporaryDirectory() as folder:
        run = RunConfig(storage_path=folder)
        trainer = TorchTrainer(at_worker, scaling_config=ScalingConfig(num_workers=2), run_config=run)
        return trainer.fit().return_value


def main() -> None:
    usual = [name for name in WAYS if name != "trainer"]  # transformers may be absent
    parser = parser_of(
        __doc__,
        ways=(",".join(usual), ", ".join(WAYS)),
        model={"choices": list(MODELS), "default": "mnistnet"},
        mode="rankdad",
        batch_size={"type": int, "help": "rows of a site; by default each model's own"},
        steps=(100, "steps of a way in a round"),
        rounds=5,
        ray=(False, "at two workers of Ray Train: compare its rows with torchrun's"),
    )
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.ways.split(",") if name not in WAYS]:
        parser.error(f"unknown way {unknown[0]!r}; valid ones are {', '.join(WAYS)}")
    torch.set_num_threads(1)
    if arguments.ray:
        found, sites = measure_in_ray(arguments), "2 workers of Ray Train"
    else:
        dadplug.connect()
        found, sites = measure(arguments), f"{dist.get_world_size()} sites"
    if arguments.ray or dist.get_rank() == 0:
        print(f"{arguments.model}, mode {arguments.mode}, {sites}; {processor()}\n")
        print(table(found))


if __name__ == "__main__":
    main()
