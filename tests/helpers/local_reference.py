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
from dadplug.local_steps.sparse_codec import SparseCode

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

    def vector(self) -> Tensor:
        return vector(self.model)

    def train(self, one: Batch) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, *one).backward()
        self.optimizer.step()

    def begin(self, parameters: Tensor) -> None:
        self.start = parameters.clone()
        vector_to_parameters(parameters.clone(), self.model.parameters())  # which then share its memory


SHAPES = {"0.weight": 120, "0.bias": 20, "2.weight": 240, "2.bias": 12, "4.weight": 36, "4.bias": 3}
FRAGMENTS = {1: [], 2: [["2.weight"]], 3: [["2.weight"], ["0.weight"]]}
"""All fragments of the model of `build` but the last one, which has all other parameters."""


class Simulation:
    """All sites in one process: a fragment is sent in each part of a round, and applied some steps later.

    Args:
        count: number of sites.
        every: steps of a round, or a function of the step at which it begins.
        fragments: number of fragments.
        delay: steps after which deltas are applied; None: at the next agreement.
        overlap: whether deltas are in transit during the next steps.
        outer_lr: outer learning rate; None: 1, and by the agreement of signs with a density.
        outer_momentum: outer momentum.
        density: density of sparse deltas, or a function of the agreement; None for dense ones.
        memory_decay: share of a memory that is left at the next agreement.
        weighting: "uniform" where all sites weigh the same.
    """

    def __init__(
        self,
        count: int,
        every: int | Callable[[int], int],
        fragments: int = 1,
        delay: int | None = None,
        overlap: bool = True,
        outer_lr: float | None = None,
        outer_momentum: float = 0.0,
        density: float | Callable[[int], float] | None = None,
        memory_decay: float = 0.95,
        weighting: str = "samples",
    ) -> None:
        self.sites = [Site(build(), adam) for _ in range(count)]
        self.agreed, self.momentum = self.sites[0].vector(), torch.zeros_like(self.sites[0].vector())
        places = torch.repeat_interleave(torch.arange(6), torch.tensor([*SHAPES.values()]))
        masks = [sum(places == [*SHAPES].index(name) for name in names).bool() for names in FRAGMENTS[fragments]]
        self.masks = [*masks, ~sum(masks, torch.zeros_like(places)).bool()]
        self.rows = torch.zeros(fragments, count, dtype=torch.float64)
        self.every = every if callable(every) else lambda _: every
        self.delay, self.overlap, self.uniform = delay, overlap, weighting == "uniform"
        self.lr, self.mu, self.density, self.decay = outer_lr, outer_momentum, density, memory_decay
        self.memories = [torch.zeros_like(self.agreed) for _ in range(count)]
        self.number, self.pending, self.last = 0, None, 0

    def synchronous_step(self, step: int, rows: Sequence[int]) -> None:
        """Take a step by the gradient on all sites' rows, with every site's optimizer."""
        parts = [batch(step, rank, own) for rank, own in enumerate(rows) if own]
        for site in self.sites:
            site.train(tuple(map(torch.cat, zip(*parts, strict=True))))
            site.start = site.vector()
        self.agreed, self.last = self.sites[0].vector(), step + 1

    def step(self, step: int, rows: Sequence[int]) -> None:
        for rank, site in enumerate(self.sites):
            if rows[rank]:
                site.train(batch(step, rank, rows[rank]))
        self.rows += torch.tensor(rows)
        place, count, every = self.number % len(self.masks), len(self.masks), self.every(self.last)
        if step + 1 == self.last + every * (place + 1) // count - every * place // count:
            self.agree(at_once=not self.overlap)
            self.last = step + 1
        elif self.delay is not None and step + 1 == self.last + self.delay:
            self.apply()

    def agree(self, at_once: bool = False) -> None:
        self.apply()
        place = self.number % len(self.masks)
        mask, weights = self.masks[place], self.rows[place].clone()
        weights = weights.sign() if self.uniform else weights
        deltas = [(site.vector() - site.start) * mask for site in self.sites]
        sent = [self.coded(rank, delta, mask) if weights[rank] else 0.0 for rank, delta in enumerate(deltas)]
        mean = sum(float(w / weights.sum()) * each for w, each in zip(weights, sent)) if weights.sum() else None
        if mean is not None:
            self.pending = (mask, mean, self.rate([w * each for w, each in zip(weights, sent)]))
        self.rows[place], self.number = 0, self.number + 1
        for site, delta in zip(self.sites, deltas):
            begun = torch.where(mask, self.agreed + (0.0 if mean is None else delta), site.start)
            progressed = torch.where(mask, begun, site.vector())
            site.begin(progressed)
            site.start = begun
        if at_once:
            self.apply()
            for site in self.sites:
                start = torch.where(mask, self.agreed, site.start)
                site.begin(torch.where(mask, self.agreed, site.vector()))
                site.start = start

    def rate(self, sent: list) -> float:
        if self.lr is not None or self.density is None:
            return self.lr or 1.0
        total, same, opposite = torch.zeros_like(self.agreed), 0, 0
        for each in sent:
            signs = total.sign() * torch.as_tensor(each).sign()
            same, opposite = same + int((signs > 0).sum()), opposite + int((signs < 0).sum())
            total += each
        return 1 + 1.5 * max(0, same - opposite) / (same + opposite + 16)

    def coded(self, rank: int, delta: Tensor, mask: Tensor) -> Tensor:
        """Return what a site sends of a delta."""
        if self.density is None:
            return delta
        sent, first = torch.zeros_like(delta), 0
        for size in SHAPES.values():
            own = slice(first, first + size)
            if mask[first]:
                code = SparseCode(size, self.density(self.number) if callable(self.density) else self.density)
                room = torch.zeros(code.nbytes, dtype=torch.uint8)
                code.encode(delta[own].clone(), self.memories[rank][own], self.decay, room)
                code.decode(room, sent[own], 1.0)
            first += size
        return sent

    def apply(self) -> None:
        if self.pending is None:
            return
        mask, mean, lr = self.pending
        self.pending = None
        self.momentum = torch.where(mask, self.mu * self.momentum + mean, self.momentum)
        update = mean + self.mu * self.momentum if self.mu else mean
        self.agreed = torch.where(mask, self.agreed + lr * update, self.agreed)
        for site in self.sites:
            start = site.start
            site.begin(torch.where(mask, self.agreed + (site.vector() - start), site.vector()))
            site.start = torch.where(mask, self.agreed, start)

    def finish(self, step: int) -> None:
        for _ in self.masks:
            self.agree(at_once=True)
        self.last = step
