"""Hogwild! in Lightning and Catalyst: batches dealt once, one model in all processes, checkpoints, failures."""

import os
import time
from pathlib import Path

import lightning_zoo as zoo
import pytest
import pytorch_lightning as pl
import support
import torch
import torch.distributed as dist
from catalyst import dl
from catalyst.core.callback import Callback
from catalyst_training import data, net, run
from dadplug.runners import DistributedRunner, HogwildRunner, HogwildStrategy
from support import refuses
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dadplug.errors import MismatchError, ProcessFailedError
from dadplug.exchange.codec import gather_objects

SAMPLES, BATCH = 60, 4
BATCHES = SAMPLES // BATCH


class Rows(pl.LightningModule):
    """A table with a row for each sample; a step takes the learning rate from the rows of its batch, whatever else."""

    def __init__(self, slow: int | None = None, schedule: bool = False):
        super().__init__()
        self.table = torch.nn.Embedding(SAMPLES, 1, sparse=True)
        torch.nn.init.zeros_(self.table.weight)
        self.norm = torch.nn.BatchNorm1d(1)
        self.slow, self.schedule = slow, schedule
        self.rates, self.own = [], 0

    def training_step(self, batch, batch_idx):
        self.own += 1
        if dist.get_rank() == self.slow:
            time.sleep(0.02)
        value = self.table(batch[0]).sum()
        self.norm(batch[0].double()[:, None])
        self.log("loss", value, on_step=True, on_epoch=True, sync_dist=True)
        return value

    def validation_step(self, batch, batch_idx):
        self.log("total", self.table(batch[0]).sum(), sync_dist=True, reduce_fx="sum")

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.table.parameters(), lr=1.0)
        if not self.schedule:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "interval": "step"}}


def numbers(batch_size=BATCH, shuffle=True):
    return DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=batch_size, shuffle=shuffle)


class Watch(pl.Callback):
    """Remembers, at each end of an epoch, the step, and whether the processes hold the same values."""

    def __init__(self):
        self.steps, self.equal = [], []

    def on_train_epoch_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)
        states = gather_objects([value.clone() for value in pl_module.state_dict().values()])
        self.equal.append(all(torch.equal(one, other) for one, other in zip(*states, strict=True)))


@support.at_sites(2)
def test_batches_are_dealt_once_and_all_see_one_model() -> None:
    torch.manual_seed(0)
    rank = dist.get_rank()
    module, watch = Rows(slow=1), Watch()
    current = zoo.trainer("hogwild", callbacks=[watch], max_epochs=3, num_sanity_val_steps=1)
    current.fit(module, numbers(), numbers(shuffle=False))
    assert torch.equal(module.table.weight, torch.full((SAMPLES, 1), -3.0, dtype=torch.float64))
    assert watch.steps == [BATCHES, 2 * BATCHES, 3 * BATCHES]
    assert watch.equal == [True] * 3
    assert module.norm.num_batches_tracked == 3 * BATCHES
    assert current.callback_metrics["total"].item() == -3.0 * SAMPLES
    own = gather_objects(module.own)
    assert sum(own) == 3 * BATCHES
    assert own[0] > own[1] >= 3, own  # on demand: the slow one takes fewer
    assert current.callback_metrics["loss_epoch"] < 0
    assert not current.strategy.hogwild.running

    module = Rows()
    current = zoo.trainer(HogwildStrategy(), limit_train_batches=4, accumulate_grad_batches=2, max_epochs=1)
    current.fit(module, numbers(), numbers(shuffle=False))
    assert sorted(set(module.table.weight.flatten().tolist())) == [-0.5, 0.0]  # a loss is halved
    assert module.table.weight.sum() == -2.0 * BATCH
    assert current.limit_train_batches == 4
    first = current.validate(module, numbers(shuffle=False), verbose=False)
    assert first[0]["total"] == -2.0 * BATCH

    module = Rows(slow=rank, schedule=True)
    zoo.trainer("hogwild", max_epochs=2).fit(module, numbers())
    rates = sorted((rate for part in gather_objects(module.rates) for rate in part), reverse=True)
    expected = [1 - step / (2 * BATCHES) for step in range(2 * BATCHES)]
    assert rates == pytest.approx(expected, abs=2 / BATCHES)  # two processes may read the same number of steps
    assert module.rates == sorted(module.rates, reverse=True)


