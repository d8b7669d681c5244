"""The monitors, in Lightning's adapters and by themselves; in Catalyst's, see test_distributed_runner_callbacks."""

from __future__ import annotations

import os

import pytest
import torch
from dadplug.callbacks import monitors
from torch import nn

import dadplug


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


def by_table() -> list[float]:
    monitor = monitors.RankSchedule({0: 6, 4: 2})
    return [values["rank/limit"] for values in trains("rankdad", {"rank": 9}, monitor, 6)]


def test_a_rank_schedule_goes_by_a_table_of_steps(sites):
    for ranks in sites(2).run(by_table):
        assert ranks == [6, 6, 6, 2, 2, 2]  # set after a step, for the next


def by_residual(target: float) -> list[float]:
    monitor = monitors.RankSchedule(residual=target, every=10, max_rank=12)
    return [values["rank/limit"] for values in trains("rankdad", {"rank": 4}, monitor, 60)]


def test_a_rank_schedule_keeps_to_a_residual(sites):
    for ranks in sites(2).run(by_residual, 0.02):
        assert ranks[-1] == 12
    for ranks in sites(2).run(by_residual, 0.95):
        assert ranks[-1] == 1


def test_a_rank_schedule_says_what_it_needs(sites):
    with pytest.raises(ValueError, match="give one of them"):
        monitors.RankSchedule()
    with pytest.raises(ValueError, match="residual must lie between 0 and 1"):
        monitors.RankSchedule(residual=2.0)
    reduction = dadplug.GradientReduction(nn.Linear(3, 3), "dad")
    with pytest.raises(ValueError, match="mode 'dad' has no rank"):
        reduction.max_rank = 3


def drifts() -> str:
    with pytest.raises(dadplug.MismatchError) as caught:
        trains("dad", {}, monitors.ReplicaCheck(every=5), 20, disturb=6)
    return str(caught.value)


def test_a_replica_check_names_the_parameter_that_differs(sites):
    for message in sites(2).run(drifts):
        assert "no longer equal after step 10: 2.bias differs" in message


def measures() -> list[dict]:
    return trains("rankdad", {"rank": 2}, monitors.TrafficMonitor(), 5)


def test_traffic_is_that_of_the_batch(sites):
    for values in sites(2).run(measures):
        last = values[-1]
        assert last["traffic/mb"] < values[0]["traffic/mb"] * 1.5
        assert last["traffic/ratio"] > 3
        assert last["traffic/mb_per_s"] > 0
        assert 0 <= last["traffic/wait"] < 10


class Recorder:
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        import pytorch_lightning as pl

        class Logger(pl.loggers.logger.Logger):
            name = version = "recorder"
            logged: dict = {}

            def log_metrics(self, metrics, step=None):
                self.logged.update(metrics)

            def log_hyperparams(self, *args, **kwargs):
                pass

        self.logger = Logger()


def in_lightning(by_environment: bool) -> dict:
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
    recorder = Recorder()
    current = pl.Trainer(
        strategy=dadplug.DADStrategy("rankdad", rank=2),
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        callbacks=chosen,
        logger=recorder.logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    current.fit(zoo.Plain(), zoo.loader(dtype=torch.float32))
    return dict(recorder.logger.logged)


@pytest.mark.parametrize("by_environment", [False, True])
def test_lightnings_callbacks_reach_the_loggers(sites, by_environment):
    pytest.importorskip("pytorch_lightning")
    logged, _ = sites(2).run(in_lightning, by_environment)
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
