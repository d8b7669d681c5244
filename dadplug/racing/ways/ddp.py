"""PyTorch's DistributedDataParallel."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .base import WAYS, Trainer, Way


class DDPTrainer(Trainer):
    """A model in training by DistributedDataParallel, whose all-reduce goes round a ring."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(DistributedDataParallel(model), optimizer)
        sizes = (p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        self._bytes_a_step = 2 * (dist.get_world_size() - 1) * sum(sizes) // dist.get_world_size()
        self._steps = 0

    def step(self) -> None:
        super().step()
        self._steps += 1

    @property
    def bytes_sent(self) -> int:
        """Payload bytes of the ring all-reduces so far, by their formula: torch counts none."""
        return self._steps * self._bytes_a_step


class DDP(Way):
    """PyTorch's DistributedDataParallel."""

    label = "DDP"

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Trainer:
        return DDPTrainer(model, optimizer)


WAYS.register("ddp")(DDP())
