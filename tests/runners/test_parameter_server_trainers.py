"""Asynchronous steps in Lightning and Catalyst: one model at every evaluation, checkpoints, sites that return."""

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import lightning_zoo as zoo
import pytest
import pytorch_lightning as pl
import support
import torch
import torch.distributed as dist
from catalyst import dl
from catalyst.core.callback import Callback
from catalyst_training import data, net, run
from dadplug.runners import ParameterServerRunner, ParameterServerStrategy
from fleet import Fleet
from json_lines import LineLog
from returning_steps import BATCH, EPOCHS, LOST, SAMPLES
from support import refuses
from torch.utils.data import DataLoader

import dadplug

HELPERS = Path(__file__).resolve().parents[1] / "helpers"


class Watch(pl.Callback):
    """Remembers, at each evaluation, whether the sites differ, and the versions."""

    def __init__(self):
        self.found, self.versions = [], []

    def on_validation_epoch_start(self, trainer, pl_module):
        server = trainer.strategy.server
        self.found.append(server.first_difference())
        self.versions.append(set(server.gather_objects(server.version)))


class Slow(pl.Callback):
    """Makes site 1 slow."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        time.sleep(0.005 * trainer.global_rank)


class Logging(zoo.Metrics):
    """Counts its own batches, and logs a metric of all sites in each step."""

    def training_step(self, batch, batch_idx):
        self.batches = getattr(self, "batches", 0) + 1
        loss = super().training_step(batch, batch_idx)
        self.log("own", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class Gathers(zoo.Plain):
    """Waits for the other sites in each step."""

    def training_step(self, batch, batch_idx):
        self.all_gather(batch[0])


class Normalised(zoo.Plain):
    """Has batch normalisation, and skips a batch at one site."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(self.net[0].out_features))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 and self.global_rank == 1 else loss


@support.at_sites(2)
def test_the_trainers_option_normalises_over_sites() -> None:
    _, current = zoo.fit(Normalised, ParameterServerStrategy("dad", staleness=2), sync_batchnorm=True)
    server = current.strategy.server
    assert server.server_options.sync_batchnorm
    assert server.first_difference() is None
    committed = server._norms.state_dict()
    assert [list(packed) for _, packed in committed.values()] == [["net.1"]] * 2


@support.at_sites(2, own=True)  # the last case ends the sites' connections
def test_sites_may_have_different_numbers_of_batches(tmp_path: Path) -> None:
    """Different numbers of batches: no site waits for ever, whatever ends an epoch or begins an evaluation."""
    rank = int(os.environ["RANK"])
    data = zoo.loader(24 if rank else 64, shuffle=False)
    cases = (
        {"accumulate_grad_batches": 2},
        {"limit_val_batches": 0},
        {"max_steps": 11, "max_epochs": -1},
        {"val_check_interval": 3, "max_epochs": 1},
        {"val_check_interval": 0.5, "limit_train_batches": 6},
    )
    for number, case in enumerate(cases):
        watch = Watch()
        saver = pl.callbacks.ModelCheckpoint(f"{tmp_path}/{number}", every_n_train_steps=5, save_top_k=-1)
        settings = {"max_epochs": 2, "callbacks": [watch, Slow(), saver], "enable_checkpointing": True} | case
        strategy = ParameterServerStrategy("dad", staleness=1, timeout=60.0)
        module, current = zoo.fit(Logging, strategy, data, use_distributed_sampler=False, **settings)
        assert not watch.found or set(watch.found) == {None}
        assert all(len(each) == 1 for each in watch.versions)
        server = strategy.server
        assert len(set(server.gather_objects(current.global_step))) == 1
        assert len(set(server.gather_objects(float(current.callback_metrics["own_epoch"])))) == 1
        batches = server.gather_objects(module.batches)
        assert batches[1] < batches[0]
        saved = torch.load(f"{tmp_path}/{number}/{os.listdir(f'{tmp_path}/{number}')[0]}", weights_only=True)
        assert len(saved["dadplug"]) == 2
    with pytest.raises(RuntimeError, match="all_gather was called in training, where the sites are at different steps"):
        zoo.fit(Gathers, ParameterServerStrategy("dad"), num_sanity_val_steps=0)


