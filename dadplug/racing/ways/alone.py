"""One process alone, with one thread and with all."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from .base import WAYS, Place, Trainer, Way


class Alone(Way):
    """One process that exchanges nothing; of sites that are connected, each for itself.

    Args:
        all_threads: whether it uses all cores of its machine, rather than one.
    """

    def __init__(self, all_threads: bool) -> None:
        self.all_threads = all_threads
        self.label = "alone, all threads" if all_threads else "alone, 1 thread"

    def applies(self, place: Place) -> bool:
        # Sites train with all their cores; one process of a machine may do as well with one.
        return place.cores > 1 if self.all_threads else not place.connected or place.cores == 1

    def processes(self, place: Place) -> int:
        return place.processes if place.connected else 1

    def threads(self, place: Place) -> int:
        return place.cores if self.all_threads else 1

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Trainer:
        return Trainer(model, optimizer)


WAYS.register("alone")(Alone(all_threads=False))
WAYS.register("threads")(Alone(all_threads=True))
