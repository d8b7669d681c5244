"""One trial of a comparison: a strategy trains a model for some seconds, and its held-out loss is recorded.

Strategies are one process alone, DDP, and dadplug's families of exchange.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from ...exchange.codec import register
from ...exchange.restrictions import METRICS, declared
from ...hogwild import Hogwild
from ...local_steps import LocalSGD
from ...parameter_server import ParameterServer
from ...reduction import GradientReduction
from ...support.registry import Registry
from ...support.signature import whole_number
from .link import Link

# Strategies

LEAST_STEPS = 20  # of a run whose loss is compared; local steps need three rounds


@dataclass
class Trainer:
    """A model in training.

    Attributes:
        model: module to call in training.
        optimizer: its optimizer.
        step: follows a backward pass: exchanges what the strategy exchanges, and changes the parameters.
        bytes_sent: returns the payload bytes that this process has sent so far.
        end_lap: ends a lap, after which processes wait for each other; the time of it counts.
        close: removes the strategy from the model, once all processes have made their last step.
    """

    model: nn.Module
    optimizer: Optimizer
    step: Callable[[], object]
    bytes_sent: Callable[[], int] = int
    end_lap: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None


def train_alone(model: nn.Module, optimizer: Optimizer) -> Trainer:
    """Train in one process alone."""
    return Trainer(model, optimizer, optimizer.step)


def train_by_ddp(model: nn.Module, optimizer: Optimizer) -> Trainer:
    """Train by DistributedDataParallel, whose all-reduce goes round a ring.

    Payload bytes are those of the ring all-reduces by their formula: torch counts none.
    """
    sizes = (p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    bytes_a_step = 2 * (dist.get_world_size() - 1) * sum(sizes) // dist.get_world_size()
    steps = 0

    def step() -> None:
        nonlocal steps
        optimizer.step()
        steps += 1

    return Trainer(DistributedDataParallel(model), optimizer, step, lambda: steps * bytes_a_step)


def train_by_reduction(model: nn.Module, optimizer: Optimizer, **options: Any) -> Trainer:
    """Train with a `GradientReduction`, which gets the options."""
    reduction = GradientReduction(model, **options)

    def step() -> None:
        reduction.synchronize()
        optimizer.step()

    close = partial(reduction.detach, discard=True)
    return Trainer(model, optimizer, step, lambda: reduction.traffic.bytes_in_steps, close=close)


def train_locally(model: nn.Module, optimizer: Optimizer, **options: Any) -> Trainer:
    """Train with a `LocalSGD`, which gets the options."""
    local = LocalSGD(model, optimizer, **options)

    def close() -> None:
        local.finish()
        local.detach()

    return Trainer(model, optimizer, local.step, lambda: local.traffic.bytes_in_steps, close=close)


def train_by_server(model: nn.Module, optimizer: Optimizer, **options: Any) -> Trainer:
    """Train with a `ParameterServer`, which gets the options."""
    server = ParameterServer(model, optimizer, **options)
    return Trainer(model, optimizer, server.step, lambda: server.traffic.total_bytes_sent, server.finish, server.detach)


def train_by_hogwild(model: nn.Module, optimizer: Optimizer) -> Trainer:
    """Train by a `Hogwild` of connected processes."""
    return Trainer(model, optimizer, optimizer.step, close=Hogwild(model, optimizer).finish)


@dataclass(frozen=True)
class Place:
    """Place of a comparison.

    Attributes:
        processes: number of processes that can train together: processes of this machine, or sites.
        cores: cores of this machine that the processes may use together; where they are apart, that each may use.
        connected: whether the processes are sites that the user has connected, rather than processes of this machine.
        link: the link between processes of this machine; None for loopback.
    """

    processes: int
    cores: int
    connected: bool
    link: Link | None = None

    @property
    def apart(self) -> bool:
        """Whether processes are sites, none of which may have the data of all."""
        return self.connected or self.link is not None


@dataclass(frozen=True)
class Strategy:
    """A way to train with several processes. Register one in `STRATEGIES` to have it compared.

    Attributes:
        label: name in tables and pictures.
        attach: function of a model and its optimizer that returns a trainer; all processes call it. It raises
            ValueError if the strategy does not allow the model or its optimizer.
        least: steps that a run needs, below which its loss is not compared.
        agrees: whether it exchanges gradients in every step, as the defaults of rankdad do.
    """

    label: str
    attach: Callable[[nn.Module, Optimizer], Trainer]
    least: int = LEAST_STEPS
    agrees: bool = False

    def applies(self, place: Place) -> bool:
        """Return whether there is anything to compare at a place."""
        return place.processes > 1

    def processes(self, place: Place) -> int:
        """Return the number of processes that train."""
        return place.processes

    def threads(self, place: Place) -> int:
        """Return the number of torch's threads in each process."""
        return max(1, place.cores // (1 if place.apart else self.processes(place)))


@dataclass(frozen=True)
class Alone(Strategy):
    """One process that exchanges nothing; of sites, each for itself.

    Attributes:
        all_threads: whether it uses all cores of its machine, rather than one.
    """

    all_threads: bool = False

    def applies(self, place: Place) -> bool:
        # Sites train with all their cores; one process of a machine may do as well with one.
        return place.cores > 1 if self.all_threads else not place.apart or place.cores == 1

    def processes(self, place: Place) -> int:
        return place.processes if place.apart else 1

    def threads(self, place: Place) -> int:
        return place.cores if self.all_threads else 1


class SharedMemory(Strategy):
    """A strategy for processes of one machine."""

    def applies(self, place: Place) -> bool:
        return super().applies(place) and not place.apart


DEFAULTS = "rankdad"  # the way that others are held against

STRATEGIES: Registry[str, Strategy] = Registry("way to train")
for _name, _strategy in {
    "alone": Alone("alone, 1 thread", train_alone),
    "threads": Alone("alone, all threads", train_alone, all_threads=True),
    "ddp": Strategy("DDP", train_by_ddp, agrees=True),
    "dad": Strategy("dad", partial(train_by_reduction, mode="dad"), agrees=True),
    DEFAULTS: Strategy("rankdad, all defaults", partial(train_by_reduction, mode="rankdad"), agrees=True),
    "rank4": Strategy(
        "rankdad, rank 4, int8", partial(train_by_reduction, mode="rankdad", rank=4, wire="int8"), agrees=True
    ),
    "rank32": Strategy(
        "rankdad, rank 32, int8", partial(train_by_reduction, mode="rankdad", rank=32, wire="int8"), agrees=True
    ),
    "hogwild": SharedMemory("Hogwild!", train_by_hogwild),
    "localsgd": Strategy("local SGD, every 16 steps, bf16", partial(train_locally, every=16, wire="bf16"), 3 * 16),
    "diloco": Strategy(
        "DiLoCo, every 32 steps, bf16",
        partial(train_locally, every=32, outer_lr=0.7, outer_momentum=0.9, wire="bf16"),
        3 * 32,
    ),
    "server": Strategy("parameter server, rank 8, bf16", partial(train_by_server, mode="rankdad", rank=8, wire="bf16")),
}.items():
    STRATEGIES.register(_name)(_strategy)

# A trial

MAX_HELD_OUT = 1000  # samples
WARM_UP = 3  # steps before the clock starts: kernels are compiled, plans are made
LAPS, LEAST_LAPS = 10, 3  # of a run; fewer where evaluations take long
EVALUATION = 0.25  # of the time of training: what evaluations may take before there are fewer

Built: TypeAlias = tuple[nn.Module, Optimizer, Callable[..., Tensor]]
Build: TypeAlias = Callable[[], Built]


def built(build: Build) -> Built:
    """Return what a user's function builds.

    Raises:
        TypeError: if it is not a model, an optimizer and a criterion.
        ValueError: if the optimizer is of another model.
    """
    found: Any = build() if callable(build) else build
    parts = tuple(found) if isinstance(found, Sequence) else (found,)
    kinds: tuple[Any, ...] = (nn.Module, Optimizer, Callable)
    if len(parts) != 3 or not all(isinstance(part, kind) for part, kind in zip(parts, kinds, strict=True)):
        given = ", ".join(type(part).__name__ for part in parts)
        raise TypeError(f"build() must return (model, optimizer, criterion), got {given}")
    own = {id(p) for p in parts[0].parameters()}
    if not any(id(p) in own for group in parts[1].param_groups for p in group["params"]):
        raise ValueError("the optimizer of build() has no parameter of its model: make it of model.parameters()")
    return cast(Built, parts)


@dataclass(frozen=True)
class Task:
    """Model, data and batches of a comparison, the same for all strategies.

    Attributes:
        build: returns a model with its optimizer and criterion.
        training: samples to train on, tuples of inputs and a target.
        held_out: samples whose loss is compared.
        batch_size: samples in a batch of one process.
        dealt: whether the samples are divided among the processes; otherwise each process has its own data set.
    """

    build: Build
    training: Dataset[Any]
    held_out: Dataset[Any]
    batch_size: int
    dealt: bool

    @classmethod
    def create(
        cls, build: Build, dataset: Any, evaluation: Any, batch_size: int, processes: int, *, dealt: bool
    ) -> Task:
        """Check the arguments of a comparison, and hold samples out where no data set for evaluation is given.

        Raises:
            TypeError: if `build` cannot be called, or the samples cannot be indexed, or are no inputs with a target.
            ValueError: if a batch is larger than the data of a process.
        """
        if not callable(build):
            raise TypeError(f"build must be a function that returns (model, optimizer, criterion), got {build!r}")
        whole_number(1)("batch_size", batch_size)
        for each in (dataset, evaluation):
            if each is not None and (isinstance(each, IterableDataset) or not hasattr(each, "__getitem__")):
                raise TypeError(
                    f"samples must be drawn by number in a comparison, which {type(each).__name__} does not allow"
                )
        count = len(cast(Sized, dataset))
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
        held = 0
        if evaluation is None:
            held = min(MAX_HELD_OUT, max(1, count // 10))
            evaluation = Subset(dataset, order[:held])
        training: Dataset[Any] = Subset(dataset, order[held:])
        share = (count - held) // (processes if dealt else 1)
        if share < batch_size:
            raise ValueError(f"a process has {max(0, share)} samples to train on, fewer than a batch of {batch_size}")
        batch = default_collate([dataset[0]])
        if (
            not isinstance(batch, (list, tuple))
            or not all(isinstance(each, Tensor) for each in batch)
            or len(batch) < 2
        ):
            raise TypeError(
                f"samples must be tuples of inputs and a target, tensors or numbers, got {type(dataset[0]).__name__}"
            )
        return cls(build, training, evaluation, batch_size, dealt)

    def batches(self, rank: int, world_size: int, seed: int) -> Iterator[list[Any]]:
        """Yield shuffled batches of one process, epoch after epoch, without end.

        Args:
            rank: number of the process.
            world_size: number of processes that train together.
            seed: seed of the division and the order.
        """
        generator = torch.Generator().manual_seed(seed)
        samples = self.training
        if self.dealt:
            order = torch.randperm(len(cast(Sized, samples)), generator=generator)
            samples = Subset(samples, order[rank::world_size].tolist())
        generator.manual_seed(seed * 1000 + rank)
        while True:
            yield from DataLoader(samples, self.batch_size, shuffle=True, drop_last=True, generator=generator)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, criterion: Callable[..., Tensor]) -> float:
        """Return the mean loss of the held-out samples. It changes no state of the model, nor that of generators."""
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        total, count = 0.0, 0
        with torch.random.fork_rng(devices=[]):
            for batch in DataLoader(self.held_out, 256):
                *inputs, target = to_device_of(model, batch)
                total += float(criterion(model(*inputs), target)) * len(target)
                count += len(target)
        for module, mode in modes:
            module.training = mode
        return total / count


def to_device_of(model: nn.Module, batch: list[Tensor]) -> list[Tensor]:
    """Return a batch on the device of a model's parameters."""
    device = next(model.parameters()).device
    return [each.to(device) for each in batch]


@register
@dataclass(frozen=True)
class Point:
    """State of a run after a lap.

    Attributes:
        seconds: time spent training, evaluation and warm-up left out.
        megabytes: payload that a process has sent.
        steps: number of steps.
        loss: mean loss of the held-out samples, of process 0's model.
    """

    seconds: float
    megabytes: float
    steps: int
    loss: float


class _Clock:
    """Clock of process 0, which decides for all processes how many steps each lap has.

    Args:
        seconds: duration of the run.

    Attributes:
        laps: laps into which the time is divided.
        seconds: duration so far.
        steps: steps so far.
    """

    def __init__(self, seconds: float) -> None:
        self.limit = seconds
        self.laps = LAPS
        self.seconds = 0.0
        self.steps = 0
        self._last = 0.0  # seconds of the last lap

    def begin(self, evaluation: float) -> None:
        """Begin to count, after warm-up; an evaluation has taken some seconds."""
        self.seconds, self.steps = 0.0, 0
        self.laps = max(LEAST_LAPS, min(LAPS, int(EVALUATION * self.limit / max(evaluation, 1e-9))))

    def next_warm_up(self) -> int:
        """Return 1 while a further step is to warm up, the same in all processes; the third only where steps are fast.

        Kernels are compiled in the first two, once for a machine.
        """
        return _of_process_0(int(self.steps < WARM_UP - (self._last > self.limit / 2)))

    def next_lap(self) -> int:
        """Return the number of steps of the next lap, the same in all processes; 0 when the time is over."""
        return _of_process_0(self._length())

    def _length(self) -> int:
        lap = self.limit / self.laps
        if not self.steps:  # the first lap shows how long a step takes
            return max(1, min(WARM_UP, round(lap / self._last)))
        step, left = self.seconds / self.steps, self.limit - self.seconds
        return 0 if left < step / 2 else max(1, round(min(left, lap) / step))

    @contextmanager
    def timed(self, steps: int) -> Iterator[None]:
        """Count the time inside, and steps; a context manager."""
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        yield
        self._last = time.perf_counter() - start
        self.seconds += self._last
        self.steps += steps


def _of_process_0(count: int) -> int:
    """Return the number of process 0 in all processes."""
    number = torch.tensor([count])
    if dist.is_initialized():
        with declared(METRICS):
            dist.broadcast(number, 0)
    return int(number)


def run_trial(strategy: Strategy, task: Task, seconds: float, seed: int, rank: int, world_size: int) -> list[Point]:
    """Train a fresh model for some seconds. All processes of the strategy call it.

    Args:
        strategy: the strategy.
        task: model and data.
        seconds: time to train.
        seed: seed of the first values, of the division of the data and of the batches.
        rank: number of this process.
        world_size: number of processes.

    Returns:
        The state of the run before the first lap and after each; in other processes than 0 the first only.

    Raises:
        FloatingPointError: if the held-out loss is not finite.
    """
    torch.manual_seed(seed)
    model, optimizer, criterion = built(task.build)
    trainer = strategy.attach(model, optimizer)
    batches = task.batches(rank, world_size, seed)
    clock = _Clock(seconds)
    while clock.next_warm_up():
        with clock.timed(1):
            _train(trainer, criterion, batches, 1)
    sent, start = trainer.bytes_sent(), time.perf_counter()
    points = [Point(0.0, 0.0, 0, task.evaluate(model, criterion))]
    clock.begin(time.perf_counter() - start)
    while steps := clock.next_lap():
        with clock.timed(steps):
            _train(trainer, criterion, batches, steps)
        if rank == 0:
            megabytes = (trainer.bytes_sent() - sent) / 1e6
            points.append(Point(clock.seconds, megabytes, clock.steps, task.evaluate(model, criterion)))
    trainer.close()
    if not all(math.isfinite(point.loss) for point in points):
        raise FloatingPointError("the held-out loss became NaN or Inf")
    return points


def _train(trainer: Trainer, criterion: Any, batches: Iterator[list[Any]], steps: int) -> None:
    for _ in range(steps):
        *inputs, target = to_device_of(trainer.model, next(batches))
        trainer.optimizer.zero_grad()
        criterion(trainer.model(*inputs), target).backward()
        trainer.step()
    trainer.end_lap()