class Used(zoo.Plain):
    """Remembers its training batches by epoch."""

    def on_train_epoch_start(self):
        self.epochs = [*getattr(self, "epochs", []), []]

    def training_step(self, batch, batch_idx):
        self.epochs[-1].append([row.tolist() for row in batch[0]])
        return super().training_step(batch, batch_idx)


@support.at_sites(2, own=True)  # the last cases end the sites' connections
def test_batches_of_a_shared_data_set_are_used_once_an_epoch(tmp_path: Path) -> None:
    """Batches that are handed out: each sample once an epoch, in an order that goes on after a checkpoint."""
    data = zoo.loader(70)
    every = sorted(row.tolist() for row, _ in data.dataset)

    def train(epochs: int, resume=None):
        pl.seed_everything(0)
        watch = Watch()
        saver = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        settings = {"max_epochs": epochs, "callbacks": [watch, Slow(), saver], "enable_checkpointing": True}
        strategy = ParameterServerStrategy("dad", deal="shared", staleness=2)
        module, current = zoo.fit(Used, strategy, data, resume, **settings)
        assert set(watch.found) == {None}
        assert all(len(each) == 1 for each in watch.versions)
        assert len(set(strategy.server.gather_objects(current.global_step))) == 1
        assert current.global_step == epochs * len(data)
        sets = []
        for epoch in module.epochs:
            by_site = strategy.server.gather_objects(epoch)
            batches = [batch for found in by_site for batch in found]
            assert sorted(row for batch in batches for row in batch) == every
            sets.append(sorted(map(sorted, batches)))
        return sets

    first, second = train(2)
    assert first != second
    assert train(2, f"{tmp_path}/epoch=0.ckpt") == [second]

    def fit(**settings):
        zoo.fit(Used, ParameterServerStrategy("dad", deal="shared"), data, **settings)

    refuses(
        (lambda: fit(accumulate_grad_batches=2), "cannot accumulate gradients"),
        (lambda: fit(val_check_interval=3), "meet at the end of an epoch only"),
    )


class Dies(pl.Callback):
    """Kills site 1 in the middle of an epoch; site 0 waits until it knows of it."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 3 and trainer.global_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        support.until(lambda: batch_idx != 5 or trainer.strategy.server.present_sites != [0, 1], timeout=100.0)


def loses_a_site() -> int:
    """Return the batches of site 0 up to the error."""
    losses = zoo.Losses()
    data = zoo.loader(200, shuffle=False)
    settings = {"callbacks": [losses, Dies()], "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    with pytest.raises(dadplug.SiteError, match=r"site 1 .* is gone, and epochs of a trainer need all sites"):
        zoo.fit("Plain", ParameterServerStrategy("dad", staleness=8), data, **settings)
    return len(losses.values)


def test_a_lost_site_ends_training_at_the_next_step():
    with support.Sites(2) as group:
        group.start(loses_a_site)
        first, second = group.outcomes()
    assert second.kind == "ended"
    assert first.kind == "ok", first.value
    assert first.value <= 5


@support.at_sites(2, own=True)
def test_names_and_errors() -> None:
    current = zoo.trainer("parameter_server")
    assert type(current.strategy).__name__ == "ParameterServerStrategy"
    assert current.strategy.server_options == dadplug.parameter_server.ServerOptions()
    zoo.fit("Plain", "parameter_server", max_epochs=1)
    scaled = ParameterServerStrategy()
    scaled.precision_plugin = type("Scaled", (), {"scaler": object(), "_desired_input_dtype": None})()
    scaled._lightning_module = zoo.Plain()
    few = ParameterServerStrategy(quorum=3)
    refuses(
        (lambda: ParameterServerStrategy(staleness=-1), "staleness must be"),
        (lambda: ParameterServerStrategy(staleness=1.5), "staleness must be"),
        (lambda: ParameterServerStrategy(quorum=0), "quorum must be"),
        (lambda: ParameterServerStrategy(mode="edad"), "'edad' recomputes"),
        (lambda: ParameterServerStrategy(mode="powersgd"), "'powersgd' sums"),
        (lambda: ParameterServerStrategy(min_sites=1), "no option 'min_sites'"),
        (lambda: ParameterServerStrategy(stalenes=1), "did you mean 'staleness'"),
        (lambda: scaled._check(SimpleNamespace()), "cannot train with a GradScaler"),
        (lambda: zoo.fit("TwoOptimizers", ParameterServerStrategy()), "automatic optimization"),
        (lambda: zoo.fit("Plain", few), "quorum=3 needs as many sites, and there are 2"),
    )


# Catalyst's runner for asynchronous steps: one model after each training loader, checkpoints, unequal sites


class CatalystWatch(Callback):
    """Makes site 1 slow; remembers, after each training loader, whether the sites differ."""

    def __init__(self):
        super().__init__(order=100)
        self.found, self.batches = [], 0

    def on_batch_start(self, runner):
        self.batches += runner.is_train_loader
        time.sleep(0.005 * dist.get_rank())

    def on_loader_start(self, runner):
        if not runner.is_train_loader:
            versions = set(runner.reduction.gather_objects(runner.reduction.version))
            self.found.append((runner.reduction.first_difference(), len(versions)))


class CatalystUsed(Callback):
    """Remembers the samples of this site's training batches; makes site 1 slow."""

    def __init__(self):
        super().__init__(order=0)
        self.epochs = []

    def on_loader_start(self, runner):
        if runner.is_train_loader:
            self.epochs.append([])

    def on_batch_start(self, runner):
        if runner.is_train_loader:
            self.epochs[-1] += [row.tolist() for row in runner.batch["features"]]
            time.sleep(0.005 * dist.get_rank())