@support.at_sites(2)
def test_every_module_with_one_optimizer_trains() -> None:
    for name in zoo.AUTOMATIC:
        watch, valid = Watch(), zoo.loader(24, seed=1, shuffle=False)
        state = "own" if name in ("Tied", "Recurrent") else "shared"
        settings = {"callbacks": [watch], "max_epochs": 3, "gradient_clip_val": 1.0}
        module, current = zoo.fit(name, HogwildStrategy(state), **settings)
        assert watch.steps == [8, 16, 24], name
        assert watch.equal == [True] * 3, name
        assert gather_objects(current.global_step) == [24, 24]
        found = {key: float(value) for key, value in current.callback_metrics.items()}
        for key, value in current.validate(module, valid, verbose=False)[0].items():
            assert found[key] == pytest.approx(value, abs=1e-12), name


class Seen(pl.Callback):
    """Copies of the states of model and optimizer at the start of a training."""

    def on_train_start(self, trainer, pl_module):
        self.model = {name: value.clone() for name, value in pl_module.state_dict().items()}
        state = trainer.optimizers[0].state_dict()["state"]
        self.optimizer = {key: {name: torch.clone(v) for name, v in values.items()} for key, values in state.items()}


@support.at_sites(2)
def test_checkpoints_and_resuming(tmp_path: Path) -> None:
    for state in ("shared", "own"):
        place = f"{tmp_path}/{state}"
        saver = pl.callbacks.ModelCheckpoint(place, monitor="valid", save_top_k=-1, filename="{epoch}-{step}")
        module = zoo.Plain().double()
        current = zoo.trainer(HogwildStrategy(state), callbacks=[saver], enable_checkpointing=True)
        current.fit(module, zoo.loader(), zoo.loader(24, shuffle=False))
        assert gather_objects(saver.best_model_path) == [saver.best_model_path] * 2
        last = f"{place}/epoch=1-step=16.ckpt"
        counts = [value["step"].item() for value in current.optimizers[0].state.values()]
        assert set(counts) == {16.0} if state == "shared" else sum(gather_objects(counts[0])) == 16.0
        loaded = torch.load(last, weights_only=False)
        assert all(torch.equal(loaded["state_dict"][name], value) for name, value in module.state_dict().items())
        before = current.optimizers[0].state_dict()["state"]

        other, seen = zoo.Plain().double(), Seen()
        again = zoo.trainer(HogwildStrategy(state), callbacks=[seen], max_epochs=3)
        again.fit(other, zoo.loader(), zoo.loader(24, shuffle=False), ckpt_path=last)
        assert all(torch.equal(value, module.state_dict()[name]) for name, value in seen.model.items())
        for place_, values in seen.optimizer.items():
            assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(before[place_][k])) for k, v in values.items())
        assert again.global_step == 24
        counts = [value["step"].item() for value in again.optimizers[0].state.values()]
        assert set(counts) == {24.0} if state == "shared" else sum(gather_objects(counts[0])) == 24.0


class Failing(Rows):
    def __init__(self, how: str):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        if dist.get_rank() == 0:
            time.sleep(0.02)  # so that the other process gets batches of each epoch
        if self.trainer.current_epoch == 1 and dist.get_rank() == 1 and batch_idx == 1:
            if self.how == "raise":
                raise KeyError("no such thing")
            self.trainer.should_stop = True
        if self.how == "gather":
            self.all_gather(torch.ones(1))
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.how == "skip" and batch_idx == 1 else None


@support.at_sites(2)
def test_a_process_that_asks_to_stop_stops_all() -> None:
    module = Failing("stop")
    current = zoo.trainer("hogwild", max_epochs=5)
    current.fit(module, numbers(), numbers(shuffle=False))
    assert current.current_epoch == 2  # the second epoch is the last one, also in the process that has not asked
    assert gather_objects(current.global_step) == [current.global_step] * 2
    assert BATCHES <= current.global_step <= 2 * BATCHES
    with pytest.raises(RuntimeError, match="all_gather was called in training, where the sites are at different steps"):
        zoo.trainer("hogwild").fit(Failing("gather"), numbers())


