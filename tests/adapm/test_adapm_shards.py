"""Sharded checkpoints: read on any number of sites, joined, and damaged or failed ones that leave the previous one."""

import contextlib
import copy
import hashlib
import io
import json
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import support
import torch
from recommender import KINDS, Recommender, end, make, same, steps, whole
from safetensors.torch import load_file, save

import dadplug.adapm.shards as shards
from dadplug.adapm import join_shards, load_shards, save_shards
from dadplug.adapm.join import main as join
from dadplug.errors import MismatchError


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


def rewrite_as_0_3(folder):
    """Put shards in the place of those in a folder that are written as dadplug 0.3.0 did."""
    index = json.loads((folder / "index.json").read_text())
    files = {}
    for site, name in enumerate(index["files"]):
        tensors = load_file(folder / name)
        tables = {table: {part: tensors[f"{table}.{part}"] for part in ("keys", "values")} for table in index["tables"]}
        old = folder / f"{name[:8]}-site-{site}-of-{len(index['files'])}.pt"
        torch.save({"site": site, "tables": tables}, old)
        files[old.name] = hashlib.sha256(old.read_bytes()).hexdigest()
        (folder / name).unlink()
    (folder / "index.json").write_text(json.dumps(index | {"version": 1, "files": files}, indent=1))


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
    assert files == ["-rest.pt", "-site-0-of-2.safetensors", "-site-1-of-2.safetensors"]
    rows = [load_file(path) for path in Path(folder).glob("*-site-*")]
    for name, count in (("items.weight", 40), ("tags.weight", 30)):
        assert sorted(torch.cat([each[f"{name}.keys"] for each in rows]).tolist()) == list(range(count))
    joined = join_shards(folder)
    assert same(joined, first)
    rewrite_as_0_3(Path(folder))
    assert same(join_shards(folder), first)
    plain = Recommender()
    plain.load_state_dict(joined["model"])
    KINDS[kind](plain.parameters()).load_state_dict(joined["optimizer"])
    if kind == "adagrad":
        assert all(same(each, first) for number in (1, 3) for each in sites(number).run(loads, kind, folder))
    if kind == "sgd":
        (said,) = support.run_programs([["-m", "dadplug.adapm.join", folder, str(tmp_path / "whole.pt")]])
        assert (said.status, said.errors) == (0, "")
        assert "whole.pt: 5 tensors, 679 numbers" in said.output
        assert same(torch.load(tmp_path / "whole.pt", weights_only=True), first)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    managed, optimizer = make("adagrad")
    save_shards(managed, folder, optimizer)
    return folder


def test_tables_of_another_optimizer_are_told(saved):
    managed, optimizer = make("sgd")
    with pytest.raises(ValueError, match="holds tables of another model or optimizer"):
        load_shards(managed, saved, optimizer)


@support.at_sites(2)
def test_sites_with_disks_of_their_own_and_errors_on_all(tmp_path):
    """Site 1's files are where site 0 does not look, and one of them is damaged."""
    rank = int(os.environ["RANK"])
    own = Path(tmp_path) / str(rank)
    managed, optimizer = make("adagrad")
    steps(managed, optimizer, range(2))
    save_shards(managed, own, optimizer)
    saved = whole(managed, optimizer)
    managed.load_state_dict({name: value * 0 for name, value in saved["model"].items()})
    load_shards(managed, own, optimizer)
    assert same(whole(managed, optimizer), saved)
    if rank == 1:
        flip(None, own)
    with pytest.raises(ValueError, match=r"site-1-of-2\.safetensors of checkpoint .* is damaged"):
        load_shards(managed, own, optimizer)
    if rank == 1:
        shard_of(own).unlink()
    with pytest.raises(FileNotFoundError, match=r"site-1-of-2\.safetensors .* is missing: no site has it"):
        load_shards(managed, own, optimizer)
    if rank == 1:
        (Path(tmp_path) / "file").write_text("")
    blocked = Path(tmp_path) / ("fine" if rank == 0 else "file")
    with pytest.raises(RuntimeError, match=r"cannot write its shard into .*, at site 1"):
        save_shards(managed, blocked, optimizer)
    end(managed)