@support.at_sites(2, own=True)  # the last cases end the sites' connections
def test_batches_of_a_shared_data_set_are_used_once_an_epoch_of_catalyst() -> None:
    """Batches that are handed out: each sample once an epoch, by whichever site."""
    model, used, watch = net(), CatalystUsed(), CatalystWatch()
    samples = data(70)
    loaders = {"train": DataLoader(samples, 8, shuffle=True), "valid": DataLoader(data(30, 9), 8)}
    runner = ParameterServerRunner(mode="dad", deal="shared", staleness=2)
    run(runner, model, torch.optim.Adam(model.parameters(), lr=0.01), [used, watch], loaders, epochs=2)
    assert watch.found == [(None, 1)] * 2
    every = sorted(row.tolist() for row, _ in samples)
    orders = []
    for epoch in used.epochs:
        by_site = runner.reduction.gather_objects(epoch)
        assert sorted(row for rows in by_site for row in rows) == every
        orders.append(by_site)
    assert orders[0] != orders[1]

    def refused(callbacks=(), **options):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run(ParameterServerRunner(deal="shared", **options), model, optimizer, callbacks, loaders)

    twice = [dl.OptimizerCallback(metric_key="loss", accumulation_steps=2), dl.BackwardCallback("loss")]
    refuses(
        (lambda: refused(split_data=False), "deal='shared' deals the batches of one"),
        (lambda: refused(twice), "cannot accumulate gradients"),
        error=(ValueError, dadplug.MismatchError),
    )


@support.at_sites(2)
def test_unequal_sites_hold_one_model() -> None:
    rank = dist.get_rank()
    for options in ({"wire": "int8", "rank": 4}, {"mode": "dsgd", "staleness": 1}):
        model, watch = net(rank), CatalystWatch()
        loaders = {"train": DataLoader(data(70 - 30 * rank, rank), 8), "valid": DataLoader(data(30, 9), 8)}
        runner = ParameterServerRunner(split_data=False, **options)
        run(runner, model, torch.optim.Adam(model.parameters(), lr=0.01), [watch], loaders, epochs=3)
        assert watch.found == [(None, 1)] * 3
        assert watch.batches == 3 * (5 if rank else 9)
        assert 0 < runner.reduction.version <= 3 * 14  # contributions may be committed together
        assert runner.loader_metrics["loss"] < 1.3
    refuses(
        (lambda: ParameterServerRunner(staleness=0.5), "staleness must be"),
        (lambda: ParameterServerRunner(mode="edad"), "'edad' recomputes"),
    )


# Sites that are killed in a trainer with a parameter server, and return in the midst of an epoch


def sites_of(folder: Path, trainer: str, over_hub: bool = False, **settings: object) -> Fleet:
    package = {"lightning": "pytorch_lightning"}.get(trainer, trainer)
    support.need(package)
    hub = "abc" if over_hub else nullcontext()
    settings |= {} if over_hub else {"url": f"tcp://127.0.0.1:{support.free_port()}"}
    return Fleet(folder, hub, str(HELPERS / f"returning_{trainer}.py"), [package], stops=False, **settings)


