"""The monitors, in Lightning's adapters and by themselves, and the batch that follows goodput."""

import os
import sys
from pathlib import Path

import pytest
import support
import torch
from dadplug.callbacks import monitors
from support import refuses
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dadplug
from dadplug.adaptive import adaptive_loader, reset_progress


def trains(mode: str, options: dict, monitor, steps: int, disturb: int | None = None) -> list[dict]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30))
    reduction = dadplug.GradientReduction(model, mode, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    logged = []
    monitor.start()
    for step in range(steps):
        monitor.begin()
        generator = torch.Generator().manual_seed(2 * step + reduction.site_rank)
        model(torch.randn(24, 40, generator=generator)).square().mean().backward()
        reduction.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        if step == disturb and reduction.site_rank == 1:
            with torch.no_grad():
                model[2].bias[0] += 1
        logged.append(monitor.end(reduction, 24))
    assert disturb is not None or reduction.first_difference() is None
    reduction.detach()
    return logged


@support.at_sites(2)
def test_a_rank_schedule_goes_by_a_table_of_steps_or_keeps_to_a_residual() -> None:
    def ranks(rank: int, steps: int, *args: object, **settings: object) -> list[float]:
        monitor = monitors.RankSchedule(*args, **settings)
        return [values["rank/limit"] for values in trains("rankdad", {"rank": rank}, monitor, steps)]

    assert ranks(9, 6, {0: 6, 4: 2}) == [6, 6, 6, 2, 2, 2]  # set after a step, for the next
    assert ranks(4, 60, residual=0.02, every=10, max_rank=12)[-1] == 12
    assert ranks(4, 60, residual=0.95, every=10, max_rank=12)[-1] <= 2  # of the gradient and all that has not been sent


def test_a_rank_schedule_says_what_it_needs():
    reduction = dadplug.GradientReduction(nn.Linear(3, 3), "dad")
    refuses(
        (lambda: monitors.RankSchedule(), "give one of them"),
        (lambda: monitors.RankSchedule(residual=2.0), "residual must lie between 0 and 1"),
        (lambda: setattr(reduction, "max_rank", 3), "mode 'dad' has no rank"),
    )


@support.at_sites(2)
def test_a_replica_check_names_the_parameter_that_differs() -> None:
    differs = "no longer equal after step 10: 2.bias differs"
    refuses(
        (lambda: trains("dad", {}, monitors.ReplicaCheck(every=5), 20, disturb=6), differs, dadplug.MismatchError),
    )


@support.at_sites(2)
def test_traffic_is_that_of_the_batch() -> None:
    first, *_, last = trains("rankdad", {"rank": 2}, monitors.TrafficMonitor(), 5)
    assert last["traffic/mb"] < first["traffic/mb"] * 1.5
    assert last["traffic/ratio"] > 3
    assert last["traffic/mb_per_s"] > 0
    assert 0 <= last["traffic/wait"] < 10


def recorder(logged: dict) -> object:
    """Return a logger that keeps what it gets."""
    import pytorch_lightning as pl

    class Logger(pl.loggers.logger.Logger):
        name = version = "recorder"

        def log_metrics(self, metrics, step=None):
            logged.update(metrics)

        def log_hyperparams(self, *args, **kwargs):
            pass

    return Logger()


@pytest.mark.parametrize("by_environment", [False, True])
@support.needs("pytorch_lightning")
@support.at_sites(2)
def test_lightnings_callbacks_reach_the_loggers(by_environment: bool) -> None:
    import lightning_zoo as zoo
    import pytorch_lightning as pl
    from dadplug.callbacks.pytorch_lightning import factory

    from dadplug import callbacks

    names = ("BatchTimer", "TrafficMonitor", "RankMonitor", "ReplicaCheck")
    if by_environment:
        os.environ["DADPLUG_CALLBACKS"] = ", ".join(names)
        chosen = factory()
        del os.environ["DADPLUG_CALLBACKS"]
    else:
        chosen = [getattr(callbacks, name)() for name in names] + [callbacks.RankSchedule({0: 2})]
    assert all(isinstance(each, pl.Callback) for each in chosen)
    logged: dict = {}
    current = pl.Trainer(
        strategy=dadplug.DADStrategy("rankdad", rank=2),
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        callbacks=chosen,
        logger=recorder(logged),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    current.fit(zoo.Plain(), zoo.loader(dtype=torch.float32))
    if current.is_global_zero:
        assert {"_timer/batch_time", "traffic/mb", "traffic/ratio", "traffic/wait", "rank/net.0"} <= set(logged)
        assert logged["rank/net.0"] == 2
        assert 0 <= logged["residual/mean"] < 1
        assert logged["kept/mean"] >= 0
        assert logged["_timer/exchange_time"] >= 0


def test_a_callback_that_the_environment_misnames_is_an_error(monkeypatch):
    pytest.importorskip("pytorch_lightning")
    from dadplug.callbacks.pytorch_lightning import factory

    assert factory() == []
    monkeypatch.setenv("DADPLUG_CALLBACKS", "BatchTimer,Trafic")
    with pytest.raises(ValueError, match="valid ones are BatchTimer, TrafficMonitor"):
        factory()


# The batch that follows goodput in Lightning and Catalyst: every sample once an epoch, and what is logged


SAMPLES, EPOCHS, LARGEST = 360, 2, 64


class EvenSteps:
    """A clock by which every step takes the same time, whatever its batch."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 6, generator=generator), torch.arange(SAMPLES) % 3)


def adapts_in_lightning(folder: str, settings: dict, length: int = SAMPLES):
    """Fit; return samples by epoch, lengths, what was logged, and the history."""
    import pytorch_lightning as pl
    from dadplug.callbacks import AdaptiveBatchSize

    import dadplug

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 3)
            self.seen: list[list[int]] = [[] for _ in range(EPOCHS)]
            self.validated: list[int] = []

        def training_step(self, batch, batch_idx):
            self.seen[self.current_epoch] += batch[0].tolist()
            return nn.functional.cross_entropy(self.net(batch[1]), batch[2])

        def validation_step(self, batch, batch_idx):
            self.validated.append(len(self.seen[self.current_epoch]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    reset_progress()
    torch.manual_seed(0)
    module, callback = Module(), AdaptiveBatchSize(LARGEST, (2, 60))
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive_loader, "time", EvenSteps())
        trainer = pl.Trainer(
            strategy=dadplug.DADStrategy("dad"),
            accelerator="cpu",
            devices=1,
            max_epochs=EPOCHS,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            callbacks=[callback],
            logger=False,
            **quiet | settings,
        )
        trainer.fit(module, DataLoader(data(), 4, shuffle=True), DataLoader(data(), 60))
    logged = {name for name in trainer.logged_metrics if name.startswith("batch/")}
    callback.picture(os.path.join(folder, f"lightning-{os.getpid()}.png"))
    history = callback._monitor.history
    return module.seen, module.validated, logged, history, trainer.global_step, callback.state_dict()


def check(found, steps: int | None = None) -> None:
    """Check what both sites have trained on."""
    for epoch in range(EPOCHS):
        assert sorted(found[0][0][epoch] + found[1][0][epoch]) == list(range(SAMPLES))
    sizes = [values["batch/size"] for values in found[0][-1]]
    assert sizes == [values["batch/size"] for values in found[1][-1]]
    assert sizes[0] == 8
    assert sizes[-1] > 24  # as far as the noise allows
    gains = [values["batch/gain"] for values in found[0][-1]]
    assert gains[0] == 1.0
    assert max(gains) > 1.0


def test_lightning_trains_on_every_sample_once(sites, tmp_path):
    support.need("pytorch_lightning")
    found = sites(2).run(adapts_in_lightning, str(tmp_path), {})
    names = {"size", "local", "gain", "noise_scale", "goodput", "progress"}
    for seen, validated, logged, history, steps, state in found:
        assert steps == len(history)
        assert {len(seen[0]), len(seen[1])} == {*validated}  # at the end of each epoch, and not before
        assert {name.removeprefix("batch/") for name in logged} >= names - {"noise_scale"}
        assert state["progress"] == pytest.approx(sum(values["batch/gain"] for values in history), rel=0.05)
    check([(each[0], each[3]) for each in found])
    assert len([path for path in tmp_path.iterdir() if path.read_bytes().startswith(b"\x89PNG")]) == 2


@support.needs("pytorch_lightning")
@support.at_sites(2)
def test_lightnings_settings_that_do_not_fit_are_refused() -> None:
    refuses(
        (lambda: adapts_in_lightning("", {"accumulate_grad_batches": 2}), "without accumulate_grad_batches"),
        (lambda: adapts_in_lightning("", {"use_distributed_sampler": False}), r"AdaptiveDataLoader\(source=\.\.\.\)"),
    )


def in_catalyst(folder: str, own: bool):
    """Train; return samples by epoch and the history."""
    import torch.distributed as dist
    from dadplug.callbacks import AdaptiveBatchSizeCallback
    from dadplug.runners import DistributedRunner

    seen: list[list[int]] = []

    class Runner(DistributedRunner):
        def handle_batch(self, batch):
            if self.is_train_loader:
                seen[-1].extend(batch["features"][:, 0].int().tolist())
            outputs = self.model(batch["features"][:, 1:])
            self.batch_metrics["loss"] = nn.functional.cross_entropy(outputs, batch["targets"])

        def on_epoch_start(self, runner):
            super().on_epoch_start(runner)
            seen.append([])

    reset_progress()
    torch.manual_seed(0)
    model, callback = nn.Linear(6, 3), AdaptiveBatchSizeCallback(LARGEST, (2, 60))
    numbers, inputs, targets = data().tensors
    pairs = TensorDataset(torch.cat([numbers[:, None] + own * dist.get_rank(), inputs], 1), targets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive_loader, "time", EvenSteps())
        runner = Runner(mode="dad")
        runner.train(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            loaders={"train": DataLoader(pairs, 4, shuffle=True), "valid": DataLoader(pairs, 60)},
            num_epochs=EPOCHS,
            callbacks=[callback],
            logdir=os.path.join(folder, f"logs-{dist.get_rank()}"),
        )
    callback.picture(os.path.join(folder, f"catalyst-{os.getpid()}.png"))
    assert "batch/size" in runner.loader_metrics or "batch/size" in runner.epoch_metrics["train"]
    return seen, callback._monitors[0].history


def test_catalyst_trains_on_every_sample_once(sites, tmp_path):
    support.need("catalyst")
    check(sites(2).run(in_catalyst, str(tmp_path), False))


@support.needs("catalyst")
@support.at_sites(2)
def test_data_of_each_sites_own_are_refused_in_catalyst(tmp_path: Path) -> None:
    refuses((lambda: in_catalyst(str(tmp_path), True), "each site has data of its own in loader 'train'"))


def test_a_picture_names_the_extra_that_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install .dadplug\[examples\]"):
        monitors.AdaptiveBatchSize(64).picture("batches.png")


def test_only_a_data_loader_with_a_batch_size_is_converted():
    from dadplug.adaptive.adaptive_loader import adaptive_loader

    refuses(
        (lambda: adaptive_loader([1, 2], 2, 0), "not that of a list"),
        (lambda: adaptive_loader(DataLoader(data(), batch_sampler=[[0, 1]]), 2, 0), "give its DataLoader a batch_size"),
    )
    found = adaptive_loader(DataLoader(data(), 5, shuffle=True, drop_last=True), 2, 0)
    assert found.current_batch_size == 10
    assert next(iter(found))[0].tolist() != list(range(10))
    plain = adaptive_loader(DataLoader(data(), 5), 1, 0)
    assert next(iter(plain))[0].tolist() == list(range(5))