def fits(folder):
    pl = pytest.importorskip("pytorch_lightning")
    import scores_lightning as scores
    from scores import BATCH, data
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
        trainer.fit(module, DataLoader(data(site), batch_size=BATCH), ckpt_path=resume)
        return module, trainer

    expected, trainer = run(3)
    run(2, more=[Full()])
    assert sum(path.name.endswith("rest.pt") for path in Path(f"{folder}/last.ckpt.shards").iterdir()) == 1
    for checkpoint, name in (("sharded", "epoch=1"), ("whole", "epoch=1"), ("sharded", "last")):
        resumed, _ = run(3, f"{folder}/{name}.ckpt", checkpoint)
        for parameter, other in zip(resumed.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-6)
    fresh = scores.Scores("adagrad")
    trainer.validate(fresh, DataLoader(data(0), BATCH), ckpt_path=f"{folder}/epoch=2.ckpt", verbose=False)
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


@contextlib.contextmanager
def no_room(folder: Path):
    """Fill the disk that a folder is on, where it is a small one of its own; else forbid files to grow."""
    if folder.is_mount():
        filler = folder / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        try:
            yield
        finally:
            filler.unlink()
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def failing(rank: int, phase: str, folder: Path):
    """Let this site's part of a save fail, where it is its turn."""
    site, what = phase.split()
    original, original_shard = shards.write_whole, shards.write_shard
    if str(rank) != site:
        yield
    elif what == "shard":
        with no_room(folder):
            yield
    elif what == "memory":
        shards.write_shard = lambda *_: (_ for _ in ()).throw(MemoryError("no memory left"))
        yield
        shards.write_shard = original_shard
    else:  # the shard still has room, what comes after it has not

        def write(path, item):
            with no_room(folder):
                return original(path, item)

        shards.write_whole = write
        yield
        shards.write_whole = original


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fails(base: str, phases: list[str], apart: bool) -> None:
    rank = int(os.environ["RANK"])
    folder = Path(base) / str(rank) if apart else Path(base)
    managed, optimizer = make("adagrad")
    steps(managed, optimizer, range(2))
    save_shards(managed, folder, optimizer)
    saved, files = copy.deepcopy(whole(managed, optimizer)), names_in(folder)
    steps(managed, optimizer, range(2, 4))
    for phase in phases:
        with failing(rank, phase, folder), pytest.raises(RuntimeError, match=f"at site {phase[0]}: .*Error: "):
            save_shards(managed, folder, optimizer)
        managed.manager.barrier()
        assert names_in(folder) == files, phase
        managed.manager.barrier()
        again, optimizer_again = make("adagrad", seed=3)
        load_shards(again, folder, optimizer_again)
        assert same(whole(again, optimizer_again), saved), phase
        end(again)
    (folder / f"0badbeef-site-{rank}-of-2.pt").write_text("of a save that was killed")
    (folder / f"0badbeef-site-{rank}-of-2.safetensors.part").write_text("so was this")
    (folder / "notes.txt").write_text("the user's")
    later = whole(managed, optimizer)
    managed.manager.barrier()
    save_shards(managed, folder, optimizer)
    managed.manager.barrier()
    assert len(names_in(folder)) == (5 if not apart else 4 if rank == 0 else 2)
    assert "notes.txt" in names_in(folder)
    assert not same(later, saved)
    load_shards(managed, folder, optimizer)
    assert same(whole(managed, optimizer), later)
    end(managed)


PHASES = ["1 shard", "0 shard", "0 rest", "1 memory"]


def test_a_save_that_fails_leaves_the_checkpoint_before_it(sites, tmp_path):
    sites(2).run(fails, str(tmp_path), PHASES, False)


def test_full_disks_leave_the_checkpoint_before_them(sites, tmp_path):
    disks = [tmp_path / "0", tmp_path / "1"]
    mounted = []
    try:
        for disk in disks:
            disk.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
            with contextlib.suppress(OSError):
                if subprocess.run(command, capture_output=True, timeout=200).returncode == 0:
                    mounted.append(disk)
        sites(2).run(fails, str(tmp_path), PHASES[:3], True)
    finally:
        for disk in mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=200)


KILLED = """
    import os, signal
    from pathlib import Path
    sys.path.insert(0, {helpers!r})
    from recommender import make, steps, whole
    import dadplug.adapm.shards as shards
    folder, when = Path({folder!r}), {when!r}
    managed, optimizer = make("adagrad")
    steps(managed, optimizer, range(2))
    shards.save_shards(managed, folder, optimizer)
    saved = whole(managed, optimizer)
    if rank == 0:
        torch.save(saved, folder.parent / "expected.pt")
    steps(managed, optimizer, range(2, 3))

    def killed(function, before):
        def call(*args):
            result = None if before else function(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return call

    if when == f"{{rank}} after its shard":
        shards.write_shard = killed(shards.write_shard, False)
    elif when == f"{{rank}} before the commit":
        commit, replace = killed(os.replace, True), os.replace
        os.replace = lambda old, new: (commit if new.name == "index.json" else replace)(old, new)
    shards.save_shards(managed, folder, optimizer)
"""


