"""Trackers whose packages `make test` does not have: MLflow with a store of its own, and W&B without a network."""

from __future__ import annotations

import pytest
import support
import torch
from torch import nn

import dadplug


def trained(tracker: str, steps: int = 6, **settings: object) -> dadplug.GradientReduction:
    """Train, and track the training: a record every second step, and the loss of each."""
    torch.manual_seed(0)
    reduction = dadplug.GradientReduction(nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12)), rank=2)
    with dadplug.track(reduction, tracker, every=2, **settings) as tracking:
        for step in range(steps):
            reduction.model.zero_grad()
            reduction.model(torch.randn(8, 20)).square().mean().backward()
            reduction.synchronize()
            tracking.log({"loss": float(step)})
    reduction.detach()
    return reduction


def test_mlflow_writes_a_run_of_its_own_to_a_store(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    trained("mlflow", tracking_uri=store, experiment="two sites", run_name="first")
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("two sites").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert [each.step for each in client.get_metric_history(run.info.run_id, "traffic/mb")] == [2, 4, 6]
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in losses] == [(step + 1, float(step)) for step in range(6)]
    assert 0 < run.data.metrics["residual/mean"] < 1
    trained("mlflow", tracking_uri=store, run_id=run.info.run_id, steps=2)
    assert len(client.get_metric_history(run.info.run_id, "traffic/mb")) == 4


def test_mlflow_writes_to_the_active_run_of_the_program(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    try:
        with mlflow.start_run() as run:
            trained("mlflow")
            assert mlflow.active_run() is not None
            assert mlflow.get_run(run.info.run_id).info.status == "RUNNING"
        assert "residual/mean" in mlflow.get_run(run.info.run_id).data.metrics
    finally:
        mlflow.set_tracking_uri(None)


def test_a_server_that_has_gone_stops_no_training(tmp_path, monkeypatch, caplog):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)

    def refuses(*_: object, **__: object) -> None:
        raise mlflow.exceptions.MlflowException("API request to http://127.0.0.1:9 failed")

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", refuses)
    reduction = trained("mlflow", run_id="0" * 32)
    assert reduction.step == 6
    assert [each.message for each in caplog.records if "MLflowTracker" in each.message] == [
        "MLflowTracker has failed, and training goes on without it: "
        "MlflowException: API request to http://127.0.0.1:9 failed"
    ]


def rows_of(wandb, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Return a list of what is logged by runs of W&B from now on."""
    rows, log = [], wandb.Run.log

    def recorded(run, data, *args, **kwargs):
        rows.append(dict(data))
        return log(run, data, *args, **kwargs)

    monkeypatch.setattr(wandb.Run, "log", recorded)
    return rows


def test_wandb_writes_a_run_of_its_own_without_a_network(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    values = rows_of(wandb, monkeypatch)
    trained("wandb", project="two-sites", mode="offline", dir=str(tmp_path))
    assert wandb.run is None  # its own run has ended
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    support.until(lambda: b"residual/mean" in next(folder.glob("*.wandb")).read_bytes())  # W&B's own process writes it
    assert [row["dadplug/step"] for row in values if "traffic/mb" in row] == [2, 4, 6]
    assert [(row["dadplug/step"], row["loss"]) for row in values if "loss" in row] == [
        (step + 1, float(step)) for step in range(6)
    ]


def test_wandb_writes_to_the_run_of_the_program(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    values = rows_of(wandb, monkeypatch)
    run = wandb.init(mode="offline", project="two-sites", dir=str(tmp_path))
    run.log({"own": 1.0}, step=7)
    trained("wandb")
    assert wandb.run is run
    assert run.summary["residual/mean"] > 0
    run.log({"own": 2.0}, step=100)
    run.finish()
    assert [row["own"] for row in values if "own" in row] == [1.0, 2.0]
    assert len([row for row in values if "residual/mean" in row]) == 3
