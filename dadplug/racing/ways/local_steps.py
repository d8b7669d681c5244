"""Local steps: sites agree on parameters now and then."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...local_steps import LocalSGD
from .base import WAYS, Trainer, Way


class LocalTrainer(Trainer):
    """A model in training with a `LocalSGD`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, options: dict[str, Any]) -> None:
        super().__init__(model, optimizer)
        self.local = LocalSGD(model, optimizer, **options)

    def step(self) -> None:
        self.local.step()

    @property
    def bytes_sent(self) -> int:
        return self.local.traffic.bytes_in_steps

    def close(self) -> None:
        self.local.finish()
        self.local.detach()


class LocalSteps(Way):
    """Local steps.

    Args:
        label: name in tables and pictures.
        options: arguments of `LocalSGD`.
    """

    def __init__(self, label: str, **options: Any) -> None:
        self.label = label
        self.options = options

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Trainer:
        return LocalTrainer(model, optimizer, self.options)


WAYS.register("localsgd")(LocalSteps("local SGD, every 16 steps, bf16", every=16, wire="bf16"))
WAYS.register("diloco")(
    LocalSteps("DiLoCo, every 32 steps, bf16", every=32, outer_lr=0.7, outer_momentum=0.9, wire="bf16")
)
