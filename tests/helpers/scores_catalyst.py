"""A model with an embedding and a bag for Catalyst, and its training with the runner."""

import os
import warnings

import torch
from dadplug.runners import AdaPMRunner
from scores import BATCH, ROWS, data, optimizer_of
from torch import nn
from torch.utils.data import DataLoader


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
