"""Parameter server: sites send gradients and do not wait for each other within a lap."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...parameter_server import ParameterServer
from .base import WAYS, Trainer, Way


class ServerTrainer(Trainer):
    """A model in training with a `ParameterServer`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, options: dict[str, Any]) -> None:
        super().__init__(model, optimizer)
        self.server = ParameterServer(model, optimizer, **options)

    def step(self) -> None:
        self.server.step()

    def end_lap(self) -> None:
        self.server.finish()

    @property
    def bytes_sent(self) -> int:
        return self.server.traffic.total_bytes_sent

    def close(self) -> None:
        self.server.detach()


class Asynchronous(Way):
    """Asynchronous steps by a parameter server.

    Args:
        label: name in tables and pictures.
        options: arguments of `ParameterServer`.
    """

    def __init__(self, label: str, **options: Any) -> None:
        self.label = label
        self.options = options

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Trainer:
        return ServerTrainer(model, optimizer, self.options)


WAYS.register("server")(Asynchronous("parameter server, rank 8, bf16", mode="rankdad", rank=8, wire="bf16"))
