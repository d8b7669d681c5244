"""Training by a server and workers, processes of this machine, by one call; and its example."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import support
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dadplug import ProcessFailedError
from dadplug.parameter_server import launch_ps_and_workers

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "parameter_server.py"


def samples(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


class Deadly(Dataset):
    """Data at which some workers are killed; their seeds are those of the training plus their ranks."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.data, self.ranks, self.count = samples(160), ranks, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int):
        self.count += 1
        if self.count == 50 and torch.initial_seed() - 42 in self.ranks:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.data[place]


def test_workers_train_one_model(capfd):
    model = network()
    before = [parameter.clone() for parameter in model.parameters()]
    loader, test = DataLoader(samples(256), batch_size=8, shuffle=True), DataLoader(samples(100, 1), 50)
    outcome = launch_ps_and_workers(3, 2, 0, loader, test, model=model, lr=0.3, mode="dad", staleness=4)
    assert outcome.model is model
    assert all(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    right = sum(int((model(inputs).argmax(1) == targets).sum()) for inputs, targets in test)
    assert outcome.accuracy == outcome.accuracies[-1] == right / 100 > 0.8
    assert len(outcome.accuracies) == 2
    output = capfd.readouterr().out
    assert f"epoch 2 of 2 by 2 worker(s): test accuracy {outcome.accuracy:.2%}, elapsed time" in output


class Recorded(Dataset):
    """Data whose samples write their numbers to a file when they are loaded."""

    def __init__(self, path: Path) -> None:
        self.data, self.path = samples(64), path

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int):
        with self.path.open("a") as file:
            file.write(f"{place}\n")
        return self.data[place]


def test_workers_may_share_the_batches(tmp_path):
    loader, test = DataLoader(Recorded(tmp_path / "loaded"), 8, shuffle=True), DataLoader(samples(9, 1), 9)
    launch_ps_and_workers(3, 2, 0, loader, test, model=network(), mode="dad", deal="shared")
    loaded = [int(line) for line in (tmp_path / "loaded").read_text().split()]
    assert sorted(loaded) == sorted(2 * list(range(64)))


def test_a_killed_worker_is_named_and_the_others_go_on():
    test = DataLoader(samples(100, 1), 50)
    with pytest.warns(UserWarning, match=r"worker 2 .* has failed: it has ended with status -9; the others go on"):
        outcome = launch_ps_and_workers(3, 2, 0, DataLoader(Deadly((2,)), 8), test, model=network(), lr=0.3)
    assert outcome.accuracy > 0.7
    with pytest.raises(ProcessFailedError, match=r"worker 1 .* has ended with status -9"):
        launch_ps_and_workers(2, 1, 0, DataLoader(Deadly((1,)), 8), test, model=network())


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((1, 1, 0), {}, "world_size must be"),
        ((2, 0, 0), {}, "epochs_per_worker must be"),
        ((2, 1, -1), {}, "num_gpus must be"),
        ((2, 1, 999), {}, "num_gpus=999"),
        ((2, 1, 0), {"quorum": 2}, "quorum=2 needs as many workers, and there are 1"),
        ((2, 1, 0), {"mode": "edad"}, "'edad' recomputes"),
    ],
)
def test_arguments_are_checked_before_processes_start(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        launch_ps_and_workers(*arguments, None, None, **options)


def test_the_example_compares_one_worker_with_four(capfd):
    support.load(str(EXAMPLE)).main(["--samples", "64", "--batch-size", "16"])
    output = capfd.readouterr().out
    assert "epoch 4 of 4 by 1 worker(s): test accuracy" in output
    assert "Elapsed time model 1 (1 worker x 4 epochs):" in output
    assert "Elapsed time model 2 (4 workers x 1 epoch):" in output
