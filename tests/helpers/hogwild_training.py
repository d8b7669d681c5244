"""Models, data and loops for tests of training in shared memory; functions that run in each process."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

SAMPLES, BATCH, EPOCHS = 90, 8, 2
BATCHES = 12


def run_here(file: str, name: str, *args: object) -> str:
    """Run a function of a file of tests in a program of its own; return what it has printed."""
    import support  # not in the processes that train

    code = f"import sys; sys.path[:] = {sys.path!r}; import support; support.load({file!r}).{name}(*{args!r})"
    (program,) = support.run_programs([["-c", code]], timeout=240)
    assert program.status == 0, program.output + program.errors
    return program.output


class Numbered(Dataset):
    """Samples that can be told apart: the last entry is the index."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SAMPLES, 6, generator=generator)
        self.targets = (self.inputs[:, :2].sum(1) > 0).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index], index


def loader(workers: int = 0) -> DataLoader:
    return DataLoader(Numbered(), batch_size=BATCH, shuffle=True, num_workers=workers)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))


class Bags(nn.Module):
    """A sparse table below a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.EmbeddingBag(50, 6, sparse=True)
        self.head = nn.Linear(6, 2)

    def forward(self, inputs):
        return self.head(self.table((inputs.abs() * 10).long().clamp(max=49)))


class Votes(nn.Module):
    """A sparse table and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.EmbeddingBag(50, 2, sparse=True)

    def forward(self, inputs):
        return self.table((inputs.abs() * 10).long().clamp(max=49))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-1, initial_accumulator_value=0.1),
}


def update(model, optimizer, batch) -> float:
    inputs, targets, _ = batch
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def train_plainly(model, optimizer, workers: int = 0) -> list[float]:
    """Train in one process, as a plain loop does."""
    torch.manual_seed(7)
    batches = loader(workers)
    return [update(model, optimizer, batch) for _ in range(EPOCHS) for batch in batches]


def train_dealt(hogwild, workers: int = 0) -> list[float]:
    """Train as `train_plainly` does, on the batches that are dealt to this process."""
    torch.manual_seed(7 + hogwild.rank)
    batches = hogwild.deal(loader(workers))
    return [update(hogwild.model, hogwild.optimizer, batch) for _ in range(EPOCHS) for batch in batches]


def train_recording(hogwild, slow: int | None = None):
    """Train, and return the samples of each epoch, the progress, and what is seen in the pause at the end."""
    batches, seen = hogwild.deal(loader()), []
    for _ in range(EPOCHS):
        seen.append([])
        for batch in batches:
            update(hogwild.model, hogwild.optimizer, batch)
            seen[-1].extend(batch[2].tolist())
            if hogwild.rank == slow:
                time.sleep(0.02)
    with hogwild.paused():
        state = [value.clone() for value in hogwild.model.state_dict().values()]
    return seen, hogwild.progress(), hogwild.steps, state


def end_in_batch(hogwild, how: str, place: str) -> None:
    """End process 1 in its first batch of the second epoch; the others write their process ids and go on."""
    Path(place, str(hogwild.rank)).write_text(str(os.getpid()))
    batches = hogwild.deal(loader())
    for epoch in range(1000):
        for batch in batches:
            update(hogwild.model, hogwild.optimizer, batch)
            if hogwild.rank == 1 and epoch == 1:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise KeyError("no such thing")


def pairs() -> TensorDataset:
    data = Numbered()
    return TensorDataset(data.inputs, data.targets)


def equal(first, second) -> bool:
    """Compare states, nested as those of modules and optimizers are, to the bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second) and first.dtype == second.dtype
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second


def gone(pid: int) -> bool:
    """Return whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"
