"""A LightningModule with an embedding and a bag, its data, and its training in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

pl = pytest.importorskip("pytorch_lightning")

ROWS, STEPS, BATCH = 40, 6, 4


class Scores(pl.LightningModule):
    """An embedding, a bag and a head, trained as Lightning modules are."""

    def __init__(self, kind: str = "sgd") -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(ROWS, 6)
        self.tags = nn.EmbeddingBag(ROWS, 6, mode="sum")
        self.head = nn.Linear(12, 1)
        self.error = MeanSquaredError()

    def forward(self, words, tags):
        return self.head(torch.cat([self.words(words).mean(1), self.tags(tags)], 1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        words, tags, targets = batch
        scores = self(words, tags)
        loss = (scores - targets).square().mean()
        self.error(scores, targets)
        self.log_dict({"loss": loss, "error": self.error})
        return loss

    def validation_step(self, batch, batch_idx):
        words, tags, targets = batch
        self.log("valid", (self(words, tags) - targets).square().mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0], batch[1])

    def configure_optimizers(self):
        if self.kind == "adagrad":
            return torch.optim.Adagrad(self.parameters(), lr=0.1)
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Drawing(Scores):
    """Looks up what chance says, which no lookahead can know."""

    def training_step(self, batch, batch_idx):
        return super().training_step((torch.randint(ROWS, batch[0].shape), *batch[1:]), batch_idx)


class Late(Scores):
    """Looks up other rows in later steps, by a value that a copy of the module does not have."""

    def training_step(self, batch, batch_idx):
        batch = batch if self.global_step == 0 else [(batch[0] + 1) % ROWS, *batch[1:]]
        return super().training_step(batch, batch_idx)


class Manual(Scores):
    """Steps by itself, tables and head with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        first.step()
        second.step()

    def configure_optimizers(self):
        tables = [*self.words.parameters(), *self.tags.parameters()]
        return [torch.optim.SGD(part, lr=0.1) for part in (self.head.parameters(), tables)]


def data(site: int, sites: int = 2, steps: int = STEPS, seed: int = 0) -> TensorDataset:
    """Rows of a site: it alone looks up the ids that are its number modulo the sites."""
    generator = torch.Generator().manual_seed(seed + site)
    words = torch.randint(ROWS // sites, (steps * BATCH, 3), generator=generator) * sites + site
    tags = torch.randint(ROWS // sites, (steps * BATCH, 2), generator=generator) * sites + site
    return TensorDataset(words, tags, torch.randn(steps * BATCH, generator=generator))


def make_trainer(strategy, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "max_epochs": 2, "use_distributed_sampler": False}
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, **quiet | settings)


def one_process(module, steps=STEPS, epochs=2, shares=(0, 1)):
    optimizer = module.configure_optimizers()
    loaders = [list(DataLoader(data(site, steps=steps), batch_size=BATCH)) for site in shares]
    for _ in range(epochs):
        for batches in zip(*loaders, strict=True):
            words, tags, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
            optimizer.zero_grad()
            (module(words, tags) - targets).square().mean().backward()
            optimizer.step()
    return module
