"""Sharded checkpoints: each site its own rows, read on any number of sites, and joined."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recommender import Recommender
from shard_programs import KINDS, end, make, same, steps, whole

from dadplug.adapm import join_shards, load_shards, save_shards


def saves(kind, folder):
    managed, optimizer = make(kind)
    steps(managed, optimizer, range(3))
    save_shards(managed, folder, optimizer)
    saved = whole(managed, optimizer)
    again, optimizer_again = make(kind, seed=2)
    load_shards(again, folder, optimizer_again)
    assert same(whole(again, optimizer_again), saved)
    steps(managed, optimizer, [3])
    save_shards(managed, folder, optimizer)  # in the place of the first
    steps(again, optimizer_again, [3])
    later = whole(managed, optimizer)
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, later["model"][name], rtol=1e-5, atol=1e-6)
    end(again)
    end(managed)
    return later


def loads(kind, folder):
    managed, optimizer = make(kind, seed=5)
    load_shards(managed, folder, optimizer)
    state = whole(managed, optimizer)
    end(managed)
    return state


@pytest.mark.parametrize("kind", ["adagrad", "sparse", "rowwise", "sgd"])
def test_two_sites_shards_load_on_other_numbers_of_sites_and_join(sites, tmp_path, kind):
    folder = str(tmp_path / "saved")
    first, second = sites(2).run(saves, kind, folder)
    assert same(first, second)
    files = sorted(path.name[8:] for path in Path(folder).iterdir() if path.name != "index.json")
    assert files == ["-rest.pt", "-site-0-of-2.pt", "-site-1-of-2.pt"]
    rows = [torch.load(path, weights_only=True)["tables"] for path in Path(folder).glob("*-site-*")]
    for name, count in (("items.weight", 40), ("tags.weight", 30)):
        assert sorted(torch.cat([each[name]["keys"] for each in rows]).tolist()) == list(range(count))
    joined = join_shards(folder)
    assert same(joined, first)
    plain = Recommender()
    plain.load_state_dict(joined["model"])
    KINDS[kind](plain.parameters()).load_state_dict(joined["optimizer"])
    if kind == "adagrad":
        assert all(same(each, first) for number in (1, 3) for each in sites(number).run(loads, kind, folder))
    command = [sys.executable, "-m", "dadplug.adapm.join", folder, str(tmp_path / "whole.pt")]
    if kind == "sgd":
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
        assert said.stderr == ""
        assert "whole.pt: 5 tensors, 679 numbers" in said.stdout
        assert same(torch.load(tmp_path / "whole.pt", weights_only=True), first)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    managed, optimizer = make("adagrad")
    save_shards(managed, folder, optimizer)
    return folder


def damage(how, folder):
    shard = next(folder.glob("*-site-*"))
    index = folder / "index.json"
    if how == "missing":
        shard.unlink()
    elif how == "damaged":
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif how == "cut":
        shard.write_bytes(shard.read_bytes()[:100])
    elif how == "rest":
        next(folder.glob("*-rest.pt")).unlink()
    elif how == "unfinished":
        index.unlink()
    elif how == "text":
        index.write_text("{")
    elif how == "version":
        index.write_text(json.dumps(json.loads(index.read_text()) | {"version": 9}))


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("missing", FileNotFoundError, r"shard .*-site-0-of-1\.pt of checkpoint .* is missing"),
        ("damaged", ValueError, r"file .*-site-0-of-1\.pt of checkpoint .* is damaged: it is not what was written"),
        ("cut", ValueError, "is damaged"),
        ("rest", FileNotFoundError, r"file .*-rest\.pt of checkpoint .* is missing"),
        ("unfinished", FileNotFoundError, r"holds no index\.json: it is no sharded checkpoint, or was never finished"),
        ("text", ValueError, r"index\.json is damaged"),
        ("version", ValueError, "was written by another version of dadplug: format 9, here 1"),
    ],
)
def test_what_is_damaged_or_missing_is_told(saved, tmp_path, how, kind, message):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    damage(how, folder)
    managed, optimizer = make("adagrad", seed=3)
    before = managed.state_dict()
    for action in (lambda: join_shards(folder), lambda: load_shards(managed, folder, optimizer)):
        with pytest.raises(kind, match=message):
            action()
    assert same(managed.state_dict(), before)


def test_tables_of_another_optimizer_are_told(saved):
    managed, optimizer = make("sgd")
    with pytest.raises(ValueError, match="holds tables of another model or optimizer"):
        load_shards(managed, saved, optimizer)


def each_its_own_disk(folder):
    """Site 1's files are where site 0 does not look, and one of them is damaged."""
    rank = int(os.environ["RANK"])
    own = Path(folder) / str(rank)
    managed, optimizer = make("adagrad")
    steps(managed, optimizer, range(2))
    save_shards(managed, own, optimizer)
    saved = whole(managed, optimizer)
    managed.load_state_dict({name: value * 0 for name, value in saved["model"].items()})
    load_shards(managed, own, optimizer)
    assert same(whole(managed, optimizer), saved)
    if rank == 1:
        damage("damaged", own)
    with pytest.raises(ValueError, match=r"site-1-of-2\.pt of checkpoint .* is damaged"):
        load_shards(managed, own, optimizer)
    if rank == 1:
        damage("missing", own)
    with pytest.raises(FileNotFoundError, match=r"site-1-of-2\.pt .* is missing: no site has it"):
        load_shards(managed, own, optimizer)
    if rank == 1:
        (Path(folder) / "file").write_text("")
    blocked = Path(folder) / ("fine" if rank == 0 else "file")
    with pytest.raises(RuntimeError, match=r"cannot write its shard into .*, at site 1"):
        save_shards(managed, blocked, optimizer)
    end(managed)


