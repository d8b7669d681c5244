"""Managed embeddings in Lightning and Catalyst: one process's results, whole checkpoints, and what both say."""

import os
import warnings
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import support
import torch
from catalyst import dl
from dadplug.runners import AdaPMRunner
from dadplug.runners.management import give_back
from scores import BATCH, ROWS, STEPS, assert_alike, data, one_process, optimizer_of
from scores_catalyst import Scores as CatalystScores
from scores_catalyst import run
from scores_lightning import Drawing, Late, Manual, Scores, make_trainer
from support import refuses
from torch import nn
from torch.utils.data import DataLoader

import dadplug
from dadplug import AdaPMStrategy
from dadplug.adapm import AdaModel

BOUND = 0.1
INTENTS = {"function": lambda batch: {"words.weight": batch[0][:, :3], "tags.weight": batch[0][:, 3:]}, "none": None}


def clip(model: nn.Module) -> None:
    assert nn.utils.clip_grad_norm_(model.parameters(), BOUND) > BOUND


class Pushes:
    """Number of pushes during each evaluation; `name` is that of what has the tables, as attribute of its owner."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def begin(self, managed: Any) -> None:
        assert set(managed.managed) == {"words.weight", "tags.weight"}
        self._before = managed.manager.counts["pushed"]

    def end(self, managed: Any) -> None:
        self.found.append(managed.manager.counts["pushed"] - self._before)


class LightningWatch(pl.Callback, Pushes):
    def on_validation_start(self, trainer, pl_module):
        self.begin(trainer.strategy.managed)

    def on_validation_end(self, trainer, pl_module):
        self.end(trainer.strategy.managed)


class CatalystWatch(dl.Callback, Pushes):
    def __init__(self) -> None:
        dl.Callback.__init__(self, order=1000)
        Pushes.__init__(self)

    def on_loader_start(self, runner):
        if runner.is_valid_loader:
            self.begin(runner.managed)

    def on_loader_end(self, runner):
        if runner.is_valid_loader:
            self.end(runner.managed)


class Own(AdaPMRunner):
    """Computes its loss by itself."""

    def handle_batch(self, batch):
        scores = self.model(batch["features"])
        self.batch_metrics.update({"loss": (scores - batch["targets"]).square().mean()})
        self.batch = {**batch, "logits": scores}


def held_out() -> DataLoader:
    return DataLoader(data(0, steps=2, seed=9), BATCH)


# Trainers: each trains on the rows of this site, and returns the model, the pushes during evaluations, the loss over
# the rows that are held out, and the model's scores of these.


def in_lightning(kind: str, how: str = "auto", epochs: int = 2, steps: int = STEPS) -> tuple:
    torch.manual_seed(0)
    module, watch = Manual() if kind == "manual" else Scores(kind), LightningWatch()
    settings = {"gradient_clip_val": BOUND} if how == "clips" else {}
    strategy = AdaPMStrategy(intent=INTENTS.get(how, "auto"))
    trainer = make_trainer(strategy, max_epochs=epochs, callbacks=[watch], **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*intent")
        trainer.fit(module, DataLoader(data(int(os.environ["RANK"]), steps=steps), batch_size=BATCH), held_out())
    assert strategy.managed is None
    assert "clip_grad_by_norm" not in vars(trainer.precision_plugin)
    loss = float(trainer.callback_metrics["valid"])
    trainer.test(module, held_out(), verbose=False)
    return module, watch.found, loss, trainer.predict(module, held_out())


def in_catalyst(kind: str, how: str = "auto", epochs: int = 2, steps: int = STEPS, head: bool = True) -> tuple:
    model, watch = CatalystScores(head), CatalystWatch()
    clipping = {"grad_clip_fn": nn.utils.clip_grad_norm_, "grad_clip_params": {"max_norm": BOUND}}
    backward = dl.BackwardCallback("loss", **(clipping if how == "clips" else {}))
    optimizer = dl.OptimizerCallback("loss", accumulation_steps=2 if how == "accumulates" else 1)
    callbacks = {"accumulates": [optimizer], "own": [backward, optimizer], "clips": [backward, optimizer]}
    kinds, options = {"own": Own}, {"intent": INTENTS.get(how, "auto")}
    callbacks = [watch, *callbacks.get(how, ())]
    runner = run(model, kind, epochs, callbacks, steps, options, kinds.get(how, AdaPMRunner))
    assert runner.managed is None
    loss = None if how == "own" else runner.epoch_metrics["valid"]["loss"]
    return model, watch.found, loss, [batch["logits"] for batch in runner.predict_loader(loader=held_out())]


TRAINERS = {"lightning": in_lightning, "catalyst": in_catalyst, "without a head": partial(in_catalyst, head=False)}


@pytest.mark.parametrize(
    ("trainer", "kind", "how"),
    [
        *(("lightning", "sgd", how) for how in ("auto", "none", "clips")),
        *(("lightning", "adagrad", "function"), ("lightning", "manual", "auto")),
        *(("catalyst", "sgd", how) for how in ("auto", "accumulates", "clips")),
        *(("catalyst", "adagrad", how) for how in ("function", "none", "own")),
    ],
)
@support.at_sites(2)
def test_sites_with_rows_of_their_own_are_one_process(trainer: str, kind: str, how: str) -> None:
    settings = {"accumulation": 2 if how == "accumulates" else 1} | ({"before_step": clip} if how == "clips" else {})
    expected = one_process(CatalystScores(), "sgd" if kind == "manual" else kind, **settings)
    model, pushed, loss, scores = TRAINERS[trainer](kind, how)
    assert {*pushed} == {0}
    assert_alike(model, expected)
    with torch.no_grad():
        wanted = [expected(ids) for ids, _ in held_out()]
    losses = [float((each - targets).square().mean()) for each, (_, targets) in zip(wanted, held_out(), strict=True)]
    assert loss is None or loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    torch.testing.assert_close(torch.cat(scores).detach(), torch.cat(wanted), rtol=0, atol=1e-5)


@pytest.mark.parametrize("trainer", TRAINERS)
@support.at_sites(2)
def test_sites_may_have_different_numbers_of_batches(trainer: str) -> None:
    """Also where the model has no parameter but its tables."""
    steps = (5, 2)
    model, *_ = TRAINERS[trainer]("sgd", steps=steps[int(os.environ["RANK"])])
    assert_alike(model, one_process(CatalystScores(hasattr(model.head, "weight")), steps=steps))


class Discarding(Manual):
    """Runs a backward pass for something else than the step, and clears what it has brought."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(self(batch[0]).square().sum() * 10)
        self.zero_grad()
        super().training_step(batch, batch_idx)


