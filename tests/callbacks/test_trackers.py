"""Trackers: what a reduction exchanges, written to files, by a plain loop and by the wrapped model."""

from __future__ import annotations

import csv
import logging
import threading
from pathlib import Path

import pytest
import support
import torch
import torch.distributed as dist
from dadplug.callbacks import trackers
from support import refuses
from torch import nn

import dadplug


class Recorder(dadplug.Tracker):
    """Tracker that keeps what it gets, and fails from a number of records on."""

    def __init__(self, fails_after: int = 1 << 30) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed, self.asked, self._fails_after = 0, 0, fails_after

    def log(self, values, step):
        self.asked += 1
        if len(self.rows) == self._fails_after:
            raise OSError("no space left on device")
        self.rows.append((step, dict(values)))

    def close(self):
        self.closed += 1


def trains(reduction, steps: int = 12, tracking=None) -> None:
    generator = torch.Generator().manual_seed(reduction.site_rank)
    for _ in range(steps):
        reduction.model.zero_grad()
        loss = reduction.model(torch.randn(8, 20, generator=generator)).square().mean()
        loss.backward()
        reduction.synchronize()
        if tracking is not None:
            tracking.log({"loss": loss.item()})


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12))


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@support.at_sites(2)
def test_traffic_and_quality_are_written(tmp_path: Path) -> None:
    rank, path = dist.get_rank(), tmp_path / "run.csv"
    reduction = dadplug.GradientReduction(build(), mode="rankdad", rank=2)
    own = Recorder()
    with (
        dadplug.track(reduction, "csv", every=4, path=path) as tracking,
        dadplug.track(reduction, own, every=6, layers=True, all_sites=True),
    ):
        trains(reduction, 12, tracking)
    dist.barrier()
    rows = read(path)
    steps = [int(row["step"]) for row in rows if row["traffic/mb"]]
    assert steps == [4, 8, 12]  # of one site
    assert [int(row["step"]) for row in rows if row["loss"]] == list(range(1, 13))
    last = next(row for row in rows if row["step"] == "12" and row["traffic/mb"])
    if rank == 0:
        sent = reduction.traffic.bytes_sent
        assert float(last["traffic/mb"]) * 1e6 == pytest.approx(sent)  # each step sends as many
        assert float(last["traffic/total_mb"]) * 1e6 == pytest.approx(reduction.traffic.total_bytes_sent)
        assert float(last["traffic/ratio"]) == pytest.approx(reduction.traffic.dense_bytes / sent)
        qualities = list(reduction.quality.values())
        mean = sum(each.residual for each in qualities) / len(qualities)
        assert float(last["residual/mean"]) == pytest.approx(mean)
        assert float(last["rank/mean"]) == pytest.approx(
            sum(each.effective_rank for each in qualities) / len(qualities)
        )
        assert float(last["kept/mean"]) == pytest.approx(sum(each.kept for each in qualities) / len(qualities))
    assert 0 < float(last["step/seconds"]) < 200
    assert float(last["traffic/wait"]) <= float(last["step/seconds"])
    assert last["sites/present"] == "2.0"
    assert "residual/0" not in last
    assert [step for step, _ in own.rows] == [6, 12]  # each site's own
    assert {"residual/0", "rank/2", "kept/2"} <= own.rows[1][1].keys()
    assert own.closed == 1
    trains(reduction, 6)
    assert len(own.rows) == 2  # it has stopped
    reduction.detach()


def alone(mode: str = "rankdad", **options):
    return dadplug.GradientReduction(build(), mode=mode, **options)


def test_a_wrapped_model_is_tracked():
    model = dadplug.DistributedDataParallel(build(), mode="rankdad", rank=2)
    own = Recorder()
    with dadplug.track(model, own, every=1):
        for _ in range(3):
            model(torch.randn(8, 20)).square().mean().backward()
    assert [step for step, _ in own.rows] == [1, 2, 3]
    assert own.rows[-1][1]["residual/mean"] > 0
    model.reduction.detach()


