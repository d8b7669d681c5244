"""Catalyst's runner for managed embeddings: one process's results, whole checkpoints, and what it says."""

from __future__ import annotations

import os
import warnings

import pytest
import support
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("catalyst")
from catalyst import dl
from dadplug.runners import AdaPMRunner
from scores import BATCH, ROWS, assert_alike, data, one_process, optimizer_of
from scores_catalyst import Scores, run


class Watch(dl.Callback):
    """Counts pushes during evaluation."""

    def __init__(self) -> None:
        super().__init__(order=1000)
        self.pushed: list[int] = []

    def on_loader_start(self, runner):
        if runner.is_valid_loader:
            assert set(runner.managed.managed) == {"words.weight", "tags.weight"}
            self.before = runner.managed.manager.counts["pushed"]

    def on_loader_end(self, runner):
        if runner.is_valid_loader:
            self.pushed.append(runner.managed.manager.counts["pushed"] - self.before)


class Own(AdaPMRunner):
    """Computes its loss by itself."""

    def handle_batch(self, batch):
        scores = self.model(batch["features"])
        self.batch_metrics.update({"loss": (scores - batch["targets"]).square().mean()})
        self.batch = {**batch, "logits": scores}


def trains(kind: str, how: str) -> None:
    expected = one_process(Scores(), kind, accumulation=2 if how == "accumulates" else 1)
    watch, model = Watch(), Scores()
    intents = {
        "function": lambda batch: {"words.weight": batch[0][:, :3], "tags.weight": batch[0][:, 3:]},
        "none": None,
    }
    callbacks: list = [watch]
    if how == "accumulates":
        callbacks += [dl.OptimizerCallback(metric_key="loss", accumulation_steps=2)]
    if how == "own":
        callbacks += [dl.BackwardCallback(metric_key="loss"), dl.OptimizerCallback(metric_key="loss")]
    kinds = {"own": Own}
    runner = run(
        model,
        kind,
        callbacks=callbacks,
        options={"intent": intents.get(how, "auto")},
        runner=kinds.get(how, AdaPMRunner),
    )
    assert watch.pushed == [0, 0]
    assert runner.managed is None
    assert_alike(model, expected)
    held_out = DataLoader(data(0, steps=2, seed=9), BATCH)
    with torch.no_grad():
        losses = [float((expected(ids) - targets).square().mean()) for ids, targets in held_out]
    if how != "own":
        assert runner.epoch_metrics["valid"]["loss"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    predicted = torch.cat([batch["logits"] for batch in runner.predict_loader(loader=held_out)])
    torch.testing.assert_close(predicted, torch.cat([expected(ids) for ids, _ in held_out]).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "how"),
    [("sgd", "auto"), ("adagrad", "function"), ("adagrad", "none"), ("sgd", "accumulates"), ("adagrad", "own")],
)
def test_sites_with_rows_of_their_own_are_one_process(sites, kind, how):
    sites(2).run(trains, kind, how)


def uneven(head: bool) -> None:
    site = int(os.environ["RANK"])
    expected = one_process(Scores(head), steps=(5, 2))
    model = Scores(head)
    run(model, steps=(5, 2)[site])
    assert_alike(model, expected)


@pytest.mark.parametrize("head", [True, False])
def test_sites_may_have_different_numbers_of_batches_and_models_no_other_parameter(sites, head):
    sites(2).run(uneven, head)


def resumes(folder: str) -> None:
    whole = Scores()
    run(whole, "adagrad", epochs=4)
    for mode in ("runner", "model"):
        saver = dl.CheckpointCallback(f"{folder}/{mode}", mode=mode, load_best_on_end=mode == "model")
        run(Scores(), "adagrad", epochs=2, callbacks=[saver])
    resumed = Scores()
    run(resumed, "adagrad", epochs=4, resume=f"{folder}/runner/runner.0002.pth")
    assert_alike(resumed, whole, 1e-6)


def test_checkpoints_resume_and_load_without_dadplug(sites, tmp_path):
    sites(2).run(resumes, str(tmp_path))
    expected, plain = one_process(Scores(), "adagrad"), Scores()
    plain.load_state_dict(torch.load(tmp_path / "model" / "model.0002.pth", weights_only=True))
    assert_alike(plain, expected)
    saved = torch.load(tmp_path / "runner" / "runner.0002.pth", weights_only=True)
    plain.load_state_dict(saved["model_state_dict"])
    optimizer = optimizer_of(plain, "adagrad")
    optimizer.load_state_dict(saved["optimizer_state_dict"])
    assert optimizer.state[plain.words.weight]["sum"].shape == (ROWS, 6)
    assert optimizer.state[plain.words.weight]["sum"].any()


class Drawing(AdaPMRunner):
    """Looks up what chance says, which no lookahead can know."""

    def handle_batch(self, batch):
        super().handle_batch(batch={**batch, "features": torch.randint(ROWS, batch["features"].shape)})


def warns() -> list[str]:
    runner = Drawing(split_data=False)
    model = Scores()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=optimizer_of(model, "sgd"),
            loaders={"train": DataLoader(data(0), BATCH)},
            num_epochs=1,
        )
    return [str(each.message) for each in caught if "AdaPMRunner intent=" in str(each.message)]


def test_what_automatic_intent_cannot_see_is_told_once(sites):
    for reported in sites(2).run(warns):
        assert len(reported) == 1
        assert "it draws random numbers" in reported[0]


PROGRAM = """
import os, signal, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from catalyst import dl
from dadplug.runners import AdaPMRunner

class Killed(dl.Callback):
    def on_batch_end(self, runner):
        if os.environ.get("KILLED") == str(runner.engine.process_index) and runner.loader_batch_step > 4:
            os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(30, 4), nn.Linear(4, 1), nn.Flatten(0))
data = TensorDataset(torch.randint(30, (41,)), torch.randn(41))
runner = AdaPMRunner(timeout=200)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
runner.train(model=model, criterion=nn.MSELoss(), optimizer=optimizer, num_epochs=2,
             loaders={"train": DataLoader(data, 5, shuffle=True), "valid": DataLoader(data, 5)},
             callbacks=[Killed(order=200)])
sums = f"{float(model[0].weight.detach().sum()):.6f} {float(model[1].weight.detach().sum()):.6f}"
open(os.path.join(os.path.dirname(__file__), "sums-" + os.environ["RANK"]), "w").write(sums)
"""


def test_torchrun_starts_the_sites_and_they_end_with_equal_models(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    port = str(support.free_port())
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        port,
        str(tmp_path / "train.py"),
    ]
    (only,) = support.run_programs([command], folder=tmp_path)
    assert only.status == 0, only.errors
    first, second = ((tmp_path / f"sums-{rank}").read_text() for rank in range(2))
    assert first == second
    assert len(first.split()) == 2


def test_a_killed_site_is_named(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(support.free_port()), "WORLD_SIZE": "2", "KILLED": "1"}
    start = "import os, runpy, sys; os.environ['RANK'] = sys.argv[1]; runpy.run_path(sys.argv[2], run_name='__main__')"
    script = str(tmp_path / "train.py")
    first, second = support.run_programs([["-c", start, rank, script] for rank in "01"], env=env, folder=tmp_path)
    assert (first.status, second.status) == (1, -9)
    assert "SiteError: site 1" in first.errors
