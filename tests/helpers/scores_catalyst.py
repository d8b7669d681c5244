"""A model with an embedding and a bag, its data, and its training with the runner and in one process."""

from __future__ import annotations

import os
import warnings

import torch
from dadplug.runners import AdaPMRunner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, BATCH = 40, 4


class Scores(nn.Module):
    """An embedding, a bag and a head."""

    def __init__(self, head: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, 6)
        self.tags = nn.EmbeddingBag(ROWS, 6, mode="sum")
        self.head = nn.Linear(12, 1) if head else None

    def forward(self, ids):
        rows = [self.words(ids[:, :3]).mean(1), self.tags(ids[:, 3:])]
        return (rows[0] * rows[1]).sum(1) if self.head is None else self.head(torch.cat(rows, 1)).squeeze(1)


def data(site: int, sites: int = 2, steps: int = 6, seed: int = 0) -> TensorDataset:
    """Rows of a site: it alone looks up the ids that are its number modulo the sites."""
    generator = torch.Generator().manual_seed(seed + site)
    ids = torch.randint(ROWS // sites, (steps * BATCH, 5), generator=generator) * sites + site
    return TensorDataset(ids, torch.randn(steps * BATCH, generator=generator))


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    return kinds[kind](model.parameters(), lr=0.1)


def one_process(kind="sgd", epochs=2, accumulation=1, steps=(6, 6), head=True):
    from dadplug.model_sync.samples import takes_part

    model = Scores(head)
    optimizer = optimizer_of(model, kind)
    for _ in range(epochs):
        loaders = [list(DataLoader(data(site, steps=steps[site]), BATCH)) for site in (0, 1)]
        waiting = []
        for step in range(max(steps)):
            now = [own.pop(0) for own, count in zip(loaders, steps) if takes_part(step, count, max(steps))]
            waiting.extend(now)
            if (step + 1) % accumulation == 0 or step + 1 == max(steps):
                ids, targets = (torch.cat(parts) for parts in zip(*waiting))
                optimizer.zero_grad()
                (model(ids) - targets).square().mean().backward()
                optimizer.step()
                waiting = []
    return model


def run(model, kind="sgd", epochs=2, callbacks=(), steps=6, options=None, runner=AdaPMRunner, **settings):
    site = int(os.environ["RANK"])
    runner = runner(split_data=False, **(options or {}))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*intent")
        runner.train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=optimizer_of(model, kind),
            loaders={
                "train": DataLoader(data(site, steps=steps), BATCH),
                "valid": DataLoader(data(0, steps=2, seed=9), BATCH),
            },
            num_epochs=epochs,
            callbacks=list(callbacks),
            **settings,
        )
    return runner


def assert_alike(model, expected, tolerance=1e-5):
    for (name, value), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")