# What each site raises where process 1 has failed, by its number, and the type of the error
FAILED = (
    (r"^process 1 \(pid .* has failed: KeyError: 'no such thing', in epoch 1 after ", ProcessFailedError),
    ("no such thing", KeyError),
)


@support.at_sites(2)
def test_an_error_in_one_process_ends_the_others_and_names_it() -> None:
    words, error = FAILED[dist.get_rank()]
    words += rf".*of {BATCHES} \(samples " if error is ProcessFailedError else ""
    skips = "on_train_batch_start returned -1"
    refuses(
        (lambda: zoo.trainer("hogwild", max_epochs=5).fit(Failing("raise"), numbers()), words, error),
        (lambda: zoo.trainer("hogwild", max_epochs=5).fit(Failing("skip"), numbers()), skips, RuntimeError),
    )


@support.at_sites(2)
def test_refusals_come_before_the_training() -> None:
    def fit(module=None, loader=None, **settings):
        zoo.trainer("hogwild", **settings).fit(module or Rows(), loader or numbers(), numbers())

    saver = pl.callbacks.ModelCheckpoint(os.devnull, every_n_train_steps=5)
    lbfgs, strategy = Rows(), HogwildStrategy()
    lbfgs.configure_optimizers = lambda: torch.optim.LBFGS(lbfgs.parameters())
    strategy.parallel_devices = [torch.device("cuda")]
    refuses(
        (lambda: fit(max_steps=5), "max_steps and fast_dev_run count"),
        (lambda: fit(fast_dev_run=True), "max_steps and fast_dev_run count"),
        (lambda: fit(val_check_interval=0.5), "val_check_interval must be 1.0"),
        (lambda: fit(sync_batchnorm=True), "use_distributed|running statistics are shared"),
        (
            lambda: fit(callbacks=[saver], enable_checkpointing=True),
            "would write checkpoints while others write theirs",
        ),
        (lambda: fit(max_time="00:01:00:00"), "max_time asks in each of them"),
        (lambda: fit(zoo.TwoOptimizers().double(), zoo.loader()), "automatic optimization and one optimizer"),
        (lambda: fit(loader=numbers(SAMPLES)), "too short for 2 processes"),
        (lambda: fit(loader={"a": numbers(), "b": numbers()}), "one training loader"),
        (lambda: fit(loader=[torch.arange(3)]), "batches of a DataLoader can be dealt"),
        (lambda: fit(lbfgs), "L-BFGS evaluates the loss several times"),
        (lambda: HogwildStrategy("mine"), "unknown state 'mine'"),
        (lambda: HogwildStrategy(threads=0), "threads must be"),
        (strategy._check_devices, "memory of CPU processes, and this trainer uses cuda"),
        error=(ValueError, TypeError),
    )


# Catalyst's runner for Hogwild!: batches dealt once, one model after each training loader, checkpoints, failures


class RowsOfDicts(nn.Module):
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


class CatalystWatch(Callback):
    """Remembers, after each loader, whether the processes hold the same values."""

    def __init__(self):
        super().__init__(order=100)
        self.equal, self.updates = [], 0

    def on_batch_end(self, runner):
        self.updates += runner.is_train_loader and runner.update_due

    def on_loader_end(self, runner):
        states = gather_objects([value.clone() for value in runner.model.state_dict().values()])
        self.equal.append(all(torch.equal(one, other) for one, other in zip(*states)))


@support.at_sites(2)
def test_catalyst_deals_batches_once_and_all_see_one_model() -> None:
    for accumulate in (1, 2):
        model, watch = RowsOfDicts(), CatalystWatch()
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


def train_saving(place: str, state: str, epochs: int, resume=None) -> tuple:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    saver = dl.CheckpointCallback(logdir=place, mode="runner", loader_key="valid", metric_key="loss", minimize=True)
    runner = run(HogwildRunner(state=state), model, optimizer, [saver], epochs=epochs, resume=resume)
    return runner, model, optimizer.state[model[0].weight]["step"].item()


