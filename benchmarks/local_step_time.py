"""Time of one local step of MNISTNet at one site, without exchanges: plain PyTorch, LocalSGD, and LocalSGD(fused=True).

    python benchmarks/local_step_time.py                              adam and sgd, 4 to 512 rows
    python benchmarks/local_step_time.py --optimizers adam --rows 32

The ways take steps in turns, on the same rows, with one thread. Ratios are medians of those of neighbouring steps.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from command import parser_of
from torch import nn

import dadplug
from dadplug.models import MNISTNet

NEVER = 10**9
WARM_UP = 4
OPTIMIZERS: dict[str, Callable] = {
    "adam": lambda weights: torch.optim.Adam(weights, 1e-3),
    "momentum": lambda weights: torch.optim.SGD(weights, 0.01, momentum=0.9),
    "sgd": lambda weights: torch.optim.SGD(weights, 0.01),
}
WAYS = {"plain": None, "LocalSGD": False, "fused": True}


class Training:
    """A model in training by one way.

    Args:
        model: the model, which is copied.
        optimizer: name of the optimizer.
        fused: whether local steps are fused; None for plain PyTorch.
    """

    def __init__(self, model: nn.Module, optimizer: str, fused: bool | None) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self._step = self.optimizer.step
        if fused is not None:
            self._step = dadplug.LocalSGD(self.model, self.optimizer, every=NEVER, fused=fused).step

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        """Take a step; return its seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), labels).backward()
        self._step()
        return time.perf_counter() - start


def measure(optimizer: str, rows: int, steps: int) -> str:
    """Return a line of the table."""
    torch.manual_seed(0)
    model = MNISTNet()
    trainings = {name: Training(model, optimizer, fused) for name, fused in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(WARM_UP + steps):
        inputs, labels = torch.randn(rows, 784), torch.randint(10, (rows,))
        for name, training in trainings.items():
            taken = training.step(inputs, labels)
            if number >= WARM_UP:
                seconds[name].append(taken)
    cells = []
    for name, found in seconds.items():
        ratio = statistics.median(own / plain for own, plain in zip(found, seconds["plain"], strict=True))
        cells.append(f"{1e3 * statistics.median(found):.1f}" + (f" ({ratio:.2f})" if name != "plain" else ""))
    return f"| {optimizer}, {rows} rows | " + " | ".join(cells) + " |"


def main() -> None:
    parser = parser_of(
        __doc__,
        optimizers=("adam,sgd", ", ".join(OPTIMIZERS)),
        rows=("4,32,128,512", "rows of a batch"),
        steps=50,
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| ms a step (of plain) | " + " | ".join(WAYS) + " |\n" + "| --- " * (len(WAYS) + 1) + "|")
    for optimizer in arguments.optimizers.split(","):
        for rows in arguments.rows.split(","):
            print(measure(optimizer, int(rows), arguments.steps), flush=True)


if __name__ == "__main__":
    main()
