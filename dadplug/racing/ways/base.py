"""Registry of the ways to train that are raced, and their common interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from ...registry import Registry


@dataclass(frozen=True)
class Place:
    """Place of a race.

    Attributes:
        processes: number of processes that can train together: processes of this machine, or sites.
        cores: cores of this machine that the processes may use.
        connected: whether the processes are sites that the user has connected, rather than processes of this machine.
    """

    processes: int
    cores: int
    connected: bool


class Trainer:
    """A model in training; without further methods in one process alone.

    Args:
        model: the model.
        optimizer: its optimizer.

    Attributes:
        model: module to call in training.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def step(self) -> None:
        """Follow a backward pass: exchange what the way exchanges, and change the parameters."""
        self.optimizer.step()

    def end_lap(self) -> None:
        """End a lap, after which processes wait for each other; the time of it counts."""

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this process has sent so far."""
        return 0

    def close(self) -> None:
        """Remove the way from the model, once all processes have made their last step."""


class Way(ABC):
    """A way to train. Register an instance in `WAYS` to have it raced.

    Attributes:
        label: name in tables and pictures.
    """

    label: str

    def applies(self, place: Place) -> bool:
        """Return whether there is anything to race at a place."""
        return place.processes > 1

    def processes(self, place: Place) -> int:
        """Return the number of processes that train."""
        return place.processes

    def threads(self, place: Place) -> int:
        """Return the number of torch's threads in each process."""
        return max(1, place.cores // (1 if place.connected else self.processes(place)))

    @abstractmethod
    def attach(self, model: nn.Module, optimizer: Optimizer) -> Trainer:
        """Return a trainer of a model. All processes call it.

        Raises:
            ValueError: if the way does not allow the model or its optimizer.
        """


WAYS: Registry[str, Way] = Registry("way to train")
