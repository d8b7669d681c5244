"""Strategies that are compared, and their registry: one process alone, DDP, and dadplug's families of exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..hogwild import Hogwild
from ..local_steps import LocalSGD
from ..parameter_server import ParameterServer
from ..reduction import GradientReduction
from ..registry import Registry


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
        """Follow a backward pass: exchange what the strategy exchanges, and change the parameters."""
        self.optimizer.step()

    def end_lap(self) -> None:
        """End a lap, after which processes wait for each other; the time of it counts."""

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this process has sent so far."""
        return 0

    def close(self) -> None:
        """Remove the strategy from the model, once all processes have made their last step."""


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


class ReductionTrainer(Trainer):
    """A model in training with a `GradientReduction`, which gets the options."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
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


class LocalTrainer(Trainer):
    """A model in training with a `LocalSGD`, which gets the options."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
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


class ServerTrainer(Trainer):
    """A model in training with a `ParameterServer`, which gets the options."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
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


class HogwildTrainer(Trainer):
    """A model in training by a `Hogwild` of connected processes."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model, optimizer)
        self.hogwild = Hogwild(model, optimizer)

    def close(self) -> None:
        self.hogwild.finish()


@dataclass(frozen=True)
class Place:
    """Place of a comparison.

    Attributes:
        processes: number of processes that can train together: processes of this machine, or sites.
        cores: cores of this machine that the processes may use.
        connected: whether the processes are sites that the user has connected, rather than processes of this machine.
    """

    processes: int
    cores: int
    connected: bool


@dataclass(frozen=True)
class Strategy:
    """A way to train with several processes. Register one in `STRATEGIES` to have it compared.

    Attributes:
        label: name in tables and pictures.
        attach: function of a model and its optimizer that returns a trainer; all processes call it. It raises
            ValueError if the strategy does not allow the model or its optimizer.
    """

    label: str
    attach: Callable[[nn.Module, Optimizer], Trainer]

    def applies(self, place: Place) -> bool:
        """Return whether there is anything to compare at a place."""
        return place.processes > 1

    def processes(self, place: Place) -> int:
        """Return the number of processes that train."""
        return place.processes

    def threads(self, place: Place) -> int:
        """Return the number of torch's threads in each process."""
        return max(1, place.cores // (1 if place.connected else self.processes(place)))


@dataclass(frozen=True)
class Alone(Strategy):
    """One process that exchanges nothing; of sites that are connected, each for itself.

    Attributes:
        all_threads: whether it uses all cores of its machine, rather than one.
    """

    all_threads: bool = False

    def applies(self, place: Place) -> bool:
        # Sites train with all their cores; one process of a machine may do as well with one.
        return place.cores > 1 if self.all_threads else not place.connected or place.cores == 1

    def processes(self, place: Place) -> int:
        return place.processes if place.connected else 1

    def threads(self, place: Place) -> int:
        return place.cores if self.all_threads else 1


class SharedMemory(Strategy):
    """A strategy for processes of one machine."""

    def applies(self, place: Place) -> bool:
        return super().applies(place) and not place.connected


STRATEGIES: Registry[str, Strategy] = Registry("way to train")
STRATEGIES.register("alone")(Alone("alone, 1 thread", Trainer))
STRATEGIES.register("threads")(Alone("alone, all threads", Trainer, all_threads=True))
STRATEGIES.register("ddp")(Strategy("DDP", DDPTrainer))
STRATEGIES.register("dad")(Strategy("dad", partial(ReductionTrainer, mode="dad")))
STRATEGIES.register("rankdad")(
    Strategy("rankdad, rank 8, bf16", partial(ReductionTrainer, mode="rankdad", rank=8, wire="bf16"))
)
STRATEGIES.register("hogwild")(SharedMemory("Hogwild!", HogwildTrainer))
STRATEGIES.register("localsgd")(
    Strategy("local SGD, every 16 steps, bf16", partial(LocalTrainer, every=16, wire="bf16"))
)
STRATEGIES.register("diloco")(
    Strategy(
        "DiLoCo, every 32 steps, bf16",
        partial(LocalTrainer, every=32, outer_lr=0.7, outer_momentum=0.9, wire="bf16"),
    )
)
STRATEGIES.register("server")(
    Strategy("parameter server, rank 8, bf16", partial(ServerTrainer, mode="rankdad", rank=8, wire="bf16"))
)
