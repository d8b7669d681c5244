"""Hogwild!: processes of one machine update one model in shared memory."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from ...hogwild import Hogwild
from .base import WAYS, Place, Trainer, Way


class HogwildTrainer(Trainer):
    """A model in training by a `Hogwild` of connected processes."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model, optimizer)
        self.hogwild = Hogwild(model, optimizer)

    def close(self) -> None:
        self.hogwild.finish()


class SharedMemory(Way):
    """Hogwild!, between processes of one machine."""

    label = "Hogwild!"

    def applies(self, place: Place) -> bool:
        return super().applies(place) and not place.connected

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Trainer:
        return HogwildTrainer(model, optimizer)


WAYS.register("hogwild")(SharedMemory())
