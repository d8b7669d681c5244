"""Batches that follow goodput, in five steps: torchrun --nproc-per-node 2 --max-restarts 3 examples/adaptive_mnist.py.

The steps are those of AdaptDL's tutorial, each marked by its number; docs/guides/adaptive-batches.md explains them. The
digits that come with scikit-learn stand for MNIST.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR

import dadplug
from dadplug.data import load_dataset


class Net(nn.Module):
    """Two convolutions and two linear layers, on images of 28 x 28."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.fc1, self.fc2 = nn.Linear(16 * 5 * 5, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


def train(model, loader, reduction, optimizer, scheduler):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        reduction.synchronize()
        optimizer.step()
        scheduler.step()
    reduction.join(optimizer.step)


def test(model, loader):
    """Return the accuracy on the test data of all sites."""
    model.eval()
    stats = dadplug.Accumulator()  # step 5
    with torch.no_grad():
        for data, target in loader:
            stats["correct"] += int((model(data).argmax(1) == target).sum())
            stats["samples"] += len(target)
    with stats.synchronized():  # step 5
        return stats["correct"] / stats["samples"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--largest", type=int, default=256, help="largest batch of all sites")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--mode", default="dad")
    parser.add_argument("--checkpoint", default=None, help="file from which a restarted program goes on")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    dadplug.connect()  # step 1
    model = Net()
    reduction = dadplug.GradientReduction(model, mode=arguments.mode)  # step 1
    optimizer = optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    data = load_dataset("digits")
    per_epoch = len(data.train) / arguments.batch_size
    scheduler = dadplug.AdaScale(  # step 1: the learning rate follows the batch, the schedule the progress
        optimizer, reduction, StepLR(optimizer, 1, 0.9), base_batch=arguments.batch_size, scheduler_every=per_epoch
    )
    loader = dadplug.AdaptiveDataLoader(
        data.train, batch_size=arguments.batch_size, shuffle=True, drop_last=True
    )  # step 2
    test_loader = dadplug.AdaptiveDataLoader(data.test, batch_size=256)  # step 2
    loader.autoscale_batch_size(arguments.largest, local_bsz_bounds=(8, 128))  # step 3

    state = {"model": model, "optimizer": optimizer, "reduction": reduction, "scheduler": scheduler}
    for epoch in dadplug.remaining_epochs_until(  # step 4
        arguments.epochs, checkpoint=arguments.checkpoint, state=state, every=20
    ):
        train(model, loader, reduction, optimizer, scheduler)
        accuracy = test(model, test_loader)
        if reduction.site_rank == 0:
            print(
                f"epoch {epoch}: accuracy {accuracy:.3f}, batch {loader.current_batch_size}, "
                f"gain {reduction.gain:.2f}, noise {reduction.noise.scale:.0f}, progress {scheduler.progress:.0f} of "
                f"{per_epoch * arguments.epochs:.0f} steps",
                flush=True,
            )


if __name__ == "__main__":
    main()
