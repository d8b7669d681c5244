"""Case, data, model and optimizer of tests of trainers where sites leave and return; the training in one process."""

import hashlib
import inspect
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dadplug.hub.site.rounds import RoundClient
from dadplug.step.model_sync.samples import batches_before, takes_part

BATCH = 8


@dataclass(frozen=True)
class SiteCase:
    """One process of a site.

    Attributes:
        kit: folder of its kit.
        folder: folder for its results and checkpoints.
        mode: the method.
        epochs: number of epochs.
        min_sites: option of the strategy or runner.
        leave: number of the step or round in which the process is killed, from 0; -1 for never.
        stop: file that ends the training once it exists; empty for none.
        bar: whether to show a progress bar.
        late: option of the strategy or runner.
        hold: file that makes the process wait at its next step, while it exists.
        site_timeout: option of the strategy or runner.
        every: steps between agreements of local steps; 0 for gradients that are synchronized.
        overlap: option of local steps.
        begins: `start_sites` and `start_after` of the connection; empty for all sites.
    """

    kit: str
    folder: str
    mode: str = "dad"
    epochs: int = 3
    min_sites: int | None = 1
    leave: int = -1
    stop: str = ""
    bar: bool = False
    late: str = "wait"
    hold: str = ""
    site_timeout: float = 10.0
    every: int = 0
    overlap: bool = False
    begins: Sequence[float] = ()

    @property
    def terms(self) -> dict[str, float]:
        """Arguments of the connection for the start."""
        return dict(zip(("start_sites", "start_after"), self.begins))

    def start(self) -> list[str]:
        """Return the arguments of the interpreter that run it."""
        return [inspect.getfile(type(self)), json.dumps(vars(self))]

    def options(self) -> dict[str, object]:
        """Return the options of the strategy or runner."""
        names = ("min_sites", "late", "site_timeout", *([] if self.every else ["mode"]))
        local = {"every": self.every, "overlap": self.overlap} if self.every else {}
        return local | {name: getattr(self, name) for name in names} | {"timeout": 200}


def die_in_round(case: SiteCase, in_round: Callable[[object], bool], ended: bool = False) -> None:
    """Kill this process in the case's round, before or after its end; a function of the answer tells which count."""
    original, count = RoundClient.end, iter(range(1 << 30))

    def die(*_: object) -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    def end(self, timeout, answer, *kind):
        if in_round(answer) and next(count) == case.leave:
            if not ended:
                die()
            self._wait_for_close = die
        return original(self, timeout, answer, *kind)

    RoundClient.end = end


def digest(model: nn.Module) -> str:
    values = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]


def data(slot: int, samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(slot)
    inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def train_data(slot: int) -> TensorDataset:
    return data(slot, 44 - 8 * slot)


def valid_data(slot: int) -> TensorDataset:
    return data(100 + slot, 20 + 7 * slot)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def optimisation(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)


def batches_of(slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of a site that does not shuffle."""
    inputs, targets = train_data(slot).tensors
    return [*zip(inputs.split(BATCH), targets.split(BATCH), strict=True)]


def batch_of(slot: int, step: int, steps: int) -> tuple[tuple[torch.Tensor, torch.Tensor], bool]:
    """Return a site's batch in a step of an epoch, the last one if it does not take part, and whether it does."""
    own = batches_of(slot)
    return own[batches_before(step + 1, len(own), steps) - 1], takes_part(step, len(own), steps)


def trained_in_one_process(
    steps: Mapping[int, tuple[int, list[int]]], length: int, every: int = 1
) -> dict[int, list[float]]:
    """Train in one process on the batches of the sites that are present.

    Args:
        steps: number of the batch and present sites, by step.
        length: number of batches in an epoch.
        every: number of steps after which the learning rate may change.

    Returns:
        The sum of each parameter after each step.
    """
    model = net()
    optimizer, scheduler = optimisation(model)
    sums = {}
    for step in sorted(steps):
        number, present = steps[step]
        found = [batch_of(slot, number, length) for slot in present]
        batches = [batch for batch, takes_part in found if takes_part]
        optimizer.zero_grad()
        losses = [nn.functional.cross_entropy(model(inputs), targets, reduction="sum") for inputs, targets in batches]
        if losses:
            (sum(losses) / sum(len(targets) for _, targets in batches)).backward()
        optimizer.step()
        if step % every == 0:
            scheduler.step()
        sums[step] = [float(each.detach().sum()) for each in model.parameters()]
    return sums


def scores(model: nn.Module, slots: list[int]) -> tuple[float, float]:
    """Return loss and accuracy over the validation data of some sites together."""
    inputs = torch.cat([valid_data(slot).tensors[0] for slot in slots])
    targets = torch.cat([valid_data(slot).tensors[1] for slot in slots])
    with torch.no_grad():
        outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs, targets)
    return float(loss), float((outputs.argmax(1) == targets).double().mean())
