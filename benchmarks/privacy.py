"""What differential privacy costs: time of a step, and accuracy, beside Opacus.

    python benchmarks/privacy.py steps                                   MNISTNet, batch 64, and BERT-base, batch 8
    python benchmarks/privacy.py steps --models mnistnet --rounds 9
    python benchmarks/privacy.py steps --models mnistnet --clock cpu --own     on a machine with other programs
    torchrun --nproc-per-node 2 benchmarks/privacy.py accuracy --data-dir MNIST     digits at epsilon 1, 3 and 8
    torchrun --nproc-per-node 3 benchmarks/privacy.py accuracy --data-dir MNIST --ways opacus:one,dsgd:secure,dsgd
    torchrun --nproc-per-node 3 benchmarks/privacy.py sums               steps of MNISTNet with secure sums, batch 16
    python benchmarks/privacy.py noise                                   time of a normal number

`steps` trains one site without a network: the same model by `GradientReduction` without privacy and with it, by modes
dsgd and rankdad, and, without `--own`, by Opacus in modes hooks and ghost. Ways take turns, and the table has medians
of rounds; with `--clock cpu`, of the processor time of the thread, which other programs change less.
Layers that normalise over the batch are replaced by group normalisation, for all ways; Opacus needs BERT's embeddings
of positions and of types to be frozen, which they are for all ways.

`accuracy` trains a perceptron (784-512-10) at two sites with half of 8,000 digits each, Poisson batches, momentum, with
the same noise for all ways: dsgd and rank-dAD in int8 with error feedback, each site with its own noise, and Opacus
in one process with all rows and the noise of two sites. Bytes are the payload that a site sends in a step. At three
sites `dsgd:secure` adds the noise of one site in all (`secure_sum=True`), as `opacus:one` does.

`sums` times steps between processes: dsgd without privacy, with it, and with secure sums. Ways take turns.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from command import connect_site, parser_of
from drive import processor
from libraries import use_library
from torch import nn
from workloads import LARGE, WORKLOADS, loss

import dadplug
from dadplug.data import load_dataset
from dadplug.privacy.noise import add_noise

NORM = 1.0
Step = Callable[[], None]


def without_batch_norm(model: nn.Module) -> nn.Module:
    """Replace batch normalisation by group normalisation."""
    for name, child in model.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            setattr(model, name, nn.GroupNorm(1, child.num_features))
        else:
            without_batch_norm(child)
    return model


def build(name: str) -> nn.Module:
    """Make a model whose gradients of samples all ways know."""
    torch.manual_seed(0)
    if name == "mnistnet":
        return without_batch_norm(WORKLOADS[name].build())
    model = LARGE[name].build()
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("position_embeddings" not in key and "token_type" not in key)
    return model


def by_dadplug(model: nn.Module, batch: Any, **options: Any) -> Step:
    """Return a step by `GradientReduction`."""
    reduction = dadplug.GradientReduction(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(batch[0]), batch[1]).backward()
        reduction.synchronize()
        optimizer.step()

    return step


def by_opacus(model: nn.Module, batch: Any, mode: str) -> Step:
    """Return a step by Opacus's PrivacyEngine."""
    from opacus import PrivacyEngine

    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.01)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), len(batch[0]))
    settings = {"noise_multiplier": 1.0, "max_grad_norm": NORM, "poisson_sampling": False, "grad_sample_mode": mode}
    criterion = nn.CrossEntropyLoss()
    if mode == "ghost":
        settings["criterion"] = criterion
    made = PrivacyEngine().make_private(module=model, optimizer=optimizer, data_loader=data, **settings)
    private, optimizer = made[0], made[1]
    criterion = made[2] if mode == "ghost" else criterion

    def step() -> None:
        optimizer.zero_grad()
        criterion(private(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def ways(batch: Any, build_model: Callable[[], nn.Module], own: bool) -> dict[str, Step]:
    """Return a step of each way, with a model of its own."""
    private = dadplug.DifferentialPrivacy(1.0, NORM, 0.01, len(batch[0]))
    made = {
        "dsgd": by_dadplug(build_model(), batch, mode="dsgd"),
        "dsgd, privacy": by_dadplug(build_model(), batch, mode="dsgd", privacy=private),
        "rankdad, rank 8": by_dadplug(build_model(), batch, mode="rankdad", rank=8),
        "rankdad, rank 8, privacy": by_dadplug(build_model(), batch, mode="rankdad", rank=8, privacy=private),
    }
    for name, mode in () if own else (("Opacus, hooks", "hooks"), ("Opacus, ghost clipping", "ghost")):
        try:
            made[name] = by_opacus(build_model(), batch, mode)
            made[name]()
        except Exception as error:
            made.pop(name, None)
            print(f"{name} fails: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return made


def time_steps(arguments: argparse.Namespace) -> None:
    """Print the table of step times."""
    torch.set_num_threads(1)
    use_library("rankdad", "mkl")
    for name in arguments.models.split(","):
        workload = (WORKLOADS | LARGE)[name]
        size = arguments.batch_size or (64 if name == "mnistnet" else workload.batch_size)
        batch = workload.draw(size, torch.Generator().manual_seed(1))
        times: dict[str, list[float]] = {}
        steps = ways(batch, partial(build, name), arguments.own)
        clock = time.thread_time if arguments.clock == "cpu" else time.perf_counter
        for step in steps.values():
            step()
        for _ in range(arguments.rounds):
            for way, step in steps.items():
                start = clock()
                step()
                times.setdefault(way, []).append(clock() - start)
        print(f"\n| {name}, batch {size} | ms a step | of the mode without privacy |\n| --- | --- | --- |")
        for way, values in times.items():
            plain = statistics.median(times["rankdad, rank 8" if way.startswith("rankdad") else "dsgd"])
            print(f"| {way} | {1e3 * statistics.median(values):,.1f} | {statistics.median(values) / plain:.2f} |")
    print(f"\nOne process, one thread, MKL; {processor()}")


def time_sums(arguments: argparse.Namespace) -> None:
    """Print the table of step times with secure sums. Sites call it together."""
    connect_site()
    size = arguments.batch_size or 16
    batch = WORKLOADS["mnistnet"].draw(size, torch.Generator().manual_seed(dist.get_rank()))
    private = partial(dadplug.DifferentialPrivacy, 1.0, NORM, 0.01, size)
    steps = {
        "dsgd": by_dadplug(build("mnistnet"), batch, mode="dsgd"),
        "dsgd, privacy": by_dadplug(build("mnistnet"), batch, mode="dsgd", privacy=private()),
        "dsgd, secure sums": by_dadplug(build("mnistnet"), batch, mode="dsgd", privacy=private(secure_sum=True)),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(arguments.rounds + 1):  # the first round compiles
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            times[name] += [time.perf_counter() - start] if number else []
    if dist.get_rank() == 0:
        print(f"| mnistnet, batch {size}, {dist.get_world_size()} sites | ms a step |\n| --- | --- |")
        for name, values in times.items():
            print(f"| {name} | {1000 * statistics.median(values):.1f} |")
        print(f"\nOne thread a site, loopback; {processor()}")


def time_noise(arguments: argparse.Namespace) -> None:
    """Print the time of a normal number that is added to a sum, by dadplug and by torch."""
    torch.set_num_threads(1)
    sums, generator = torch.zeros(1 << 24), torch.Generator()
    adds = {
        "dadplug": lambda: add_noise([sums], 1.0),
        "torch": lambda: sums.add_(torch.empty_like(sums).normal_(generator=generator)),
    }
    times: dict[str, list[float]] = {name: [] for name in adds}
    for number in range(arguments.rounds + 1):  # the first round compiles
        for name, add in adds.items():
            start = time.perf_counter()
            add()
            times[name] += [time.perf_counter() - start] if number else []
    for name, values in times.items():
        print(f"{name}: {1e9 * statistics.median(values) / sums.numel():.2f} ns a number")
    print(f"One thread; {processor()}")


# Accuracy


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))


@functools.cache
def digits(folder: str) -> Any:
    return load_dataset("mnist", folder)


@functools.cache
def noise_multiplier(epsilon: float, sample_rate: float, steps: int) -> float:
    return dadplug.DifferentialPrivacy.for_epsilon(epsilon, 1e-5, sample_rate, steps).noise_multiplier


def train(arguments: argparse.Namespace, way: str, epsilon: float, rate: float, seed: int) -> tuple[float, int]:
    """Train by a way; return the accuracy, and the bytes that a site sends in a step. Sites call it together."""
    data = digits(arguments.data_dir)
    rank, sites = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(rank, len(data.train.labels), sites)
    rows = data.train.subset(mine)
    inputs = torch.stack([rows[number][0] for number in range(len(rows))])
    targets = torch.tensor([int(rows[number][1]) for number in range(len(rows))])
    sample_rate = arguments.batch / len(data.train.labels)
    expected = arguments.batch // sites
    noise = noise_multiplier(epsilon, sample_rate, arguments.steps)
    name, *numbers = way.split(":")
    privacy = dadplug.DifferentialPrivacy(noise, NORM, sample_rate, expected, secure_sum="secure" in numbers)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if name == "opacus":
        noises = 1 if "one" in numbers else sites
        return opacus_accuracy(inputs, targets, data, model, optimizer, privacy, noises, arguments, generator), 0
    mode: dict[str, Any] = {"mode": name}
    if name == "rankdad":
        mode |= {"rank": int(numbers[0]), "wire": "int8", "memory_decay": float(numbers[1]) if numbers[1:] else None}
    reduction = dadplug.GradientReduction(model, privacy=privacy, **mode)
    loader = dadplug.PoissonLoader(
        torch.utils.data.TensorDataset(inputs, targets), sample_rate, steps=arguments.steps, generator=generator
    )
    for batch, labels in loader:
        optimizer.zero_grad()
        if len(labels):
            nn.functional.cross_entropy(model(batch), labels).backward()
        reduction.synchronize()
        optimizer.step()
    sent = reduction.traffic.bytes_sent
    reduction.detach()
    return accuracy_of(model, data), sent


def opacus_accuracy(inputs: Any, targets: Any, data: Any, model: nn.Module, optimizer: Any, privacy: Any,
                    noises: int, arguments: argparse.Namespace, generator: torch.Generator) -> float:  # fmt: skip
    """Train by Opacus's classes for ghost clipping on all sites' rows in one process, with noise of `noises` sites."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (inputs, targets))
    accuracy = torch.zeros(1)
    if dist.get_rank() == 0:
        inputs, targets = (torch.cat(each) for each in zip(*gathered))
        wrapped = GradSampleModuleFastGradientClipping(model, use_ghost_clipping=True, max_grad_norm=NORM)
        stepper = DPOptimizerFastGradientClipping(
            optimizer,
            noise_multiplier=privacy.noise_multiplier * math.sqrt(noises),
            max_grad_norm=NORM,
            expected_batch_size=arguments.batch,
        )
        criterion = DPLossFastGradientClipping(wrapped, stepper, nn.CrossEntropyLoss(), "mean")
        rate = arguments.batch / len(targets)
        for _ in range(arguments.steps):
            chosen = torch.rand(len(targets), generator=generator) < rate
            stepper.zero_grad()
            criterion(wrapped(inputs[chosen]), targets[chosen]).backward()
            stepper.step()
        accuracy[0] = accuracy_of(model, data)
    dist.broadcast(accuracy, 0)
    return float(accuracy)


@torch.no_grad()
def accuracy_of(model: nn.Module, data: Any) -> float:
    model.eval()
    inputs = torch.stack([data.test[number][0] for number in range(len(data.test))])
    labels = torch.tensor([int(data.test[number][1]) for number in range(len(data.test))])
    return float((model(inputs).argmax(1) == labels).float().mean())


def measure_accuracy(arguments: argparse.Namespace) -> None:
    """Print the table of accuracies: of each way the best learning rate, mean over seeds."""
    connect_site()
    lines = ["| epsilon | way | accuracy, mean of seeds | bytes a site and step |", "| --- | --- | --- | --- |"]
    for epsilon in map(float, arguments.epsilons.split(",")):
        for way in arguments.ways.split(","):
            found = {}
            for rate in map(float, arguments.rates.split(",")):
                runs = [train(arguments, way, epsilon, rate, seed) for seed in range(arguments.seeds)]
                found[statistics.fmean(each for each, _ in runs)] = runs[0][1]
            best = max(found)
            lines.append(f"| {epsilon:g} | {way} | {best:.4f} | {found[best]:,} |")
            if dist.get_rank() == 0:
                print(lines[-1], flush=True)
    if dist.get_rank() == 0:
        print("\n" + "\n".join(lines))


def main() -> None:
    parser = parser_of(
        __doc__,
        models="mnistnet,bert",
        batch_size={"type": int},
        rounds=5,
        clock={"default": "wall", "choices": ("wall", "cpu"), "help": "for steps"},
        own=(False, "steps of dadplug alone, without Opacus"),
        data_dir=(None, "folder with MNIST"),
        epsilons="1,3,8",
        ways=(
            "opacus,dsgd,rankdad:16,rankdad:8,rankdad:16:0.9",
            "opacus[:one], dsgd[:secure], rankdad:RANK[:MEMORY_DECAY]",
        ),
        rates=("0.03125,0.0625,0.125,0.25", "learning rates; the best counts"),
        seeds=2,
        steps=200,
        batch=(256, "expected rows of all sites in a step"),
    )
    parser.add_argument("what", choices=("steps", "accuracy", "sums", "noise"))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    commands = {"steps": time_steps, "accuracy": measure_accuracy, "sums": time_sums, "noise": time_noise}
    commands[arguments.what](arguments)


if __name__ == "__main__":
    main()
