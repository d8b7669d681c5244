"""Synchronous gradients by dadplug's methods."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...reduction import GradientReduction
from .base import WAYS, Trainer, Way


class ReductionTrainer(Trainer):
    """A model in training with a `GradientReduction`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, options: dict[str, Any]) -> None:
        super().__init__(model, optimizer)
        self.reduction = GradientReduction(model, **options)

    def step(self) -> None:
        self.reduction.synchronize()
        super().step()

    @property
    def bytes_sent(self) -> int:
        return self.reduction.traffic.bytes_in_steps

    def close(self) -> None:
        self.reduction.detach(discard=True)


class Gradients(Way):
    """Synchronous gradients.

    Args:
        label: name in tables and pictures.
        options: arguments of `GradientReduction`.
    """

    def __init__(self, label: str, **options: Any) -> None:
        self.label = label
        self.options = options

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Trainer:
        return ReductionTrainer(model, optimizer, self.options)


WAYS.register("dad")(Gradients("dad", mode="dad"))
WAYS.register("rankdad")(Gradients("rankdad, rank 8, bf16", mode="rankdad", rank=8, wire="bf16"))