def check(lines: dict[str, list[dict]], deal: str, lost: int = LOST) -> None:
    """Check that replicas and metrics are equal, and that each contribution is committed once."""
    validations = {name: [each for each in lines[name] if "validation" in each] for name in lines}
    one, other = (str(rank) for rank in range(3) if rank != lost)
    assert [each["validation"] for each in validations[one]] == [*range(EPOCHS)]
    assert validations[other] == validations[one]
    assert validations["back"] == validations[one][1:]  # it has returned in the second epoch
    assert validations[one][0] == validations[str(lost)][0]
    assert [each["present"] for each in validations[one]] == [[0, 1, 2]] * EPOCHS
    logs = {name: [each for each in lines[name] if "commit" in each] for name in lines}
    assert logs[other] == logs[one]
    assert logs["back"] == logs[one][-len(logs["back"]) :]
    committed = [(each["site"], each["number"]) for each in logs[one]]
    steps = {name: [each for each in lines[name] if "ids" in each] for name in lines}
    numbers = sorted(number for site, number in committed if site == lost)
    assert numbers == [*range(len(numbers))]  # each once, over both processes
    assert len(set(committed)) == len(committed)
    sent = len(numbers) - len(steps["back"])  # of the process that was killed
    assert 0 < sent <= len(steps[str(lost)])
    used = steps[one] + steps[other] + steps[str(lost)][:sent] + steps["back"]
    assert len(used) == len(committed)
    first = steps["back"][0]
    assert first["epoch"] == 1
    if deal == "shared":
        for epoch in range(EPOCHS):
            ids = [index for step in used if step["epoch"] == epoch for index in step["ids"]]
            assert sorted(ids) == [*range(SAMPLES)]
    else:
        begun = 32 * lost + first["batch"] * BATCH
        assert first["ids"] == [*range(begun, begun + BATCH)]
        last = [step["ids"] for step in steps["back"] if step["epoch"] == 2]
        assert last == [[*range(at, at + BATCH)] for at in range(32 * lost, 32 * lost + 32, BATCH)]


def test_where_no_site_can_return_it_is_an_error(tmp_path, monkeypatch):
    from dadplug.runners import exchanges

    server = SimpleNamespace(return_address="", detach=lambda: None)
    monkeypatch.setattr(exchanges, "ParameterServer", lambda *_, **__: server)
    path = tmp_path / "address"
    with pytest.raises(ValueError, match=r"where messages are sealed.*leave return_file out"):
        exchanges.ReturnFile(path).build(SimpleNamespace(world_size=2, rounds=SimpleNamespace()), None)
    alone = SimpleNamespace(world_size=1, rounds=SimpleNamespace())
    assert exchanges.ReturnFile(path).build(alone, None) is server
    assert not path.exists()
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a file of return_file="):
        exchanges.ReturnFile(path)


def test_without_site_0_the_others_name_it_and_start_anew(tmp_path):
    """The trainer is Catalyst; its strategy for Lightning uses the same file and log."""
    with sites_of(tmp_path, "catalyst", deal="own", ends=True) as fleet:
        fleet.start("abc")
        fleet.end("a", -9)
        for name in "bc":
            assert "SiteError: site 0" in (errors := fleet.end(name, 1))
            assert "it has the sequencer, without which training cannot go on" in errors
        fleet.start("b")
        assert "cannot be reached, it may have ended" in fleet.end("b", 1)
    assert [(tmp_path / name / "address").exists() for name in "abc"] == [True, False, True]


@pytest.mark.parametrize(
    ("trainer", "deal", "hub", "lost"),
    [
        ("lightning", "shared", False, 2),
        ("lightning", "own", True, 0),
        ("catalyst", "shared", True, 0),
        ("catalyst", "own", False, 2),
    ],
)
def test_a_site_returns_into_the_midst_of_an_epoch(tmp_path, trainer, deal, hub, lost):
    with sites_of(tmp_path, trainer, hub, deal=deal, lost=lost) as fleet:
        fleet.start("abc")
        fleet.end("abc"[lost], -9)
        assert (tmp_path / "abc"[lost] / "address").exists()
        fleet.start("abc"[lost], back=True)
        fleet.end("abc")
    assert not [*tmp_path.glob("*/address")]
    back = {"back": LineLog(tmp_path / "abc"[lost] / "back.jsonl").read()}
    check({str(rank): fleet.written(name) for rank, name in enumerate("abc")} | back, deal, lost)