def test_a_tracker_that_fails_costs_one_warning_and_no_step(caplog):
    reduction, own = alone(), Recorder(fails_after=2)
    with caplog.at_level(logging.WARNING, "dadplug"):
        tracking = dadplug.track(reduction, own, every=1)
        trains(reduction, 10, tracking)
        tracking.stop()
    assert reduction.step == 10
    assert own.asked == 3
    (record,) = [each for each in caplog.records if "Recorder" in each.message]
    assert "Recorder has failed, and training goes on without it: OSError: no space left on device" in record.message
    reduction.detach()


def test_a_tracker_that_hangs_holds_up_nothing(monkeypatch, caplog):
    monkeypatch.setattr(trackers, "_CLOSING", 0.05)
    monkeypatch.setattr(trackers, "_WAITING", 3)
    goes_on = threading.Event()

    class Hanging(Recorder):
        def log(self, values, step):
            goes_on.wait(200)

    reduction = alone()
    with caplog.at_level(logging.WARNING, "dadplug"):
        tracking = dadplug.track(reduction, Hanging(), every=1)
        trains(reduction, 10)
        tracking.stop()
    goes_on.set()
    assert reduction.step == 10
    assert [each.message for each in caplog.records if "Hanging" in each.message] == [
        "Hanging has failed, and training goes on without it: 3 records wait for it"
    ]
    reduction.detach()


def test_rows_are_added_to_a_file_that_exists(tmp_path):
    path = tmp_path / "folder" / "metrics.csv"
    first = trackers.CSVTracker(path)
    first.log({"loss": 1.0}, 1)
    first.log({"loss": 2.0, "accuracy": 0.5}, 2)
    again = trackers.CSVTracker(path)
    again.log({"accuracy": 0.75}, 3)
    assert read(path) == [
        {"step": "1", "loss": "1.0", "accuracy": ""},
        {"step": "2", "loss": "2.0", "accuracy": "0.5"},
        {"step": "3", "loss": "", "accuracy": "0.75"},
    ]


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401  (it writes the files that are read here)

    reduction = alone(rank=2)
    with dadplug.track(reduction, "tensorboard", every=5, log_dir=tmp_path) as tracking:
        trains(reduction, 10)
        tracking.log({"loss": 3.0})
    (file,) = tmp_path.glob("events.out.tfevents.*")
    data, found = file.read_bytes(), {}
    while data:  # length, its checksum, the event, its checksum
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        found |= {(each.tag, event.step): each.simple_value for each in event.summary.value}
        data = data[16 + size :]
    assert {step for name, step in found if name == "residual/mean"} == {5, 10}
    assert found["loss", 10] == 3.0
    reduction.detach()


def test_a_writer_of_the_program_stays_open():
    class Writer:
        def __init__(self):
            self.values, self.closed = {}, False

        def add_scalar(self, name, value, step):
            self.values[name, step] = value

        def flush(self):
            pass

        def close(self):
            self.closed = True

    reduction, writer = alone(), Writer()
    with dadplug.track(reduction, "tensorboard", every=2, writer=writer):
        trains(reduction, 4)
    assert ("step/seconds", 4) in writer.values
    assert not writer.closed
    reduction.detach()


def test_what_cannot_be_tracked_is_refused_at_once(tmp_path, monkeypatch):
    reduction = alone()
    refuses(
        (
            lambda: dadplug.track(reduction, "tensorbord"),
            "unknown tracker 'tensorbord'; valid ones are csv, tensorboard, mlflow, wandb",
        ),
        (lambda: dadplug.track(reduction, "csv", every=0), "every must be at least 1"),
        (
            lambda: dadplug.track(reduction, Recorder(), path="x"),
            "path: settings are for trackers that are given by name",
        ),
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        dadplug.track(reduction, "csv", path=tmp_path / "file" / "metrics.csv")
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(ImportError, match="pip install mlflow"):
        dadplug.track(reduction, "mlflow")
    assert reduction.after_step == []
    reduction.detach()


def test_trackers_can_be_registered():
    @trackers.TRACKERS.register("recorder")
    class Named(Recorder):
        pass

    try:
        reduction = alone()
        with dadplug.track(reduction, "recorder", every=1, fails_after=9) as tracking:
            trains(reduction, 2)
        assert len(tracking._tracker.rows) == 2
        reduction.detach()
    finally:
        del trackers.TRACKERS["recorder"]
