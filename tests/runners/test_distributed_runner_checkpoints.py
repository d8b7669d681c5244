"""The checkpoints of Catalyst's runner: site 0 writes them, all sites load and resume from them."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("catalyst")
from catalyst import dl
from catalyst_training import Losses, net, train


def checkpointed(folder: str, epochs: int, resume: str | None, by_argument: bool, mode: str) -> tuple:
    """Train with dropout, momentum, a schedule and a warm-started compressor; return losses and parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 4)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    losses = Losses()
    checkpoint = dl.CheckpointCallback(
        logdir=folder,
        mode="runner",
        loader_key="valid",
        metric_key="loss",
        minimize=True,
        resume_runner=None if by_argument else resume,
    )
    runner = train(
        mode,
        callbacks=[losses, checkpoint],
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        epochs=epochs,
        resume=resume if by_argument else None,
        runner_options={"rank": 2, "iterations": 1},
        valid_loader="valid",
        valid_metric="loss",
        minimize_valid_metric=True,
    )
    return losses.values, [p.detach().clone() for p in runner.model.state_dict().values()]


@pytest.mark.parametrize("by_argument", [True, False])
@pytest.mark.parametrize("mode", ["dsgd", "rankdad"])
def test_resuming_goes_on_with_the_same_curve(sites, tmp_path, mode, by_argument):
    straight = sites(2).run(checkpointed, str(tmp_path / "straight"), 4, None, False, mode)
    sites(2).run(checkpointed, str(tmp_path / "halted"), 2, None, False, mode)
    last = tmp_path / "halted" / "runner.last.pth"
    resumed = sites(2).run(checkpointed, str(tmp_path / "resumed"), 4, str(last), by_argument, mode)
    for (all_losses, parameters), (losses, others) in zip(straight, resumed):
        assert len(losses) == len(all_losses) // 2
        assert losses == all_losses[len(losses) :]
        assert all(torch.equal(p, q) for p, q in zip(parameters, others))


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
