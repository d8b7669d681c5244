"""Task of a race: model, data and batches, the same for all ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

MAX_HELD_OUT = 1000  # samples

Built: TypeAlias = tuple[nn.Module, Optimizer, Callable[..., Tensor]]
Build: TypeAlias = Callable[[], Built]


@dataclass(frozen=True)
class Task:
    """Model, data and batches of a race.

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
        """Check the arguments of a race, and hold samples out where no data set for evaluation is given.

        Raises:
            TypeError: if `build` cannot be called, or the samples cannot be indexed.
            ValueError: if a batch is larger than the data of a process.
        """
        if not callable(build):
            raise TypeError(f"build must be a function that returns (model, optimizer, criterion), got {build!r}")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
        for each in (dataset, evaluation):
            if each is not None and (isinstance(each, IterableDataset) or not hasattr(each, "__getitem__")):
                raise TypeError(
                    f"samples must be drawn by number in a race, which {type(each).__name__} does not allow"
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
            raise ValueError(f"a process has {share} samples to train on, fewer than a batch of {batch_size}")
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
