"""One run of a race: a way trains for some seconds, and its held-out loss is recorded."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .task import Task, to_device_of
from .ways.base import Trainer, Way

WARM_UP = 3  # steps before the clock starts: kernels are compiled, plans are made
LAPS = 10


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
    """

    def __init__(self, seconds: float) -> None:
        self.limit = seconds
        self.seconds = 0.0
        self.steps = 0

    def next_lap(self) -> int:
        """Return the number of steps of the next lap, the same in all processes; 0 when the time is over."""
        count = torch.tensor([self._length()])
        if dist.is_initialized():
            dist.broadcast(count, 0)
        return int(count)

    def _length(self) -> int:
        if not self.steps:
            return WARM_UP  # shows how long a step takes
        step, left = self.seconds / self.steps, self.limit - self.seconds
        return 0 if left < step / 2 else max(1, round(min(left, self.limit / LAPS) / step))

    @contextmanager
    def timed(self, steps: int) -> Iterator[None]:
        """Count the time inside, and steps; a context manager."""
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self.steps += steps


def run_heat(way: Way, task: Task, seconds: float, seed: int, rank: int, world_size: int) -> list[Point]:
    """Train a fresh model for some seconds. All processes of the way call it.

    Args:
        way: the way.
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
    model, optimizer, criterion = task.build()
    trainer = way.attach(model, optimizer)
    batches = task.batches(rank, world_size, seed)
    _train(trainer, criterion, batches, WARM_UP)
    clock, sent = _Clock(seconds), trainer.bytes_sent
    points = [Point(0.0, 0.0, 0, task.evaluate(model, criterion))]
    while steps := clock.next_lap():
        with clock.timed(steps):
            _train(trainer, criterion, batches, steps)
        if rank == 0:
            megabytes = (trainer.bytes_sent - sent) / 1e6
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