@support.at_sites(2)
def test_lightning_discards_as_one_process() -> None:
    torch.manual_seed(0)
    module = Discarding()
    make_trainer(AdaPMStrategy(), max_epochs=1).fit(module, DataLoader(data(int(os.environ["RANK"])), batch_size=BATCH))
    assert_alike(module, one_process(CatalystScores(), epochs=1))


@support.at_sites(2)
def test_what_cannot_work_in_lightning_is_refused() -> None:
    loader = DataLoader(data(0), batch_size=BATCH)
    by_value = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    words = "cannot be clipped by value: use gradient_clip_algorithm='norm'"
    several = "reads one train loader ahead, and there are several"
    refuses(
        (lambda: make_trainer(AdaPMStrategy(), **by_value).fit(Scores(), loader), words),
        (lambda: make_trainer(AdaPMStrategy()).fit(Scores(), [loader, loader]), several),
    )


def resumes(folder: str) -> None:
    site = int(os.environ["RANK"])

    def run(epochs: int, resume=None):
        torch.manual_seed(0)
        module = Scores("adagrad")
        saver = pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        trainer = make_trainer(AdaPMStrategy(), max_epochs=epochs, callbacks=[saver], enable_checkpointing=True)
        trainer.fit(module, DataLoader(data(site), batch_size=BATCH), ckpt_path=resume)
        return module, trainer

    whole, _ = run(4)
    _, trainer = run(2)
    resumed, _ = run(4, f"{folder}/epoch=1.ckpt")
    assert_alike(resumed, whole, 1e-6)
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    during = torch.load(f"{folder}/epoch=1.ckpt", weights_only=False)
    after = torch.load(f"{folder}/after.ckpt", weights_only=False)
    assert all(torch.equal(during["state_dict"][name], value) for name, value in after["state_dict"].items())
    states = (each["optimizer_states"][0]["state"] for each in (during, after))
    for ours, others in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(ours[name], others[name]) for name in ours)


