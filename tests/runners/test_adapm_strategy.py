"""Lightning's AdaPM strategy: one process's results, whole checkpoints, and what it says where it cannot see."""

from __future__ import annotations

import inspect
import os
import warnings

import pytest
import support
import torch
from scores import BATCH, assert_alike, data, one_process
from scores_lightning import Drawing, Late, Manual, Scores, make_trainer
from torch.utils.data import DataLoader

pl = pytest.importorskip("pytorch_lightning")


class Watch(pl.Callback):
    def __init__(self) -> None:
        self.pushed: list[tuple[int, int]] = []
        self.remote = 0

    def on_validation_start(self, trainer, pl_module):
        self.before = trainer.strategy.managed.manager.counts["pushed"]

    def on_validation_end(self, trainer, pl_module):
        assert set(trainer.strategy.managed.managed) == {"words.weight", "tags.weight"}
        self.pushed.append((self.before, trainer.strategy.managed.manager.counts["pushed"]))


def ids_of(batch) -> dict[str, torch.Tensor]:
    return {"words.weight": batch[0][:, :3], "tags.weight": batch[0][:, 3:]}


def trains(kind: str, intent: str | None) -> None:
    from dadplug import AdaPMStrategy

    site = int(os.environ["RANK"])
    torch.manual_seed(0)
    module = Manual() if kind == "manual" else Scores(kind)
    expected = Scores()
    expected.load_state_dict(module.state_dict())
    one_process(expected, "sgd" if kind == "manual" else kind)
    watch = Watch()
    intents = {
        "auto": "auto",
        "function": lambda batch: {"words.weight": batch[0][:, :3], "tags.weight": batch[0][:, 3:]},
    }
    strategy = AdaPMStrategy(intent=intents.get(intent))
    trainer = make_trainer(strategy, callbacks=[watch])
    held_out = DataLoader(data(0, steps=2, seed=9), batch_size=BATCH)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*intent")
        trainer.fit(module, DataLoader(data(site), batch_size=BATCH), held_out)
    assert watch.pushed
    assert all(before == after for before, after in watch.pushed)
    assert_alike(module, expected)
    losses = [(expected(ids) - targets).square().mean() for ids, targets in held_out]
    assert float(trainer.callback_metrics["valid"]) == pytest.approx(float(sum(losses) / len(losses)), abs=1e-5)
    assert strategy.managed is None
    trainer.test(module, held_out, verbose=False)
    assert len(trainer.predict(module, held_out)) == 2


@pytest.mark.parametrize(
    ("kind", "intent"), [("sgd", "auto"), ("adagrad", "function"), ("manual", "auto"), ("sgd", None)]
)
def test_sites_with_rows_of_their_own_are_one_process(sites, kind, intent):
    sites(2).run(trains, kind, intent)


def resumes(folder: str) -> None:
    from dadplug import AdaPMStrategy

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
    from dadplug import AdaPMStrategy

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


def warns() -> list[list[str]]:
    from dadplug import AdaPMStrategy

    reported = []
    for kind in (Drawing, Late):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = DataLoader(data(int(os.environ["RANK"])), batch_size=BATCH)
            make_trainer(AdaPMStrategy(), max_epochs=1).fit(kind(), loader)
        reported.append([str(each.message) for each in caught if "AdaPMStrategy intent=" in str(each.message)])
    return reported


def test_what_automatic_intent_cannot_see_is_told_once(sites):
    for drawing, late in sites(2).run(warns):
        assert len(drawing) == len(late) == 1
        assert "it draws random numbers" in drawing[0]
        assert "torch.randint" in drawing[0]
        assert "automatic intent has not seen" in late[0]
        assert "words.weight" in late[0]


def uneven() -> None:
    from dadplug import AdaPMStrategy

    site = int(os.environ["RANK"])
    torch.manual_seed(0)
    module = Scores()
    expected = Scores()
    expected.load_state_dict(module.state_dict())
    steps = (4, 2)
    trainer = make_trainer(AdaPMStrategy(), max_epochs=1)
    trainer.fit(module, DataLoader(data(site, steps=steps[site]), batch_size=BATCH))
    assert_alike(module, one_process(expected, epochs=1, steps=steps))


def test_sites_may_have_different_numbers_of_batches(sites):
    sites(2).run(uneven)


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


def test_the_constructor_names_the_options_of_dadstrategy_with_their_defaults():
    from dadplug.runners.pytorch_lightning import AdaPMStrategy, DADStrategy

    ours, theirs = (inspect.signature(kind.__init__).parameters for kind in (AdaPMStrategy, DADStrategy))
    assert [name for name in theirs if name not in ours] == []
    for name in theirs:
        if name != "mode":
            assert ours[name] == theirs[name]


def gives_several_loaders() -> None:
    from dadplug import AdaPMStrategy

    loader = DataLoader(data(0), batch_size=BATCH)
    with pytest.raises(ValueError, match="reads one train loader ahead, and there are several"):
        make_trainer(AdaPMStrategy()).fit(Scores(), [loader, loader])


def test_several_loaders_are_told(sites):
    sites(2).run(gives_several_loaders)
