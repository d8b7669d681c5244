"""Material of a loop: models, rows and reductions, and a record of every gradient that was agreed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dadplug
from dadplug.errors import NonFiniteError

from .reference import Agreement, Gradients

WIDTH, CLASSES = 6, 4
STEPS = 4


@dataclass
class Record:
    """Result of one `agree`.

    Attributes:
        gradients: the agreed gradients, by name.
        means: the exact mean of the sites' gradients, by name; empty in a run with `GradientReduction`.
        paths: the plan's paths, by name; empty in a run by hand.
    """

    gradients: Gradients
    means: Gradients = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)


class ByHand:
    """A stand-in for `GradientReduction`: no hooks; gathers the sites' gradients and averages them by hand.

    Args:
        model: the model.
        options: the options of the reduction that it stands for.
        site: the site.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any], site: Site) -> None:
        self.model = model
        self.agreement = Agreement(options, site.world_size)
        self._site = site
        self._first_names: dict[nn.Parameter, str] = {}  # a parameter that gets another name keeps its memories

    def agree(self, rows: int, scale: float = 1.0) -> Gradients:
        """Write the agreed gradients; return the exact means."""
        now = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        trained = {self._first_names.setdefault(p, name): p for name, p in now.items()}
        sites, counts = gather(trained, rows)
        means = Agreement({"mode": "dsgd"}, len(counts)).agree(sites, counts, {}) if any(counts) else {}
        if any(gradient is not None and not gradient.isfinite().all() for gradient in means.values()):
            if self.agreement.options.check_finite:
                raise NonFiniteError("by hand")
            agreed = means
        elif not any(counts):
            return {}
        else:
            unscaled = [{name: None if g is None else g / scale for name, g in each.items()} for each in sites]
            planned = self._site.next_paths()
            paths = {first: planned.get(name, "") for name, first in zip(now, trained, strict=True)}
            agreed = self.agreement.agree(unscaled, counts, paths)
            agreed = {name: None if g is None else g * scale for name, g in agreed.items()}
        for name, parameter in trained.items():
            gradient = agreed[name]
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        return {name: means[self._first_names[p]] for name, p in now.items()}

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def samples(self, count: int) -> AbstractContextManager[None]:
        return nullcontext()

    def loss_scale(self, scale: float) -> AbstractContextManager[None]:
        return nullcontext()

    def detach(self) -> None:
        pass


def gather(trained: dict[str, nn.Parameter], rows: int) -> tuple[list[Gradients], list[int]]:
    """Gather all sites' gradients and rows."""
    dense = {name: p.grad.to_dense() if p.grad is not None else None for name, p in trained.items()}
    present = torch.tensor([rows, *(gradient is not None for gradient in dense.values())], dtype=torch.float64)
    numbers = [
        torch.zeros(p.numel()) if dense[name] is None else dense[name].reshape(-1) for name, p in trained.items()
    ]
    own = torch.cat([present, *(each.to(torch.float64) for each in numbers)])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    sites: list[Gradients] = []
    for theirs in everyone:
        here = theirs[1 : len(present)]
        parts = theirs[len(present) :].split([p.numel() for p in trained.values()])
        zipped = zip(trained.items(), here, parts, strict=True)
        sites.append({name: part.view(p.shape) if bool(flag) else None for (name, p), flag, part in zipped})
    return sites, [int(theirs[0]) for theirs in everyone]


