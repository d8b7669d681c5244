"""Lightning's strategy for asynchronous steps: DDP's training without staleness, one model at every evaluation."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

pl = pytest.importorskip("pytorch_lightning")

import lightning_zoo as zoo  # noqa: E402
from dadplug.runners import ParameterServerStrategy  # noqa: E402

import dadplug  # noqa: E402


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


def trains_all() -> None:
    for name in zoo.AUTOMATIC:
        watch = Watch()
        strategy = ParameterServerStrategy("rankdad", rank=2, wire="int8", staleness=4)
        _, current = zoo.fit(name, strategy, callbacks=[watch, Slow()], num_sanity_val_steps=1, gradient_clip_val=1.0)
        assert watch.found == [None] * 3, name
        assert watch.versions[0] == {0}
        assert all(len(each) == 1 for each in watch.versions)
        server = current.strategy.server
        assert 0 < server.version <= 2 * current.global_step  # contributions may be committed together
        assert server.first_difference() is None


def test_every_module_with_one_optimizer_trains(sites):
    sites(2).run(trains_all)


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


def normalises_over_sites() -> None:
    _, current = zoo.fit(Normalised, ParameterServerStrategy("dad", staleness=2), sync_batchnorm=True)
    server = current.strategy.server
    assert server.server_options.sync_batchnorm
    assert server.first_difference() is None
    committed = server._replica._norms.state_dict()
    assert [list(packed) for _, packed in committed.values()] == [["net.1"]] * 2


def test_the_trainers_option_normalises_over_sites(sites):
    sites(2).run(normalises_over_sites)


def uneven(folder: str) -> None:
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
        saver = pl.callbacks.ModelCheckpoint(f"{folder}/{number}", every_n_train_steps=5, save_top_k=-1)
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
        saved = torch.load(f"{folder}/{number}/{os.listdir(f'{folder}/{number}')[0]}", weights_only=True)
        assert len(saved["dadplug"]) == 2
    with pytest.raises(RuntimeError, match="all_gather was called in training, where the sites are at different steps"):
        zoo.fit(Gathers, ParameterServerStrategy("dad"), num_sanity_val_steps=0)


def test_sites_may_have_different_numbers_of_batches(tmp_path):
    import support

    with support.Sites(2) as group:  # the last case ends the sites' connections
        group.run(uneven, str(tmp_path))


class Used(zoo.Plain):
    """Remembers its training batches by epoch."""

    def on_train_epoch_start(self):
        self.epochs = [*getattr(self, "epochs", []), []]

    def training_step(self, batch, batch_idx):
        self.epochs[-1].append([row.tolist() for row in batch[0]])
        return super().training_step(batch, batch_idx)


def deals(folder: str) -> None:
    """Batches that are handed out: each sample once an epoch, in an order that goes on after a checkpoint."""
    data = zoo.loader(70)
    every = sorted(row.tolist() for row, _ in data.dataset)

    def train(epochs: int, resume=None):
        pl.seed_everything(0)
        watch = Watch()
        saver = pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
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
    assert train(2, f"{folder}/epoch=0.ckpt") == [second]
    cases = (
        ({"accumulate_grad_batches": 2}, "cannot accumulate gradients"),
        ({"val_check_interval": 3}, "meet at the end of an epoch only"),
    )
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            zoo.fit(Used, ParameterServerStrategy("dad", deal="shared"), data, **settings)


def test_batches_of_a_shared_data_set_are_used_once_an_epoch(tmp_path):
    import support

    with support.Sites(2) as group:  # the last cases end the sites' connections
        group.run(deals, str(tmp_path))


class Dies(pl.Callback):
    """Kills site 1 in the middle of an epoch; site 0 waits until it knows of it."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 3 and trainer.global_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + 100
        while batch_idx == 5 and trainer.strategy.server.present_sites == [0, 1]:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def loses_a_site() -> int:
    """Return the batches of site 0 up to the error."""
    losses = zoo.Losses()
    data = zoo.loader(200, shuffle=False)
    settings = {"callbacks": [losses, Dies()], "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    with pytest.raises(dadplug.SiteError, match=r"site 1 .* is gone, and epochs of a trainer need all sites"):
        zoo.fit("Plain", ParameterServerStrategy("dad", staleness=8), data, **settings)
    return len(losses.values)


def test_a_lost_site_ends_training_at_the_next_step():
    import support

    with support.Sites(2) as group:
        group.start(loses_a_site)
        first, second = group.outcomes()
    assert second.kind == "ended"
    assert first.kind == "ok", first.value
    assert first.value <= 5


def names_and_errors() -> None:
    current = zoo.trainer("parameter_server")
    assert type(current.strategy).__name__ == "ParameterServerStrategy"
    assert current.strategy.server_options == dadplug.parameter_server.ServerOptions()
    zoo.fit("Plain", "parameter_server", max_epochs=1)
    for wrong, message in (
        ({"staleness": -1}, "staleness must be"),
        ({"staleness": 1.5}, "staleness must be"),
        ({"quorum": 0}, "quorum must be"),
        ({"mode": "edad"}, "'edad' recomputes"),
        ({"mode": "powersgd"}, "'powersgd' sums"),
        ({"min_sites": 1}, "no option 'min_sites'"),
        ({"stalenes": 1}, "did you mean 'staleness'"),
    ):
        with pytest.raises(ValueError, match=message):
            ParameterServerStrategy(**wrong)
    for name, strategy, settings, message in (
        ("TwoOptimizers", ParameterServerStrategy(), {}, "automatic optimization"),
        ("Plain", ParameterServerStrategy(quorum=3), {}, "quorum=3 needs as many sites, and there are 2"),
    ):
        with pytest.raises(ValueError, match=message):
            zoo.fit(name, strategy, **settings)


def test_names_and_errors():
    import support

    with support.Sites(2) as group:
        group.run(names_and_errors)


def test_a_loss_scale_is_refused():
    strategy = ParameterServerStrategy()
    strategy.precision_plugin = type("Scaled", (), {"scaler": object(), "_desired_input_dtype": None})()
    strategy._lightning_module = zoo.Plain()
    with pytest.raises(ValueError, match="cannot train with a GradScaler"):
        strategy._check(SimpleNamespace())
