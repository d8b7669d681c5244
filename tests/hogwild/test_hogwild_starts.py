"""Ways in which processes start and end, and sparse tables between several processes."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from pathlib import Path

import hogwild_training as training
import pytest
import support
import torch
from torch import nn
from torch.utils.data import DataLoader

from dadplug import Hogwild, ProcessFailedError


def maps() -> str:
    return Path("/proc/self/maps").read_text()


# Sparse gradients


class Table(nn.Module):
    """A row for each sample, so that each update depends on no other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rows = nn.Embedding(training.SAMPLES, 2, sparse=True)

    def forward(self, indices):
        return self.rows(indices)


def train_table(hogwild: Hogwild | None, model: Table, optimizer: torch.optim.Optimizer) -> str:
    torch.manual_seed(7)
    loader = DataLoader(training.Numbered(), batch_size=training.BATCH, shuffle=True)
    batches = loader if hogwild is None else hogwild.deal(loader)
    for _ in range(training.EPOCHS):
        for _, targets, indices in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(indices), targets, reduction="sum").backward()
            assert model.rows.weight.grad.is_sparse
            optimizer.step()
    return maps()


def train_here(hogwild: Hogwild) -> str:
    return train_table(hogwild, hogwild.model, hogwild.optimizer)


def tables() -> None:
    makes = {
        "sgd": lambda p: torch.optim.SGD(p, 0.5),
        "adagrad": lambda p: torch.optim.Adagrad(p, 0.5),
        "adam": lambda p: torch.optim.SparseAdam(p, 0.1),
    }
    for name, make in makes.items():
        for processes in (1, 2):
            model, reference = Table(), Table()
            optimizer, other = make(model.parameters()), make(reference.parameters())
            start = model.rows.weight.detach().clone()
            (seen, *_) = Hogwild(model, optimizer, processes, threads=1, start="fork").run(train_here)
            assert "/memfd:dadplug-hogwild" in seen
            assert "/dev/shm" not in seen
            train_table(None, reference, other)
            if name != "adam" or processes == 1:
                assert torch.equal(model.rows.weight, reference.rows.weight), (name, processes)
                assert training.equal(optimizer.state_dict(), other.state_dict()), (name, processes)
                continue
            state, expected = optimizer.state[model.rows.weight], other.state[reference.rows.weight]
            assert int(state["step"]) == int(expected["step"]) == training.EPOCHS * training.BATCHES
            moved = (model.rows.weight.detach() - start).abs()
            assert 0 < moved.min() < moved.max() < 1.0  # its bias correction depends on the order of the steps
    gc.collect()
    assert "dadplug-hogwild" not in maps()


def test_sparse_tables_have_each_update_once():
    training.run_here(__file__, "tables")


# Programs


NOTEBOOK = """
import sys
sys.path[:] = {path!r}
sys.executable = sys.prefix + "/bin/python"  # not the one of the tests, whose processes have another parent
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from dadplug import Hogwild
del sys.modules["__main__"].__spec__  # nothing here can be imported by name

class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, inputs):
        return self.layer(self.norm(inputs))

def make(base):
    def train(hogwild, loader):
        seen = []
        for inputs, numbers in hogwild.deal(loader):
            hogwild.optimizer.zero_grad()
            hogwild.model(inputs).mean().backward()
            hogwild.optimizer.step()
            seen += numbers.tolist()
        return type(hogwild.model).__name__, base + hogwild.rank, seen

    return train

model = Cell()
optimizer = torch.optim.Adam(model.parameters(), 0.1)
for start in ("fork", "spawn"):
    loader = DataLoader(TensorDataset(torch.randn(24, 4), torch.arange(24)), batch_size=4)
    parts = Hogwild(model, optimizer, 2, threads=1, start=start).run(make(10), loader)
    numbers = sorted(number for _, _, seen in parts for number in seen)
    print(start, [each[:2] for each in parts], numbers == list(range(24)))
    print(int(optimizer.state[model.layer.weight]["step"]), int(model.norm.num_batches_tracked))
"""


def test_a_program_whose_functions_cannot_be_imported():
    """Neither can closures; the state of the optimizer goes to new interpreters and comes back."""
    (program,) = support.run_programs([["-c", NOTEBOOK.format(path=sys.path)]], timeout=240)
    assert program.status == 0, program.output + program.errors
    parts = "[('Cell', 10), ('Cell', 11)] True"
    assert program.output.splitlines() == [f"fork {parts}", "6 6", f"spawn {parts}", "12 12"]


TORCHRUN = """
import sys
sys.path[:] = {path!r}
import hogwild_training as training
import torch
import dadplug

dadplug.connect()
model = training.network()
hogwild = dadplug.Hogwild(model, torch.optim.Adam(model.parameters(), 1e-2))
seen, progress, steps, state = training.train_recording(hogwild)
hogwild.finish()
total = float(sum(map(torch.sum, state)))
print(f"\\nprocess {{hogwild.rank}} of {{hogwild.processes}}: {{steps}} steps, sum {{total}}")
"""


def test_processes_of_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN.format(path=sys.path))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    (program,) = support.run_programs([command], timeout=240)
    assert program.status == 0, program.output + program.errors
    lines = sorted(re.findall(r"process (\d) of 2: (\d+) steps, sum (\S+)", program.output))
    assert [(rank, steps) for rank, steps, _ in lines] == [
        (rank, str(training.EPOCHS * training.BATCHES)) for rank in "01"
    ]
    assert lines[0][2] == lines[1][2]


# A connected process that is killed


def ends(how: str) -> tuple[str, bool]:
    """Train until process 1 ends in its second epoch; return the error, and whether shared memory is left."""
    model = training.network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    hogwild = Hogwild(model, optimizer)
    batches = hogwild.deal(training.loader())
    try:
        for epoch in range(1000):
            for batch in batches:
                training.update(model, optimizer, batch)
                if hogwild.rank == 1 and epoch == 1:
                    if how == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    hogwild.abort("its data are wrong")
                    return "", False
    except ProcessFailedError as error:
        message = str(error)
    hogwild.abort()
    training.update(model, optimizer, next(iter(training.loader())))  # a plain model again
    del batches
    gc.collect()
    return message, "dadplug-hogwild" in maps()


@pytest.mark.parametrize("how", ["kill", "abort"])
def test_a_connected_process_that_ends_is_named(how):
    with support.Sites(2) as group:
        group.start(ends, how)
        found = group.outcomes()
    assert found[0].kind == "ok", found
    message, left = found[0].value
    assert not left
    expected = "is gone, in epoch 1" if how == "kill" else "has failed: its data are wrong, in epoch 1"
    assert re.match(rf"process 1 \(pid \d+\) {expected}", message), message
