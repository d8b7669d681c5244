"""Loss after rounds of local steps with sparse deltas, against the dense mean: all sites simulated in one process.

    python benchmarks/sparse_loss.py                          four sites, 20 rounds of 16 steps; a few minutes
    python benchmarks/sparse_loss.py --rounds 125 --seeds 2

The byte transformer of benchmarks/fine_tuning.py, of width 128: trained on the documentation, then fine-tuned on the
package's sources, of which each site has a part. Adam, 8 windows of 64 bytes a step. Deltas go through the code and the
memory that LocalSGD uses. The loss is that of the agreed model on files that no site has, in nats a byte.
"""

from __future__ import annotations

import argparse
from copy import deepcopy

import torch
from fine_tuning import BATCH, ROOT, tied_model, windows
from torch import Tensor, nn
from workloads import loss

from dadplug.local_steps.sparse_format import SparseFormat

PRETRAINING, PRETRAINED_RATE = 400, 2e-3
CHECKED = 256  # windows of the held-out files
EVERY = 16
DENSE = "dense mean"
WAYS: dict[str, dict[str, float]] = {
    DENSE: {},
    "density 0.02, outer rate 1": {"density": 0.02, "lr": 1.0},
    "density 0.02, outer rate 2": {"density": 0.02, "lr": 2.0},
    "density 0.02, outer rate 2.5": {"density": 0.02, "lr": 2.5},
}


def texts(pattern: str, folders: tuple[str, ...], parts: int) -> tuple[list[Tensor], Tensor]:
    """Return the bytes of the parts of some files, and of those that are held out, every tenth."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob(pattern))
    rest = [file for place, file in enumerate(files) if place % 10]

    def joined(chosen: list) -> Tensor:
        return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in chosen)), dtype=torch.uint8).long()

    return [joined(rest[part::parts]) for part in range(parts)], joined(files[::10])


def take(model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor, rng: torch.Generator, steps: int) -> None:
    for _ in range(steps):
        inputs, targets = windows(data, BATCH, rng)
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def set_values(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])


def fine_tune(start: nn.Module, way: dict[str, float], seed: int, arguments: argparse.Namespace) -> float:
    """Train by rounds; return the held-out loss of the agreed model."""
    data, held_out = texts("*.py", ("dadplug", "hooks", "runners"), arguments.sites)
    models = [deepcopy(start) for _ in data]
    optimizers = [torch.optim.Adam(model.parameters(), arguments.rate) for model in models]
    generators = [torch.Generator().manual_seed(1000 * seed + site) for site in range(len(data))]
    agreed, shares = values_of(start), [1 / len(data)] * len(data)
    formats = [SparseFormat(lambda number: way["density"], 0.95, True) for _ in data]
    for number in range(arguments.rounds):
        deltas = []
        for model, *rest in zip(models, optimizers, data, generators, strict=True):
            set_values(model, agreed)
            take(model, *rest, EVERY)
            deltas.append({name: value - agreed[name] for name, value in values_of(model).items()})
        if not way:
            means = {name: sum(delta[name] for delta in deltas) / len(deltas) for name in agreed}
        else:
            rooms = []
            for form, delta in zip(formats, deltas, strict=True):
                form.begin_round(number)
                rooms.append({dtype: torch.zeros(size, dtype=dtype) for dtype, size in form.layout(delta).items()})
                form.encode(delta, rooms[-1])
            means = formats[0].decode({torch.uint8: [room[torch.uint8] for room in rooms]}, shares)
        for name, mean in means.items():
            agreed[name] += way.get("lr", 1.0) * mean
    final = deepcopy(start)
    set_values(final, agreed)
    check = windows(held_out, CHECKED, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float(loss(final(check[0]), check[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1e-4, help="Adam's, in the local steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = tied_model()
    prose, _ = texts("*.md", ("docs",), 1)
    optimizer = torch.optim.Adam(model.parameters(), PRETRAINED_RATE)
    take(model, optimizer, prose[0], torch.Generator().manual_seed(0), PRETRAINING)
    for seed in range(arguments.seeds):
        for name, way in WAYS.items():
            print(f"seed {seed}, {name}: {fine_tune(model, way, seed, arguments):.4f} nats a byte", flush=True)


if __name__ == "__main__":
    main()
