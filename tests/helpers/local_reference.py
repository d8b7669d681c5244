"""Local steps of all sites in one process: what `dadplug.LocalSGD` has to do, by hand, in double precision."""

import copy
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dadplug import LocalSGD

Batch = tuple[Tensor, Tensor]
ROWS = (8, 5, 6)
"""Rows of a batch of each site."""


def build(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 3)).to(dtype)


def batch(step: int, site: int, rows: int = 8, dtype: torch.dtype = torch.float64) -> Batch:
    """A site's batch of a step; sites have other targets for the same inputs."""
    generator = torch.Generator().manual_seed(1000 * step + site)
    inputs = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.stack([inputs.sum(1), inputs[:, 0] * (1 + site), inputs[:, 1]], 1).to(dtype)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def vector(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach().clone()


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def train(local: Any, steps: Iterable[int], site: int, rows: int = 8) -> None:
    """Train a site by local steps on its batches."""
    dtype = next(local.model.parameters()).dtype
    for step in steps:
        local.optimizer.zero_grad()
        loss_of(local.model, *batch(step, site, rows, dtype)).backward()
        local.step()


def local_steps(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> LocalSGD:
    """Build local steps of a model and Adam."""
    model = build(seed, dtype)
    return LocalSGD(model, adam(model.parameters()), **{"weighting": "samples"} | options)


def ends_equal(local: LocalSGD) -> None:
    """Finish local steps, check that all sites have equal parameters, and remove the hooks."""
    local.finish()
    assert local.first_difference() is None
    local.detach()


def run_some(local: LocalSGD, scheduler, steps, site: int) -> None:
    for step in steps:
        train(local, [step], site, 8 - 3 * site)
        scheduler.step()


def resumes(options: dict, stop: int) -> None:
    """Stop after some steps, and check that a new run from the checkpoint ends with the bits of one without a stop."""
    site = dist.get_rank()

    def make():
        model = build(site, torch.float32)
        model.insert(1, nn.BatchNorm1d(20))
        optimizer = adam([{"params": model[:2].parameters(), "lr": 0.02}, {"params": model[2:].parameters()}])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return model, optimizer, scheduler, LocalSGD(model, optimizer, every=4, **{"weighting": "samples"} | options)

    model, _, scheduler, straight = make()
    run_some(straight, scheduler, range(14), site)
    straight.finish()
    straight.detach()
    first = make()
    run_some(first[3], first[2], range(stop), site)
    buffer = io.BytesIO()
    torch.save([each.state_dict() for each in first], buffer)
    buffer.seek(0)
    first[3].finish()
    first[3].detach()
    again = make()
    for each, state in zip(again, torch.load(buffer, weights_only=True)):
        each.load_state_dict(state)
    run_some(again[3], again[2], range(stop, 14), site)
    again[3].finish()
    assert again[3].steps == straight.steps == 14
    for name, value in model.state_dict().items():
        assert torch.equal(value, again[0].state_dict()[name]), (options, stop, name)
    assert again[3].first_difference() is None
    again[3].detach()


class Site:
    """One site of the reference: a model, an optimizer, and what it has done in the present round."""

    def __init__(self, model: nn.Module, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = make_optimizer(self.model.parameters())
        self.start = self.vector()
        self.rows = 0

    def vector(self) -> Tensor:
        return vector(self.model)

    def train(self, one: Batch) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, *one).backward()
        self.optimizer.step()
        self.rows += len(one[0])

    def begin(self, parameters: Tensor) -> None:
        self.start = parameters.clone()
        vector_to_parameters(parameters.clone(), self.model.parameters())  # which then share its memory


class Reference:
    """Local SGD and DiLoCo of all sites.

    Args:
        model: the first model.
        make_optimizer: makes a site's optimizer of parameters.
        count: number of sites.
        lr: outer learning rate.
        mu: outer momentum.
        overlap: whether deltas are a round late.
        uniform: whether all sites weigh the same.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        count: int = 2,
        lr: float = 1.0,
        mu: float = 0.0,
        overlap: bool = False,
        uniform: bool = False,
    ) -> None:
        self.sites = [Site(model, make_optimizer) for _ in range(count)]
        self.agreed = self.sites[0].vector()
        self.momentum = torch.zeros_like(self.agreed)
        self.lr, self.mu, self.overlap, self.uniform = lr, mu, overlap, uniform
        self._late: Tensor | None = None

    def synchronous_step(self, batches: Sequence[Batch | None]) -> None:
        """Take a step by the gradient on all sites' rows, with every site's optimizer."""
        present = [one for one in batches if one is not None]
        inputs, targets = torch.cat([one[0] for one in present]), torch.cat([one[1] for one in present])
        for site in self.sites:
            site.train((inputs, targets))
            site.rows = 0
            site.start = site.vector()
        self.agreed = self.sites[0].vector()

    def round(self, batches: Sequence[Sequence[Batch]], last: bool = False) -> None:
        """Let every site train on its batches, and agree; in the last round nothing stays in transit."""
        for site, own in zip(self.sites, batches, strict=True):
            for one in own:
                site.train(one)
        if self._late is not None:
            self._move(self._late)
            self._late = None
        weights = [float(site.rows > 0 if self.uniform else site.rows) for site in self.sites]
        deltas = [site.vector() - site.start for site in self.sites]
        mean = None
        if any(weights):
            mean = sum(weight * delta for weight, delta in zip(weights, deltas, strict=True)) / sum(weights)
        if self.overlap and not last:
            self._late = mean
        elif mean is not None:
            self._move(mean)
        for site, delta in zip(self.sites, deltas, strict=True):
            site.begin(self.agreed if self._late is None else self.agreed + delta)
            site.rows = 0

    def _move(self, mean: Tensor) -> None:
        self.momentum = self.mu * self.momentum + mean
        self.agreed = self.agreed + self.lr * (mean + self.mu * self.momentum if self.mu else mean)