@support.at_sites(2)
def test_checkpoints_and_resuming_in_catalyst(tmp_path: Path) -> None:
    for state in ("shared", "own"):
        place = f"{tmp_path}/{state}"
        for epochs, resume in ((2, None), (3, f"{place}/runner.last.pth")):
            runner, model, count = train_saving(place, state, epochs, resume)
            assert runner.epoch_step == epochs
            assert runner.loader_metrics["loss"] < 1.3
            assert model[1].num_batches_tracked == epochs * 9
            assert count == epochs * 9 if state == "shared" else sum(gather_objects(count)) == epochs * 9


class CatalystFailing(Callback):
    def __init__(self):
        super().__init__(order=100)

    def on_batch_end(self, runner):
        if runner.epoch_step == 2 and dist.get_rank() == 1:
            raise KeyError("no such thing")


@support.at_sites(2)
def test_an_error_in_one_process_of_catalyst_ends_the_others_and_names_it() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refuses((lambda: run(HogwildRunner(), model, optimizer, [CatalystFailing()], epochs=5), *FAILED[dist.get_rank()]))


@support.at_sites(2)
def test_refusals_of_catalyst_come_before_the_training() -> None:
    model = net()
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, net()))
    own = {"train": DataLoader(data(70, dist.get_rank()), 8), "valid": DataLoader(data(30, 1), 8)}
    scheduled = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(other, 0.9)}
    batches = [dl.SchedulerCallback(mode="batch")]
    different = "different data sets in loader 'train'"
    refuses(
        (lambda: run(HogwildRunner(), model, other), "holds no parameter of the model"),
        (lambda: run(HogwildRunner(), model, optimizer, loaders=own), different, MismatchError),
        (lambda: run(HogwildRunner(), model, optimizer, batches, **scheduled), "mode 'batch'"),
        (lambda: HogwildRunner(state="mine"), "unknown state 'mine'"),
    )


def test_one_process_trains_as_distributed_runner():
    models = [net(), net()]
    for runner, model in zip((DistributedRunner(mode="dsgd"), HogwildRunner()), models):
        callbacks = [dl.BackwardCallback("loss"), dl.OptimizerCallback("loss", accumulation_steps=2)]
        run(runner, model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks)
    for one, other in zip(models[0].parameters(), models[1].parameters()):
        assert torch.allclose(one, other, atol=1e-6)


# Hogwild! in programs whose processes Lightning itself starts: new programs, spawned and forked processes


# Each step takes 1 from the rows of its batch, so that the table counts how often each sample was used.
PROGRAM = """
import sys, warnings
import torch
from torch.utils.data import DataLoader, TensorDataset
warnings.filterwarnings("ignore")
import pytorch_lightning as pl
import dadplug

class Rows(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(40, 1, sparse=True)
        torch.nn.init.zeros_(self.table.weight)

    def training_step(self, batch, batch_idx):
        return self.table(batch[0]).sum()

    def on_train_end(self):
        sys.stdout.write(f"steps {self.trainer.global_step};\\n")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

if __name__ == "__main__":
    trainer = pl.Trainer(strategy=sys.argv[1], accelerator="cpu", devices=2, max_epochs=3, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    module = Rows()
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True))
    counts = -module.table.weight.detach().flatten()
    sys.stdout.write(f"counts {int(counts.min())} {int(counts.max())};\\n")
"""


@pytest.mark.parametrize(("strategy", "processes"), [("hogwild", 2), ("hogwild_spawn", 1), ("hogwild_notebook", 1)])
def test_each_sample_is_used_once_an_epoch_by_processes_of_lightnings_launchers(tmp_path, strategy, processes):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    env = {"MASTER_PORT": str(support.free_port())}
    # Lightning's notebook launcher refuses to fork where CUDA was asked for before the process itself was forked, as
    # the import of Catalyst does in the server of programs with trainers.
    preload = [] if strategy == "hogwild_notebook" else ["pytorch_lightning"]
    (only,) = support.run_programs([[str(path), strategy]], env=env, preload=preload)
    assert only.status == 0, only.errors
    assert only.output.count("steps 30;") == 2
    assert only.output.count("counts 3 3;") == processes
