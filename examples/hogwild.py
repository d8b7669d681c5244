"""One model, three ways to train it on this machine: 1 process with 4 epochs, 4 with 1, 2 with 2 (Hogwild!).

    python examples/hogwild.py                       the digits of scikit-learn
    python examples/hogwild.py --data-dir mnist      MNIST's files in a folder

Each way sees the same number of samples. The losses are drawn into a chart.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from dadplug.data import load_dataset
from dadplug.hogwild import chart_losses, log_elapsed_time, train_model

CONFIGURATIONS = ((1, 4), (4, 1), (2, 2))  # processes, epochs of each


class Network(nn.Module):
    """Two convolutions and two linear layers, in the sizes of PyTorch's MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5))
        self.drop = nn.Dropout2d()
        self.classifier = nn.Sequential(nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits of shape (batch, 10) from images of shape (batch, 1, 28, 28)."""
        hidden = nn.functional.relu(nn.functional.max_pool2d(self.drop(self.features(images)), 2))
        return self.classifier(hidden.flatten(1))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder of MNIST's files; without it scikit-learn's digits")
    parser.add_argument("--samples", type=int, default=8000, help="number of training samples at most")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--chart", type=Path, default=Path("hogwild_losses.png"), help="file of the chart")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    matplotlib.use("Agg")
    name = "mnist" if options.data_dir else "digits"
    data = load_dataset(name, options.data_dir)
    train = Subset(data.train, range(min(options.samples, len(data.train))))
    losses = {}
    for processes, epochs in CONFIGURATIONS:
        torch.manual_seed(1)
        model = Network()
        optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=options.momentum)
        start = time.perf_counter()
        tracker = train_model(
            model,
            DataLoader(train, batch_size=options.batch_size, shuffle=True),
            processes,
            epochs,
            optimizer,
            log_interval=50,
            test_dataloader=DataLoader(data.test, batch_size=256),
        )
        log_elapsed_time(processes, epochs, start, time.perf_counter())
        losses[f"{processes} process{'es' * (processes > 1)} x {epochs} epoch{'s' * (epochs > 1)}"] = tracker
    chart_losses(losses, path=options.chart)
    print(f"wrote {options.chart}")


if __name__ == "__main__":
    main()