def test_checkpoints_resume_and_load_without_dadplug_and_on_one_site(sites, tmp_path):
    sites(2).run(resumes, str(tmp_path))
    saved = torch.load(tmp_path / "epoch=1.ckpt", weights_only=False)
    torch.manual_seed(0)
    expected = one_process(Scores(), "adagrad")
    plain = Scores("adagrad")
    plain.load_state_dict(saved["state_dict"])
    assert_alike(plain, expected)
    optimizer = plain.configure_optimizers()
    optimizer.load_state_dict(saved["optimizer_states"][0])
    assert torch.isfinite(optimizer.state[plain.words.weight]["sum"]).all()
    sites(1).run(goes_on_alone, str(tmp_path / "epoch=1.ckpt"))


def goes_on_alone(path: str) -> None:
    saved = torch.load(path, weights_only=False)
    plain, module = Scores("adagrad"), Scores("adagrad")
    plain.load_state_dict(saved["state_dict"])
    optimizer = plain.configure_optimizers()
    optimizer.load_state_dict(saved["optimizer_states"][0])
    for ids, targets in DataLoader(data(0), batch_size=BATCH):
        optimizer.zero_grad()
        (plain(ids) - targets).square().mean().backward()
        optimizer.step()
    make_trainer(AdaPMStrategy(), max_epochs=3).fit(module, DataLoader(data(0), batch_size=BATCH), ckpt_path=path)
    assert_alike(module, plain)


@support.at_sites(2)
def test_what_automatic_intent_cannot_see_is_told_once() -> None:
    reported = []
    for kind in (Drawing, Late):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = DataLoader(data(int(os.environ["RANK"])), batch_size=BATCH)
            make_trainer(AdaPMStrategy(), max_epochs=1).fit(kind(), loader)
        reported.append([str(each.message) for each in caught if "AdaPMStrategy intent=" in str(each.message)])
    (drawing,), (late,) = reported
    assert "it draws random numbers" in drawing
    assert "torch.randint" in drawing
    assert "automatic intent has not seen" in late
    assert "words.weight" in late