class Site:
    """Argument of a loop: its place among the sites, and the same calls with `GradientReduction` and by hand.

    Args:
        options: options of the reductions.
        paths: by call of `agree`, the plan's paths that a run with `GradientReduction` has recorded; None for such
            a run.
        forced: records whose gradients replace the agreed ones once they are recorded, so that both runs go on from
            the same parameters.
    """

    def __init__(
        self,
        options: dict[str, Any],
        paths: list[dict[str, str]] | None = None,
        forced: list[Record] | None = None,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.options = options
        self.records: list[Record] = []
        self.reductions: list[Any] = []
        self.differing: list[str | None] = []
        self._paths, self._forced = paths, forced
        self._models: list[nn.Module] = []
        torch.default_generator.manual_seed(7 + self.rank)  # much cheaper than that of all devices

    @property
    def by_hand(self) -> bool:
        """Whether gradients are averaged by hand."""
        return self._paths is not None

    @property
    def mode(self) -> str:
        """The mode."""
        return self.options["mode"]

    def model(self, build: Callable[[], nn.Module] | None = None) -> Any:
        """Build a model, the same at all sites; `Net` by default. Its parameters are compared at the end."""
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(5 + len(self._models))
            self._models.append(net() if build is None else build())
        return self._models[-1]

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Build the optimizer of a model."""
        return sgd(model, lr)

    def reduce(self, model: nn.Module, **options: Any) -> Any:
        """Build the reduction of a model."""
        options = self.options | options
        options = {"weighting": "samples"} | options  # batches are unequal, and compared with one process
        reduction = ByHand(model, options, self) if self.by_hand else dadplug.GradientReduction(model, **options)
        self.reductions.append(reduction)
        return reduction

    def rows(self, step: int) -> int:
        """This site's rows in a step: fewer at site 0, never the same number at both."""
        return (3 + step % 3, 9 - step % 2)[self.rank]

    def inputs(self, step: int, rows: int | None = None) -> Tensor:
        """This site's inputs of a step."""
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        return torch.randn(self.rows(step) if rows is None else rows, WIDTH, generator=generator)

    def batch(self, step: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """This site's inputs and targets of a step."""
        generator = torch.Generator().manual_seed(100 * step + self.rank + 50)
        inputs = self.inputs(step, rows)
        return inputs, torch.randint(0, CLASSES, (len(inputs),), generator=generator)

    def agree(self, reduction: Any, rows: int, scale: float = 1.0) -> None:
        """Call ``reduction.synchronize()``, and record what it leaves.

        Args:
            reduction: the reduction.
            rows: rows that this site's gradients stand for.
            scale: what the loss has been multiplied by; known to the run by hand alone.
        """
        if self.by_hand:
            self.record(reduction, reduction.agree(rows, scale))
        else:
            with reduction.samples(rows):  # for programs whose samples the rule does not count
                reduction.synchronize()
            self.record(reduction, {})

    def idle(self, reduction: Any) -> None:
        """Call ``reduction.idle()``, and record what it leaves."""
        if self.by_hand:
            self.record(reduction, reduction.agree(0))
        else:
            reduction.idle()
            self.record(reduction, {})

    def next_paths(self) -> dict[str, str]:
        """The plan's paths at this call of `agree`."""
        assert self._paths is not None
        return self._paths[len(self.records)] if len(self.records) < len(self._paths) else {}

    def record(self, reduction: Any, means: Gradients) -> None:
        """Record what a synchronisation has left, with the exact means in a run by hand."""
        named = dict(reduction.model.named_parameters())
        found = {name: None if p.grad is None else p.grad.detach().to_dense().clone() for name, p in named.items()}
        paths = {} if self.by_hand else {row.parameter: str(row.path) for row in reduction.plan}
        self.records.append(Record(found, means, paths))
        if self._forced is not None and len(self.records) <= len(self._forced):
            for name, gradient in self._forced[len(self.records) - 1].gradients.items():
                named[name].grad = None if gradient is None else gradient.clone()

    def finals(self) -> list[Tensor]:
        """All models' parameters."""
        return [p.detach().clone() for model in self._models for p in model.parameters()]

    def close(self) -> None:
        """Take the reductions off their models."""
        for reduction in self.reductions:
            reduction.model.zero_grad()  # a backward pass whose gradients nobody asked for may be on its way
            reduction.detach()


class Training:
    """A model of a site with its reduction and its optimizer, and the parts of a training loop.

    Args:
        site: the site.
        model: the model; that of `Site.model` by default.
        lr: the learning rate of the optimizer.
        options: further options of the reduction.
    """

    def __init__(self, site: Site, model: nn.Module | None = None, lr: float = 0.2, **options: Any) -> None:
        self.site = site
        self.model: Any = site.model() if model is None else model
        self.optimizer: torch.optim.Optimizer = site.optimizer(self.model, lr)
        self.reduction = site.reduce(self.model, **options)

    def steps(self, count: int = STEPS) -> Iterator[int]:
        """Clear the gradients before each step, yield its number, and apply the gradients after it."""
        for step in range(count):
            self.optimizer.zero_grad()
            yield step
            self.optimizer.step()

    def loss(self, step: int, rows: int | None = None) -> Tensor:
        """The loss of a batch."""
        return loss(self.model, self.site.batch(step, rows))

    def agree(self, rows: int, scale: float = 1.0) -> None:
        """Agree on the gradients; see `Site.agree`."""
        self.site.agree(self.reduction, rows, scale)

    def trains(self, step: int) -> None:
        """Go backward through the loss of a step, and agree."""
        self.loss(step).backward()
        self.agree(self.site.rows(step))


def trains(site: Site, model: nn.Module | None = None, steps: int = STEPS) -> None:
    """Run a plain training loop."""
    training = Training(site, model)
    for step in training.steps(steps):
        training.trains(step)


def net(*, out: int = CLASSES) -> nn.Sequential:
    """Three layers, of which each mode sends the weights in its own way."""
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, out))


def sgd(model: nn.Module, lr: float = 0.2) -> torch.optim.SGD:
    """Plain gradient descent, whose steps show any error of a gradient."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross-entropy of a batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
