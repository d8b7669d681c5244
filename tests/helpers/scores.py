"""Data for a model with an embedding and a bag, and its training in one process on the batches of both sites."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dadplug.step.model_sync.samples import takes_part

ROWS, STEPS, BATCH = 40, 6, 4


def data(site: int, sites: int = 2, steps: int = STEPS, seed: int = 0) -> TensorDataset:
    """Rows of a site: it alone looks up the ids that are its number modulo the sites. Three are words, two are tags."""
    generator = torch.Generator().manual_seed(seed + site)
    ids = torch.randint(ROWS // sites, (steps * BATCH, 5), generator=generator) * sites + site
    return TensorDataset(ids, torch.randn(steps * BATCH, generator=generator))


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    return kinds[kind](model.parameters(), lr=0.1)


def one_process(
    model: nn.Module,
    kind: str = "sgd",
    epochs: int = 2,
    accumulation: int = 1,
    steps: Sequence[int] = (STEPS, STEPS),
    before_step: Callable[[nn.Module], None] = lambda model: None,
) -> nn.Module:
    """Train on the batches of all sites; those of a site with fewer are spread over the epoch."""
    optimizer = optimizer_of(model, kind)
    for _ in range(epochs):
        loaders = [list(DataLoader(data(site, steps=count), BATCH)) for site, count in enumerate(steps)]
        waiting = []
        for step in range(max(steps)):
            waiting += [own.pop(0) for own, count in zip(loaders, steps) if takes_part(step, count, max(steps))]
            if (step + 1) % accumulation == 0 or step + 1 == max(steps):
                ids, targets = (torch.cat(parts) for parts in zip(*waiting))
                optimizer.zero_grad()
                (model(ids) - targets).square().mean().backward()
                before_step(model)
                optimizer.step()
                waiting = []
    return model


def assert_alike(model: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, value), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")