@support.at_sites(2, own=True)
def test_the_error_that_ends_training_at_one_site_is_the_reason_at_the_other() -> None:
    module = nn.Embedding(10, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    managed = AdaModel(module, optimizer)
    try:
        if os.environ["RANK"] == "0":
            raise ValueError("broken in a step")
        with pytest.raises(dadplug.SiteError, match=r"site 0 .* is gone: ValueError: broken in a step"):
            managed.manager.barrier()
    except ValueError:
        give_back(managed, optimizer, True)


PROGRAM = """
import importlib, os, signal, sys, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
warnings.filterwarnings("ignore")
pl = importlib.import_module(sys.argv[1])
import dadplug

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(30, 4), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if os.environ.get("KILLED") == str(self.global_rank) and self.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.head(self.words(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1)

if __name__ == "__main__":
    torch.manual_seed(0)
    strategy = sys.argv[2] if sys.argv[2] == "adapm" else dadplug.AdaPMStrategy(lookahead=4)
    nodes, folder = int(os.environ.get("NODES", 1)), os.environ.get("FOLDER")
    callbacks = [pl.callbacks.ModelCheckpoint(folder)] if folder else []
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2 // nodes, num_nodes=nodes, max_epochs=2,
                         logger=False, enable_checkpointing=bool(folder), callbacks=callbacks,
                         enable_progress_bar=False, enable_model_summary=False)
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(torch.randint(30, (40,))), batch_size=5, shuffle=True),
                ckpt_path=os.environ.get("RESUME"))
    kind = type(trainer.strategy)
    sys.stdout.write(f"done {kind.__module__} {kind.__name__} {trainer.global_step} "
                     f"{float(module.words.weight.detach().sum()):.6f}\\n")
"""


@pytest.mark.parametrize(("package", "how"), [("pytorch_lightning", "adapm"), ("lightning.pytorch", "object")])
def test_lightning_starts_the_sites(tmp_path, package, how):
    support.need(package.split(".")[0])
    (tmp_path / "train.py").write_text(PROGRAM)
    env = {"MASTER_PORT": str(support.free_port())}
    (only,) = support.run_programs([[str(tmp_path / "train.py"), package, how]], env=env, preload=[package])
    assert only.status == 0, only.errors
    lines = only.output.split("done ")[1:]
    assert len(lines) == 2
    assert lines[0].split() == lines[1].split()
    assert lines[0].split()[:3] == [f"dadplug.runners.{package.split('.')[0]}", "AdaPMStrategy", "8"]


def test_a_site_killed_in_fit_is_named_and_others_can_resume(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    start = "import os, runpy, sys; os.environ['NODE_RANK'] = sys.argv[1]; del sys.argv[:2]; "
    start += "runpy.run_path(sys.argv[0], run_name='__main__')"

    def machines(**more: str) -> list[support.Finished]:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(support.free_port()), "NODES": "2"} | more
        script = str(tmp_path / "train.py")
        commands = [["-c", start, rank, script, "pytorch_lightning", "adapm"] for rank in "01"]
        return support.run_programs(commands, env=env, preload=["pytorch_lightning"])

    first, killed = machines(KILLED="1", FOLDER=str(tmp_path / "saved"))
    assert (first.status, killed.status) == (1, -9)
    assert "SiteError: site 1" in first.errors
    (saved,) = (tmp_path / "saved").iterdir()
    assert saved.name.startswith("epoch=0")
    for each in machines(RESUME=str(saved)):
        assert each.status == 0, each.errors
        assert "AdaPMStrategy 8 " in each.output


# Catalyst's runner for managed embeddings: one process's results, whole checkpoints, and what it says


def resumes_in_catalyst(folder: str) -> None:
    whole = CatalystScores()
    run(whole, "adagrad", epochs=4)
    for mode in ("runner", "model"):
        saver = dl.CheckpointCallback(f"{folder}/{mode}", mode=mode, load_best_on_end=mode == "model")
        run(CatalystScores(), "adagrad", epochs=2, callbacks=[saver])
    resumed = CatalystScores()
    run(resumed, "adagrad", epochs=4, resume=f"{folder}/runner/runner.0002.pth")
    assert_alike(resumed, whole, 1e-6)


def test_checkpoints_resume_and_load_without_dadplug(sites, tmp_path):
    sites(2).run(resumes_in_catalyst, str(tmp_path))
    expected, plain = one_process(CatalystScores(), "adagrad"), CatalystScores()
    plain.load_state_dict(torch.load(tmp_path / "model" / "model.0002.pth", weights_only=True))
    assert_alike(plain, expected)
    saved = torch.load(tmp_path / "runner" / "runner.0002.pth", weights_only=True)
    plain.load_state_dict(saved["model_state_dict"])
    optimizer = optimizer_of(plain, "adagrad")
    optimizer.load_state_dict(saved["optimizer_state_dict"])
    assert optimizer.state[plain.words.weight]["sum"].shape == (ROWS, 6)
    assert optimizer.state[plain.words.weight]["sum"].any()


class CatalystDrawing(AdaPMRunner):
    """Looks up what chance says, which no lookahead can know."""

    def handle_batch(self, batch):
        super().handle_batch(batch={**batch, "features": torch.randint(ROWS, batch["features"].shape)})


@support.at_sites(2)
def test_what_automatic_intent_cannot_see_is_told_once_in_catalyst() -> None:
    model = CatalystScores()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CatalystDrawing(split_data=False).train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=optimizer_of(model, "sgd"),
            loaders={"train": DataLoader(data(0), BATCH)},
            num_epochs=1,
        )
    (reported,) = [str(each.message) for each in caught if "AdaPMRunner intent=" in str(each.message)]
    assert "it draws random numbers" in reported


CATALYST_PROGRAM = """
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
    (tmp_path / "train.py").write_text(CATALYST_PROGRAM)
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
    (tmp_path / "train.py").write_text(CATALYST_PROGRAM)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(support.free_port()), "WORLD_SIZE": "2", "KILLED": "1"}
    start = "import os, runpy, sys; os.environ['RANK'] = sys.argv[1]; runpy.run_path(sys.argv[2], run_name='__main__')"
    script = str(tmp_path / "train.py")
    first, second = support.run_programs([["-c", start, rank, script] for rank in "01"], env=env, folder=tmp_path)
    assert (first.status, second.status) == (1, -9)
    assert "SiteError: site 1" in first.errors