@pytest.mark.parametrize("when", ["1 after its shard", "0 before the commit"])
def test_a_site_killed_in_a_save_is_named_and_the_checkpoint_before_it_loads(tmp_path, when):
    folder = tmp_path / "saved"
    code = KILLED.format(helpers=str(Path(support.__file__).parent), folder=str(folder), when=when)
    ended = support.run_programs(support.site_scripts(code, tmp_path))
    killed = int(when[0])
    assert ended[killed].status == -9, ended[killed].errors
    assert f"SiteError: site {killed}" in ended[1 - killed].errors
    managed, optimizer = make("adagrad", seed=7)
    load_shards(managed, folder, optimizer)
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    assert same(whole(managed, optimizer), expected)
    assert same(join_shards(folder), expected)
    save_shards(managed, folder, optimizer)
    left = [name[8:] for name in names_in(folder) if name != "index.json"]
    assert left == ["-rest.pt", "-site-0-of-1.safetensors"]
    managed.manager.close()


class Evil:
    """Runs code when it is unpickled, were that allowed."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


def rename(index, folder, name):
    (old,) = index["files"]
    target = folder / name
    if not target.exists():
        shutil.copy(folder / old, target)
    index["files"] = {name: index["files"][old]}


def replace(index, folder, content):
    """Replace a shard so that its digest is right."""
    (name,) = index["files"]
    (folder / name).write_bytes(content)
    index["files"][name] = hashlib.sha256(content).hexdigest()


def rewrite(index, folder, change):
    """Change a shard so that its digest is right."""
    (name,) = index["files"]
    tensors = load_file(folder / name)
    change(tensors)
    replace(index, folder, save(tensors))


def rewrite_old(index, folder, content):
    """Put a shard of dadplug 0.3 in the place of one."""
    (name,) = index["files"]
    old, written = Path(name).with_suffix(".pt").name, io.BytesIO()
    torch.save({"fills": torch.zeros(SIZE)} | content, written)
    index.update(version=1, files={old: ""})
    replace(index, folder, written.getvalue())


def field(name, value):
    return lambda index, folder: index["tables"]["items.weight"].update({name: value})


def part(**new):
    new = {f"items.weight.{name}": value.contiguous() for name, value in new.items()}
    return lambda index, folder: rewrite(index, folder, lambda tensors: tensors.update(new))


KEYS = torch.arange(40)
SIZE = 1 << 14  # above that of the tables


def without_index(index, folder, content=None):
    """Remove the index, or replace it by a text."""
    index.clear()
    (folder / "index.json").unlink()
    if content is not None:
        (folder / "index.json").write_text(content)


def shard_of(folder):
    return next(folder.glob("*-site-*"))


def flip(index, folder):
    content = bytearray(shard_of(folder).read_bytes())
    content[len(content) // 2] ^= 1
    shard_of(folder).write_bytes(content)


ABSENT = ("missing", "rest", "unfinished")  # which are a FileNotFoundError
TAMPERED = {
    "missing": (
        lambda index, folder: shard_of(folder).unlink(),
        r"shard .*-site-0-of-1\.safetensors of checkpoint .* is missing",
    ),
    "damaged": (flip, r"file .*-site-0-of-1\.safetensors of checkpoint .* is damaged: it is not what was written"),
    "cut": (lambda index, folder: shard_of(folder).write_bytes(shard_of(folder).read_bytes()[:100]), "is damaged"),
    "rest": (lambda index, folder: next(folder.glob("*-rest.pt")).unlink(), r"-rest\.pt of checkpoint .* is missing"),
    "unfinished": (without_index, r"holds no index\.json: it is no sharded checkpoint, or was never finished"),
    "text": (lambda index, folder: without_index(index, folder, "{"), r"index\.json is damaged"),
    "version": (lambda index, folder: index.update(version=9), "by another version of dadplug: format 9, here 2"),
    "parent": (lambda index, folder: rename(index, folder, "../outside.pt"), "'../outside.pt' is no name of a shard"),
    "absolute": (lambda index, folder: rename(index, folder, "/tmp/x.pt"), "'/tmp/x.pt' is no name of a shard"),
    "line": (lambda index, folder: rename(index, folder, next(iter(index["files"])) + "\n"), "is no name of a shard"),
    "rest outside": (lambda index, folder: index.update(rest={"../rest.pt": "0" * 64}), "is no name of a shard"),
    "stamp": (lambda index, folder: rename(index, folder, "0badbeef-site-0-of-1.safetensors"), "with 2 stamps"),
    "number": (
        lambda index, folder: rename(index, folder, next(iter(index["files"]))[:8] + "-site-0-of-2.safetensors"),
        "it names",
    ),
    "digest": (lambda index, folder: index["files"].update(dict.fromkeys(index["files"], 7)), "the digest of"),
    "files": (lambda index, folder: index.update(files=[1]), "is damaged"),
    "rows": (field("rows", 10**12), "its tables take .* bytes, the shards have|checkpoint .* holds tables of another"),
    "negative": (field("rows", -1), "rows of table 'items.weight' is -1"),
    "fraction": (field("columns", 12.0), "columns of table 'items.weight' is 12.0"),
    "parts": (field("parts", ["sum", "more", "and", "more"]), r"12 columns, 6 of them weights|of another model"),
    "names": (field("names", "items.weight"), "has the names"),
    "keys": (part(keys=KEYS - 1), "has keys from -1 to 38, of 40 rows"),
    "types": (part(keys=KEYS.int()), "has keys of torch.int32"),
    "shapes": (part(values=torch.zeros(40, 20)), r"has values of shape \(40, 20\) for 40 keys"),
    "twice": (part(keys=KEYS % 39), "lacks rows of items.weight, or has them twice"),
    "no tensors": (
        lambda index, folder: rewrite(
            index, folder, lambda tensors: tensors.update({"items.weight.key": tensors.pop("items.weight.keys")})
        ),
        "has no keys and values",
    ),
    "no safetensors": (
        lambda index, folder: replace(index, folder, b"\xff" * SIZE),
        "safetensors .* is damaged: .*[Hh]eader",
    ),
    "another ending": (lambda index, folder: index.update(version=1), "it names"),
    "code": (lambda index, folder: rewrite_old(index, folder, {"site": Evil(), "tables": {}}), "is damaged"),
    "old tables": (lambda index, folder: rewrite_old(index, folder, {"site": 0}), "its tables are not those"),
    "tables": (
        lambda index, folder: rewrite(
            index, folder, lambda tensors: tensors.update({"x.keys": tensors.pop("tags.weight.keys")})
        ),
        "are not those",
    ),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_an_index_and_shards_are_checked_before_they_are_used(saved, tmp_path, how, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    index = json.loads((folder / "index.json").read_text())
    tamper, message = TAMPERED[how]
    tamper(index, folder)
    if index:
        (folder / "index.json").write_text(json.dumps(index))
    kind = FileNotFoundError if how in ABSENT else ValueError
    with pytest.raises(kind, match=message):
        join_shards(folder)
    if how != "twice":
        managed, optimizer = make("adagrad", seed=3)
        before = managed.state_dict()
        with pytest.raises(kind, match=message):
            load_shards(managed, folder, optimizer)
        assert same(managed.state_dict(), before)
    assert join([str(folder), str(tmp_path / "whole.pt")]) == 1
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "whole.pt").exists()
    assert not (tmp_path / "evil").exists()


def test_a_stamp_chooses_the_save_and_another_is_refused(saved):
    managed, optimizer = make("adagrad", seed=3)
    stamp = next(iter(json.loads((saved / "index.json").read_text())["files"]))[:8]
    load_shards(managed, saved, optimizer, stamp)
    assert join_shards(saved, stamp)["model"].keys() == managed.state_dict().keys()
    for wrong in ("0badbeef", "../../x"):
        with pytest.raises(ValueError, match="are of another save than the checkpoint that refers to them"):
            load_shards(managed, saved, optimizer, wrong)
        with pytest.raises(ValueError, match="are of another save"):
            join_shards(saved, wrong)


@pytest.mark.parametrize("stamp", ["../elsewhere", "/tmp/elsewhere", 7, "0123456789"])
def test_a_stamp_that_names_another_place_is_refused(tmp_path, monkeypatch, stamp):
    managed, optimizer = make("sgd")
    monkeypatch.setattr(managed.manager.transport, "gather_present", lambda item: {0: stamp})
    with pytest.raises(MismatchError, match=r"site 0 .*has sent an invalid stamp"):
        save_shards(managed, tmp_path / "folder", optimizer)
    assert not [*tmp_path.rglob("*")]
    monkeypatch.undo()
    end(managed)
