"""LightningModules with an embedding and a bag."""

import pytest
import torch
from scores import ROWS, optimizer_of
from torch import nn
from torchmetrics import MeanSquaredError

pl = pytest.importorskip("pytorch_lightning")


class Scores(pl.LightningModule):
    """An embedding, a bag and a head, trained as Lightning modules are."""

    def __init__(self, kind: str = "sgd") -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(ROWS, 6)
        self.tags = nn.EmbeddingBag(ROWS, 6, mode="sum")
        self.head = nn.Linear(12, 1)
        self.error = MeanSquaredError()

    def forward(self, ids):
        return self.head(torch.cat([self.words(ids[:, :3]).mean(1), self.tags(ids[:, 3:])], 1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        ids, targets = batch
        scores = self(ids)
        loss = (scores - targets).square().mean()
        self.error(scores, targets)
        self.log_dict({"loss": loss, "error": self.error})
        return loss

    def validation_step(self, batch, batch_idx):
        ids, targets = batch
        self.log("valid", (self(ids) - targets).square().mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return optimizer_of(self, self.kind)


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


def make_trainer(strategy, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "max_epochs": 2, "use_distributed_sampler": False}
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, **quiet | settings)
