"""Ways in which processes start and end, and sparse tables between several processes."""

import copy
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
from forkserver import TRAINERS
from support import refuses
from torch import nn
from torch.utils.data import DataLoader

from dadplug import Hogwild, MismatchError, ProcessFailedError
from dadplug.hogwild import chart_losses, log_elapsed_time, memory, train_model


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


# Processes that a launcher has started and connected


def trains(named: bool) -> tuple:
    if named:  # no other process's descriptors can be opened
        memory.os = Without(memory.os)
    model = training.network()
    if memory.connected() and torch.distributed.get_rank():
        with torch.no_grad():
            model[0].weight.zero_()  # process 0's values count
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    hogwild = Hogwild(model, optimizer)
    start = model[0].weight.detach().clone()
    recorded = training.train_recording(hogwild)
    hogwild.finish()
    step = optimizer.state[model[0].weight]["step"].item()
    training.update(model, optimizer, next(iter(training.loader())))
    assert optimizer.state[model[0].weight]["step"].item() == step + 1  # no process changes it any more
    if named:
        memory.os = memory.os.module
    return recorded, start, step, model[1].num_batches_tracked.item()


class Without:
    """Module os of a system without /proc."""

    def __init__(self, module) -> None:
        self.module = module
        self.path = self

    def isdir(self, path) -> bool:
        return False

    def __getattr__(self, name):
        return getattr(self.module, name)


@pytest.mark.parametrize("named", [False, True])
def test_connected_processes_share_one_model(sites, named):
    (first, start, step, batches), (second, other, also, also_batches) = sites(2).run(trains, named)
    updates = training.EPOCHS * training.BATCHES
    assert torch.equal(start, other)
    assert start.abs().sum() > 0
    assert step == also == updates
    assert batches == also_batches == updates + 1
    for epoch in range(training.EPOCHS):
        assert sorted(first[0][epoch] + second[0][epoch]) == list(range(training.SAMPLES))
    assert first[2] == second[2] == updates
    assert training.equal(first[3], second[3])
    assert not torch.equal(first[3][0], start)


@support.at_sites(2)
def test_refusals_reach_all_processes() -> None:
    rank = torch.distributed.get_rank()

    def attempt(optimizer=torch.optim.SGD, **options) -> None:
        model = training.network()
        weight = model[0].weight.data_ptr()
        try:
            Hogwild(model, optimizer(model.parameters(), 0.1), **options)
        finally:
            assert model[0].weight.data_ptr() == weight

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_machine", lambda: f"machine {rank}")
        refuses((attempt, "are on 2 machines"))
    here = "" if rank else "process 1 cannot train: "
    refuses(
        (lambda: attempt(processes=3), "2 processes are connected, and processes=3 asks for others"),
        (lambda: attempt(state="mine" if rank else "own"), f"^{here}unknown state 'mine'"),
        (lambda: attempt(torch.optim.Adam if rank else torch.optim.SGD), ".", MismatchError),
        (lambda: attempt(state="own" if rank else "shared"), ".", MismatchError),
    )
    model = training.network()
    hogwild = Hogwild(model, torch.optim.SGD(model.parameters(), 0.1))
    refuses((lambda: hogwild.run(training.train_dealt), "2 processes are connected already", RuntimeError))
    hogwild.finish()


# Training by one call, elapsed times and charts


def loader() -> DataLoader:
    # Normalising the last batch, of two rows, sometimes makes a step that is far too large, also in one process.
    return DataLoader(training.pairs(), batch_size=training.BATCH, shuffle=True, drop_last=True)


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    inputs, targets = training.pairs().tensors
    return float(nn.functional.cross_entropy(copy.deepcopy(model).eval()(inputs), targets))


def experiment() -> None:
    by_processes = {}
    for processes, epochs in ((1, 4), (2, 2), (4, 1)):
        model = training.network()
        before = loss_of(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
        tracker = [9.0]
        losses = train_model(
            model,
            loader(),
            processes,
            epochs,
            optimizer,
            log_interval=5,
            loss_tracker=tracker,
            test_dataloader=DataLoader(training.pairs(), batch_size=training.BATCH),
        )
        assert losses is tracker
        assert losses.pop(0) == 9.0
        assert len(losses) == 4 * (training.BATCHES - 1)  # as many samples in each configuration
        assert loss_of(model) < 0.7 * before
        by_processes[processes] = losses
    model = training.network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    torch.manual_seed(42)
    expected = []
    for _ in range(4):
        for inputs, targets in loader():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    assert by_processes[1] == pytest.approx(expected, rel=1e-3)  # on another number of threads
    print("no logs")
    train_model(model, loader(), 2, 1, optimizer, log_interval=-1)


def test_train_model():
    lines, _, rest = training.run_here(__file__, "experiment").partition("no logs\n")
    assert not rest
    assert lines.count("test data: average loss") == 3
    assert "process 0 (pid" in lines
    assert "of 90 (" in lines


def test_wrong_arguments():
    model = training.network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def attempt(**arguments) -> None:
        given = {"train_dataloader": loader(), "num_processes": 1, "epochs_per_process": 1} | arguments
        train_model(model, **given, optimizer=optimizer)

    refuses(
        (lambda: attempt(device="cuda"), "device must be 'cpu', got 'cuda'"),
        (lambda: attempt(device=None), "device must be 'cpu', got 'None'"),
        (lambda: attempt(criterion=3), "criterion must be a function of outputs and targets, got 3"),
        (lambda: attempt(seed="a"), "seed must be a whole number"),
        (lambda: attempt(num_processes=0), "num_processes must be a whole number"),
        (lambda: attempt(epochs_per_process=1.5), "epochs_per_process must be a whole number"),
        (lambda: attempt(log_interval=0), "or -1 for no logs"),
        (lambda: chart_losses({}), "no losses"),
    )
    refuses((lambda: attempt(train_dataloader=None), "batches of a DataLoader can be dealt"), error=TypeError)


def test_times_and_charts(capsys, tmp_path):
    log_elapsed_time(4, 1, 2.0, 12.5)
    log_elapsed_time(1, 4, 0.0, 1.0)
    assert capsys.readouterr().out == (
        "Elapsed time for 4 processes x 1 epoch: 10.50 s\nElapsed time for 1 process x 4 epochs: 1.00 s\n"
    )
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    losses = {"1 process x 4 epochs": [2.0, 1.0, 0.5], "4 processes x 1 epoch": [2.0, 1.5]}
    figure = chart_losses(losses, path=tmp_path / "chart.png")
    (axes,) = figure.axes
    assert axes.get_title() == "Comparing Training Losses Across Configurations"
    curves = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert curves == {
        "1 process x 4 epochs": ([1, 2, 3], [2.0, 1.0, 0.5]),
        "4 processes x 1 epoch": ([1, 2], [2.0, 1.5]),
    }
    assert (tmp_path / "chart.png").stat().st_size > 1000
    assert chart_losses(losses, "Mine", path=tmp_path / "chart.png").axes[0].get_title() == "Mine"


def test_the_example(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    example = Path(__file__).resolve().parents[2] / "examples" / "hogwild.py"
    (program,) = support.run_programs(
        [[str(example), "--samples", "128", "--chart", "chart.png"]], folder=tmp_path, timeout=240, preload=TRAINERS
    )
    assert program.status == 0, program.output + program.errors
    for words in ("1 process x 4 epochs", "4 processes x 1 epoch", "2 processes x 2 epochs"):
        assert f"Elapsed time for {words}: " in program.output
    assert program.output.count("test data: average loss") == 3
    assert (tmp_path / "chart.png").stat().st_size > 1000