def test_sites_with_disks_of_their_own_and_errors_on_all(sites, tmp_path):
    sites(2).run(each_its_own_disk, str(tmp_path))


def fits(folder):
    pl = pytest.importorskip("pytorch_lightning")
    import scores_lightning as scores
    from torch.utils.data import DataLoader

    from dadplug import AdaPMStrategy

    site = int(os.environ["RANK"])

    class Full(pl.Callback):
        """Saves to one file at each epoch's end; the second time there is no room for it at site 0."""

        def on_train_epoch_end(self, trainer, pl_module):
            writer = trainer.strategy.checkpoint_io
            if trainer.current_epoch == 1 and site == 0:
                writer.save_checkpoint = lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device"))
            fails = pytest.raises(RuntimeError, match=r"last\.ckpt cannot be written, at site 0: OSError: .* No space")
            with fails if trainer.current_epoch == 1 else contextlib.nullcontext():
                trainer.save_checkpoint(f"{folder}/last.ckpt")
            vars(writer).pop("save_checkpoint", None)

    def run(epochs, resume=None, checkpoint="sharded", more=()):
        torch.manual_seed(0)
        module = scores.Scores("adagrad")
        saver = pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        strategy = AdaPMStrategy(checkpoint=checkpoint)
        callbacks = [saver, *more]
        trainer = scores.make_trainer(strategy, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(module, DataLoader(scores.data(site), batch_size=scores.BATCH), ckpt_path=resume)
        return module, trainer

    expected, trainer = run(3)
    run(2, more=[Full()])
    assert sum(path.name.endswith("rest.pt") for path in Path(f"{folder}/last.ckpt.shards").iterdir()) == 1
    for checkpoint, name in (("sharded", "epoch=1"), ("whole", "epoch=1"), ("sharded", "last")):
        resumed, _ = run(3, f"{folder}/{name}.ckpt", checkpoint)
        for parameter, other in zip(resumed.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-6)
    fresh = scores.Scores("adagrad")
    trainer.validate(fresh, DataLoader(scores.data(0), scores.BATCH), ckpt_path=f"{folder}/epoch=2.ckpt", verbose=False)
    for parameter, other in zip(fresh.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-6)
    trainer.strategy.remove_checkpoint(f"{folder}/epoch=0.ckpt")
    if site == 0:  # as if one of the two had been written, and the other not
        shutil.copytree(f"{folder}/last.ckpt.shards", f"{folder}/other.ckpt.shards")
        shutil.copy(f"{folder}/epoch=2.ckpt", f"{folder}/other.ckpt")
    trainer.strategy.barrier()
    with pytest.raises(ValueError, match="are of another save than the checkpoint that refers to them"):
        run(3, f"{folder}/other.ckpt")


def test_lightning_resumes_from_shards(sites, tmp_path):
    pytest.importorskip("pytorch_lightning")
    sites(2).run(fits, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} >= {"epoch=1.ckpt.shards", "epoch=2.ckpt.shards"}
    assert not (tmp_path / "epoch=0.ckpt.shards").exists()
    assert torch.load(tmp_path / "epoch=1.ckpt", weights_only=False)["state_dict"] == {}
    assert set(join_shards(tmp_path / "epoch=2.ckpt.shards")["model"]) == {
        "words.weight",
        "tags.weight",
        "head.weight",
        "head.bias",
    }
