"""Agreement of loss curves: one process with all rows, dsgd and dad at two sites, in float64 and in float32.

    python benchmarks/loss_agreement.py                             on the embedded digits, both sites on this machine
    python benchmarks/loss_agreement.py --dataset mnist --data-dir DIR

MNISTNet with synchronised batch normalisation, the same batches. Two float32 runs that differ by one rounding drift
apart, exact as each is: a rounding flips a ReLU now and then, and Adam gives a gradient that is nothing but rounding a
step of full length. A run in one process with its rows in another order shows how far. Float64 is fine enough for
neither to happen. dad and dsgd get the same bits where the sites' batches are equal, in float32 too.
"""

from __future__ import annotations

import os
import sys

import torch
from command import connect_site, parser_of, run_at_sites
from torch import nn

import dadplug
from dadplug.data import SPLITS, load_dataset, site_indices
from dadplug.models import MNISTNet

ALONE = "one process"
METHODS = (ALONE, f"{ALONE}, rows reordered", "dsgd", "dad")
PAIRS = ((METHODS[1], ALONE), ("dsgd", ALONE), ("dad", ALONE), ("dad", "dsgd"))


def batches(arguments, data, dtype):
    """Both sites' batches, step by step; every site knows them, so that each can also train alone on all rows."""
    generator = torch.Generator().manual_seed(arguments.seed)
    shares = [site_indices(data.train.labels, rank, 2, arguments.split, arguments.seed) for rank in range(2)]
    for _ in range(arguments.steps):
        pair = []
        for share in shares:
            picked = share[torch.randint(len(share), (arguments.batch_size,), generator=generator)]
            pair.append((data.train.images[picked].to(dtype), data.train.labels[picked]))
        yield pair


def train(arguments, data, dtype, method: str) -> list[float]:
    """Return the loss of every step, the mean over all rows."""
    torch.manual_seed(arguments.seed)
    model = MNISTNet(classes=data.classes).to(dtype)
    make = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[arguments.optimizer]
    optimizer = make(model.parameters(), lr={"adam": 1e-3, "sgd": 0.1}[arguments.optimizer])
    alone = method.startswith(ALONE)
    reduction = None if alone else dadplug.GradientReduction(model, mode=method, sync_batchnorm=True)
    losses = []
    for pair in batches(arguments, data, dtype):
        if alone:
            inputs, targets = (torch.cat(parts) for parts in zip(*pair, strict=True))
            if method.endswith("reordered"):
                inputs, targets = inputs.flip(0), targets.flip(0)
        else:
            inputs, targets = pair[reduction.site_rank]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        if reduction is not None:
            reduction.synchronize()
        optimizer.step()
        losses.append(float(loss.detach()))
    if reduction is not None:
        losses = [sum(step) / 2 for step in zip(*reduction.gather_objects(losses), strict=True)]
        reduction.detach()
    return losses


def run_site(arguments) -> None:
    connect_site()
    data = load_dataset(arguments.dataset, arguments.data_dir)
    first = os.environ["RANK"] == "0"
    for dtype in (torch.float64, torch.float32):
        curves = {method: train(arguments, data, dtype, method) for method in METHODS}
        for one, other in PAIRS:
            apart = max(abs(a - b) / b for a, b in zip(curves[one], curves[other], strict=True))
            if first:
                print(f"{dtype!s:14} {one:28} and {other:12} differ by at most {apart:.1e}", flush=True)


def main() -> int:
    parser = parser_of(
        __doc__,
        dataset="digits",
        data_dir=None,
        split={"default": "iid", "choices": sorted(SPLITS)},
        optimizer={"default": "adam", "choices": ("adam", "sgd")},
        steps=50,
        batch_size=32,
        seed=0,
    )
    arguments = parser.parse_args()
    return run_at_sites(run_site, arguments)


if __name__ == "__main__":
    sys.exit(main())
