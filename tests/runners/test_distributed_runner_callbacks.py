"""Stock callbacks, loggers and checkpoints in Catalyst's runner between sites: as for one process."""

from __future__ import annotations

import contextlib
import io
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("catalyst")
from catalyst import dl
from catalyst_training import Losses, data, metrics_callbacks, net, train
from dadplug.callbacks import BatchTimerCallback, TrafficMonitorCallback
from dadplug.runners import DistributedRunner


def prints(verbose: bool) -> tuple:
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        train("dad", callbacks=metrics_callbacks(), verbose=verbose)
    return output.getvalue(), errors.getvalue()


def test_only_site_0_prints_and_shows_progress(sites):
    (output, errors), (silence, no_errors) = sites(2).run(prints, True)
    assert "train (2/2)" in output
    assert "2/2 * Epoch (train)" in errors
    assert "100%" in errors
    assert silence == ""
    assert no_errors == ""


def logs(folder: str) -> list[str]:
    callbacks = [*metrics_callbacks(), BatchTimerCallback(), TrafficMonitorCallback()]
    runner = train(
        "rankdad",
        callbacks=callbacks,
        logdir=folder,
        valid_loader="valid",
        valid_metric="loss",
        minimize_valid_metric=True,
        runner_options={"rank": 2},
    )
    train_metrics = runner.epoch_metrics["train"]
    whole = train_metrics["_timer/batch_time"]
    parts = ("_timer/data_time", "_timer/model_time", "_timer/exchange_time")
    assert sum(train_metrics[name] for name in parts) == pytest.approx(whole, rel=1e-6)
    assert 0 < train_metrics["_timer/exchange_time"] < whole
    assert train_metrics["_timer/_fps"] > 0
    assert train_metrics["traffic/ratio"] > 2
    assert train_metrics["traffic/mb"] == pytest.approx(runner.reduction.traffic.bytes_sent / 1e6, rel=0.2)
    assert train_metrics["rank/0"] == 2
    assert 0 < train_metrics["residual/0"] < 1
    return sorted(os.listdir(folder))


def test_monitors_reach_the_loggers(sites, tmp_path):
    folder = str(tmp_path / "logs")
    for files in sites(2).run(logs, folder):
        assert files == ["checkpoints", "csv_logger", "tensorboard"]
    table = (tmp_path / "logs" / "csv_logger" / "train.csv").read_text().splitlines()
    assert len(table) == 3
    assert {"_timer/exchange_time", "traffic/mb", "rank/0", "accuracy01"} <= set(table[0].split(","))
    assert not list(tmp_path.glob("**/*.part"))


def clips(where: str) -> float:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    clip = {"grad_clip_fn": nn.utils.clip_grad_norm_, "grad_clip_params": {"max_norm": 1e-3}}
    callback = {
        "backward": lambda: dl.BackwardCallback(metric_key="loss", **clip, log_gradient=True),
        "optimizer": lambda: dl.OptimizerCallback(metric_key="loss", **clip),
    }[where]()
    loader = {"train": DataLoader(data(8), batch_size=4)}
    runner = train("dad", loader, [callback], epochs=1, model=model, optimizer=optimizer)
    assert runner.reduction.first_difference() is None
    return float(torch.cat([(p.detach() - q).flatten() for p, q in zip(model.parameters(), before)]).norm())


@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_clipping_clips(sites, where):
    moved = sites(2).run(clips, where)
    assert moved[0] == moved[1] == pytest.approx(1e-3, rel=1e-3)


def stops_early() -> tuple:
    """Metrics that differ from site to site must not make one site stop alone."""
    callbacks = [dl.EarlyStoppingCallback(patience=2, loader_key="valid", metric_key="accuracy01", minimize=False)]
    callbacks.append(dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1,)))
    loaders = {
        "train": DataLoader(data(20, dist.get_rank()), batch_size=4),
        "valid": DataLoader(data(10, 5 + dist.get_rank()), 4),
    }
    runner = train("dad", loaders, callbacks, lr=1e-7, epochs=20)
    return runner.epoch_step, runner.epoch_metrics["valid"]["accuracy01"]


def test_early_stopping_is_agreed(sites):
    first, second = sites(2).run(stops_early)
    assert first == second
    assert first[0] == 3


def check_run() -> int:
    loaders = {"train": DataLoader(data(40 - 12 * dist.get_rank(), dist.get_rank()), batch_size=4)}
    losses = Losses()
    runner = train("dad", loaders, [losses], epochs=9, check=True)
    assert runner.reduction.first_difference() is None
    return len(losses.values), runner.epoch_step


def test_a_stop_within_an_epoch_is_agreed(sites):
    first, second = sites(2).run(check_run)
    assert first[1] == second[1] == 3
    assert first[0] <= 3 * 3


def schedules(kind: str) -> list:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = {
        "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        "plateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0),
    }[kind]()
    settings = {"valid_loader": "valid", "valid_metric": "loss", "minimize_valid_metric": True}
    train("dad", model=model, optimizer=optimizer, scheduler=scheduler, epochs=3, **settings)
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(("kind", "expected"), [("step", 0.0125), ("plateau", 0.0001)])
def test_schedulers_step(sites, kind, expected):
    assert sites(2).run(schedules, kind) == [pytest.approx(expected)] * 2


def loads_best(folder: str) -> tuple:
    runner = train(
        "dad",
        callbacks=[dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1,))],
        lr=0.3,
        epochs=5,
        logdir=folder if dist.get_rank() == 0 else folder + "-elsewhere",  # as on a machine of its own
        valid_loader="valid",
        valid_metric="loss",
        minimize_valid_metric=True,
        load_best_on_end=True,
    )
    assert runner.reduction.first_difference() is None
    return sorted(os.listdir(os.path.join(folder, "checkpoints")))


def test_site_0_writes_and_all_load_the_best(sites, tmp_path):
    folder = str(tmp_path / "here")
    names, _ = sites(2).run(loads_best, folder)
    assert {"model.best.pth", "model.last.pth", "model.storage.json"} < set(names)
    assert os.listdir(folder + "-elsewhere/checkpoints") == []
    state = torch.load(os.path.join(folder, "checkpoints", "model.best.pth"), weights_only=True)
    net().load_state_dict(state)  # loads into the plain model


def bad_checkpoint(path: str) -> str:
    try:
        train("dad", resume=path)
    except (FileNotFoundError, ValueError) as error:
        return str(error)
    return "nothing"


def test_missing_and_damaged_checkpoints_are_told_on_all_sites(sites, tmp_path):
    for message in sites(2).run(bad_checkpoint, str(tmp_path / "none.pth")):
        assert "none.pth is not at site 0" in message
    (tmp_path / "bad.pth").write_bytes(b"nonsense")
    for message in sites(2).run(bad_checkpoint, str(tmp_path / "bad.pth")):
        assert "bad.pth is damaged" in message


def test_older_scripts_keep_their_words():
    runner = DistributedRunner()  # whose training has not ended
    callback = dl.AccuracyCallback(input_key="logits", target_key="targets", topk_args=(1, 3))
    assert list(callback.metric.topk) == [1, 3]
    del runner
