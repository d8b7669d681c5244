"""Held-out accuracy of sites with unlike data, with and without private layers, on scikit-learn's digits.

    torchrun --nproc-per-node 4 benchmarks/private_layers.py                 both cases, three seeds
    torchrun --nproc-per-node 2 benchmarks/private_layers.py --steps 20 --seeds 1

Two cases. `contrast`: each site has another scanner, whose images have a contrast, a brightness and noise of its own,
and every second one is inverted; the normalisations are private (FedBN). `labels`: each site names the digits by
another code; the head is private. Each site trains on 60 digits of its own, and is evaluated on the held-out ones, as
its own scanner or code gives them.

`alone`: no other site. `shared`: all layers are those of all sites. `private`: `private=` of the case.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dadplug
from dadplug.data import load_dataset

BATCH, DIGITS = 20, 10
CASES = {"contrast": ("*.norm.*",), "labels": ("head.*",)}
WAYS = ("alone", "shared", "private")


class Block(nn.Module):
    """A convolution with its normalisation."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(inputs)))


class Net(nn.Module):
    """Two blocks and a hidden layer, which sites share, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(1, 16), Block(16, 32)
        self.hidden, self.head = nn.Linear(32 * 49, 64), nn.Linear(64, DIGITS)

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.second(nn.functional.max_pool2d(self.first(inputs), 2))
        return self.head(torch.relu(self.hidden(found.flatten(1))))


def of_site(case: str, inputs: Tensor, labels: Tensor, site: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images and labels as a site has them."""
    generator = torch.Generator().manual_seed(1000 * seed + site)
    if case == "labels":
        return inputs, torch.randperm(DIGITS, generator=generator)[labels]
    contrast, brightness = 0.3 + 2.7 * torch.rand(2, generator=generator)
    images = contrast * (-inputs if site % 2 else inputs) + brightness
    return images + 0.1 * torch.randn(images.shape, generator=generator), labels


def digits() -> list[tuple[Tensor, Tensor]]:
    """Return images of half the width, and their labels: those to train on, and the others."""
    data = load_dataset("digits")
    every = [next(iter(DataLoader(each, len(each)))) for each in (data.train, data.test)]
    return [(nn.functional.avg_pool2d(images.view(-1, 1, 28, 28), 2), labels) for images, labels in every]


def train(case: str, way: str, rows: int, steps: int, seed: int) -> float:
    """Train a model; return the held-out accuracy of this site."""
    site, sites = dist.get_rank(), dist.get_world_size()
    (images, digit), test = digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    own = order[site * rows : (site + 1) * rows]
    inputs, labels = of_site(case, images[own], digit[own], site, seed)
    test_inputs, test_labels = of_site(case, *test, site, seed)
    torch.manual_seed(seed)
    model = Net()
    private = CASES[case] if way == "private" else ()
    reduction = None if way == "alone" else dadplug.GradientReduction(model, "dsgd", private=private)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(sites * seed + site)
    for _ in range(steps):
        chosen = torch.randperm(rows, generator=generator)[:BATCH]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        if reduction is not None:
            reduction.synchronize()
        optimizer.step()
    if reduction is not None:
        reduction.average_buffers()
        reduction.detach()
    model.eval()
    with torch.no_grad():
        return float((model(test_inputs).argmax(1) == test_labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60, help="training digits of a site")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in CASES:
        for way in WAYS:
            own = torch.tensor(
                [train(case, way, arguments.rows, arguments.steps, seed) for seed in range(arguments.seeds)],
                dtype=torch.float64,
            )
            every = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(every, own)
            if dist.get_rank() == 0:
                means = torch.stack(every)  # sites x seeds
                spread = f"{means.mean(0).min():.3f} to {means.mean(0).max():.3f}"
                sites = " ".join(f"{each:.3f}" for each in means.mean(1))
                print(f"{case:9} {way:8} mean {means.mean():.3f}  seeds {spread}  by site {sites}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
