"""Program on managed embeddings that runs on a site or in one process: its model, batches and steps."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import nn

from dadplug.adapm import AdaModel

ROWS, WIDTH, SIZES, STEPS = 12, 3, (3, 5), 6


class Net(nn.Module):
    """Two tables, one of them padded, and dense layers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.tags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
        self.mix = nn.Linear(2 * WIDTH, 4).double()
        self.head = nn.Linear(4, 1).double()

    def features(self, ids):
        return torch.cat([self.words(ids[:, :2]).mean(1), self.tags(ids[:, 2:])], 1).double()

    def forward(self, ids):
        return self.head(self.mix(self.features(ids)).tanh()).squeeze(1)


class Loop:
    """One program that trains, on a site or in one process.

    Attributes:
        rank: the site; None for one process.
    """

    def __init__(self, kind, rank=None, mode="dsgd", manager=None, options=None, several=False):
        self.kind, self.rank, self.manager = kind, rank, manager
        self.net = Net()
        made = {"sgd": functools.partial(torch.optim.SGD, lr=0.3)}
        made["adagrad"] = functools.partial(torch.optim.Adagrad, lr=0.2, lr_decay=0.1)
        tables = [*self.net.words.parameters(), *self.net.tags.parameters()]
        dense = [*self.net.mix.parameters(), *self.net.head.parameters()]
        self.optimizer = made[kind](tables if several else self.net.parameters())
        self.second = made[kind](dense) if several else None
        self.model, self.managed = self.net, None
        if manager is not None:
            self.managed = AdaModel(self.net, self.optimizer, manager, mode=mode, **(options or {}))
            self.model = self.managed

    def batch(self, step, only=None):
        """Rows of a step; sites share them with sgd, whose steps add up, and have their own otherwise."""
        parts = []
        for site in (0, 1):
            if (only is None or only == site) and self.rank in (None, site):
                generator = torch.Generator().manual_seed(97 * step + site)
                ids = torch.randint(ROWS, (SIZES[site], 4), generator=generator)
                if self.kind != "sgd":
                    ids = ids // 2 * 2 + site
                parts.append((ids, torch.randn(SIZES[site], generator=generator, dtype=torch.float64)))
        return [torch.cat(part) for part in zip(*parts, strict=True)] if parts else None

    def loss(self, step, only=None):
        ids, targets = self.batch(step, only)
        return (self.model(ids) - targets).square().mean()

    def zero_grad(self, **options):
        for optimizer in filter(None, (self.optimizer, self.second)):
            optimizer.zero_grad(**options)

    def synchronize(self):
        if self.managed is not None:
            self.managed.synchronize()

    def no_sync(self):
        return contextlib.nullcontext() if self.managed is None else self.managed.reduction.no_sync()

    def refresh(self):
        if self.manager is not None:
            self.manager.wait_sync(everywhere=True)

    def step(self, *args):
        for optimizer in filter(None, (self.optimizer, self.second)):
            optimizer.step(*args)
        self.refresh()

    def train(self, step):
        self.loss(step).backward()
        self.synchronize()
        self.step()

    def update(self, step):
        """A step as it should be."""
        self.zero_grad()
        self.train(step)
