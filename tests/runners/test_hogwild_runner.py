"""Catalyst's runner for Hogwild!: batches dealt once, one model after each training loader, checkpoints, failures."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("catalyst")
from catalyst import dl
from catalyst.core.callback import Callback
from catalyst_training import data, net, run
from dadplug.runners import DistributedRunner, HogwildRunner

from dadplug.errors import MismatchError, ProcessFailedError
from dadplug.exchange.codec import gather_objects

SAMPLES, BATCH = 60, 4
BATCHES = SAMPLES // BATCH


class Rows(nn.Module):
    """A table with a row for each sample, whose gradient depends on no other."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(SAMPLES, 1, sparse=True)
        nn.init.zeros_(self.table.weight)

    def forward(self, ids):
        return self.table(ids)[:, 0]


class Summed(nn.Module):
    def forward(self, outputs, targets):
        return outputs.sum()


class Watch(Callback):
    """Remembers, after each loader, whether the processes hold the same values."""

    def __init__(self):
        super().__init__(order=100)
        self.equal, self.updates = [], 0

    def on_batch_end(self, runner):
        self.updates += runner.is_train_loader and runner.update_due

    def on_loader_end(self, runner):
        states = gather_objects([value.clone() for value in runner.model.state_dict().values()])
        self.equal.append(all(torch.equal(one, other) for one, other in zip(*states)))


def deals() -> None:
    for accumulate in (1, 2):
        model, watch = Rows(), Watch()
        numbers = TensorDataset(torch.arange(SAMPLES), torch.zeros(SAMPLES))
        loaders = {"train": DataLoader(numbers, BATCH, shuffle=True), "valid": DataLoader(numbers, BATCH)}
        callbacks = [watch]
        if accumulate > 1:
            callbacks += [dl.BackwardCallback("loss"), dl.OptimizerCallback("loss", accumulation_steps=accumulate)]
        runner = HogwildRunner()
        run(runner, model, torch.optim.SGD(model.parameters(), lr=1.0), callbacks, loaders, 3, Summed())
        assert watch.equal == [True] * 6
        updates = sum(gather_objects(watch.updates))
        assert not runner.hogwild.running
        if accumulate == 1:
            assert torch.equal(model.table.weight, torch.full((SAMPLES, 1), -3.0))
            assert updates == 3 * BATCHES
            assert runner.loader_metrics["loss"] == pytest.approx(-11.6)  # 30 samples a process, the last two apart
        else:  # the mean of two batches, or the last one of a process alone
            assert set(model.table.weight.flatten().tolist()) <= {-1.5, -2.0, -2.5, -3.0}
            assert 3 * BATCHES / 2 < updates <= 3 * BATCHES / 2 + 3
            assert model.table.weight.mean().item() == pytest.approx(-updates * BATCH / SAMPLES)


def test_batches_are_dealt_once_and_all_see_one_model(sites):
    sites(2).run(deals)


def train_saving(place: str, state: str, epochs: int, resume=None) -> tuple:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    saver = dl.CheckpointCallback(logdir=place, mode="runner", loader_key="valid", metric_key="loss", minimize=True)
    runner = run(HogwildRunner(state=state), model, optimizer, [saver], epochs=epochs, resume=resume)
    return runner, model, optimizer.state[model[0].weight]["step"].item()


def checkpointed(folder: str) -> None:
    for state in ("shared", "own"):
        place = f"{folder}/{state}"
        for epochs, resume in ((2, None), (3, f"{place}/runner.last.pth")):
            runner, model, count = train_saving(place, state, epochs, resume)
            assert runner.epoch_step == epochs
            assert runner.loader_metrics["loss"] < 1.3
            assert model[1].num_batches_tracked == epochs * 9
            assert count == epochs * 9 if state == "shared" else sum(gather_objects(count)) == epochs * 9


def test_checkpoints_and_resuming(sites, tmp_path):
    sites(2).run(checkpointed, str(tmp_path))


class Failing(Callback):
    def __init__(self):
        super().__init__(order=100)

    def on_batch_end(self, runner):
        if runner.epoch_step == 2 and dist.get_rank() == 1:
            raise KeyError("no such thing")


def fails() -> str:
    model = net()
    try:
        run(HogwildRunner(), model, torch.optim.SGD(model.parameters(), lr=0.1), [Failing()], epochs=5)
    except (KeyError, ProcessFailedError) as error:
        return f"{type(error).__name__} {error}"
    return "no error"


def test_an_error_in_one_process_ends_the_others_and_names_it(sites):
    first, second = sites(2).run(fails)
    assert second == "KeyError 'no such thing'"
    assert first.startswith("ProcessFailedError process 1 (pid ")
    assert "has failed: KeyError: 'no such thing', in epoch 1 after " in first


def refusals() -> None:
    def refused(kind, message, optimizer=None, callbacks=(), **settings):
        model = net()
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(kind, match=message):
            run(HogwildRunner(), model, optimizer, callbacks, **settings)

    refused(ValueError, "holds no parameter of the model", torch.optim.SGD(net().parameters(), lr=0.1))
    own = {"train": DataLoader(data(70, dist.get_rank()), 8), "valid": DataLoader(data(30, 1), 8)}
    refused(MismatchError, "different data sets in loader 'train'", loaders=own)
    schedule = torch.optim.SGD(net().parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(schedule, 0.9)
    refused(ValueError, "mode 'batch'", callbacks=[dl.SchedulerCallback(mode="batch")], scheduler=scheduler)
    with pytest.raises(ValueError, match="unknown state 'mine'"):
        HogwildRunner(state="mine")


def test_refusals_come_before_the_training(sites):
    sites(2).run(refusals)


def test_one_process_trains_as_distributed_runner():
    models = [net(), net()]
    for runner, model in zip((DistributedRunner(mode="dsgd"), HogwildRunner()), models):
        callbacks = [dl.BackwardCallback("loss"), dl.OptimizerCallback("loss", accumulation_steps=2)]
        run(runner, model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks)
    for one, other in zip(models[0].parameters(), models[1].parameters()):
        assert torch.allclose(one, other, atol=1e-6)
