"""A small classification for Catalyst's runner: data, a net, and a training."""

import torch
from catalyst import dl
from catalyst.core.callback import Callback
from dadplug.runners import DistributedRunner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def data(samples=70, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, (inputs[:, :4] + 0.3 * inputs[:, 4:]).argmax(1))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))


class Losses(Callback):
    """Keeps the loss and size of every training batch."""

    def __init__(self):
        super().__init__(order=100)
        self.values = []

    def on_batch_end(self, runner):
        if runner.is_train_loader:
            self.values.append((float(runner.batch_metrics["loss"]), runner.batch_size))


def metrics_callbacks():
    keys = {"input_key": "logits", "target_key": "targets"}
    return [
        dl.AccuracyCallback(**keys, topk=(1, 3)),
        dl.PrecisionRecallF1SupportCallback(**keys, num_classes=4),
        dl.AUCCallback(**keys),
    ]


def run(runner, model, optimizer, callbacks=(), loaders=None, epochs=2, criterion=None, **settings):
    loaders = loaders or {"train": DataLoader(data(), batch_size=8, shuffle=True), "valid": DataLoader(data(30, 1), 8)}
    runner.train(
        model=model,
        criterion=criterion or nn.CrossEntropyLoss(),
        optimizer=optimizer,
        loaders=loaders,
        callbacks=list(callbacks),
        num_epochs=epochs,
        **settings,
    )
    return runner


def train(mode="dad", loaders=None, callbacks=(), lr=0.05, epochs=2, runner_options=None, **settings):
    model = settings.pop("model", None) or net()
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr)
    runner = DistributedRunner(mode=mode, **(runner_options or {}))
    return run(runner, model, optimizer, callbacks, loaders, epochs, **settings)
