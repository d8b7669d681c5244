"""nnU-Net between sites: by its own command, with a launcher's variables and over a hub."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch

pytest.importorskip("nnunetv2", reason="nnU-Net is not installed")

import hub_kits
from nnunet_data import DATASET, Site, write_cases, write_plans
from running_hub import running_hub
from support import free_port

from dadplug.errors import KitError
from dadplug.hub.pki import provision
from dadplug.hub.pki.kits import current_time
from dadplug.nnunet import DadplugTraining

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(autouse=True)
def _ended():
    yield
    for each in Site.started:
        if each.poll() is None:  # after a failure
            each.kill()
    Site.started.clear()


def sites(folder: Path, count: int = 2) -> list[Site]:
    """Return sites with plans."""
    made = [Site(folder / "abcd"[number], number) for number in range(count)]
    for each in made:
        write_plans(each.folder)
    return made


def launch(
    among: list[Site], *arguments: str, own: dict[int, dict] | None = None, kits: Path | None = None, **further: object
) -> None:
    """Start a training at all sites on numbered batches, with kits or with the variables that torchrun sets."""
    port = free_port()
    for each in among:
        place = {"RANK": each.number, "WORLD_SIZE": len(among), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if kits is not None:
            place = {"DADPLUG_KIT": kits / each.folder.name}
        settings = {"SITES": json.dumps([each.number]), "SEED": each.number, **place, **further}
        each.train(*arguments, **(settings | (own or {}).get(each.number, {})))


@pytest.mark.parametrize(
    ("configuration", "mode", "over_hub"), [("3d_fullres", "dsgd", False), ("2d", "dad", True), ("2d", "dad", False)]
)
def test_two_sites_train_as_one_process_with_the_batches_of_both(tmp_path, configuration, mode, over_hub):
    a, b, whole = sites(tmp_path, 3)
    whole.train(trainer="nnUNetTrainerTinyAlone", configuration=configuration, SITES="[0, 1]", SEED=0)
    with running_hub(tmp_path / "kits") if over_hub else nullcontext() as hub:
        kits = hub.kits if over_hub else None
        launch([a, b], configuration=configuration, kits=kits, DADPLUG_OPTIONS=f"mode={mode}")
        for each in (a, b, whole):
            each.end()
    lines = [each.steps() for each in (a, b, whole)]
    assert sorted(lines[0]) == sorted(lines[1]) == sorted(lines[2]) == list(range(8))
    for first, second, reference in zip(*[each.values() for each in lines], strict=True):
        assert (first["batch"], second["batch"], reference["batch"]) == (2, 2, 4)
        assert first["digest"] == second["digest"]
        assert first["lr"] == second["lr"] == reference["lr"]
        assert (first["loss"] + second["loss"]) / 2 == pytest.approx(reference["loss"], abs=2e-5)
        assert first["gradient"] == pytest.approx(reference["gradient"], rel=1e-3)
        assert reference["gradient"] > 0.01
    assert abs(lines[0][0]["loss"] - lines[1][0]["loss"]) > 1e-4  # the batches differ
    own, reference = (torch.load(each.results / "weights.pt") for each in (a, whole))
    for name, weight in reference.items():
        torch.testing.assert_close(own[name], weight, rtol=1e-3, atol=1e-4)
    first, second, alone = (each.logged() for each in (a, b, whole))
    for what in ("train_losses", "val_losses", "mean_fg_dice", "ema_fg_dice", "dice_per_class_or_region", "lrs"):
        assert first[what] == second[what]
        torch.testing.assert_close(torch.tensor(first[what]), torch.tensor(alone[what]), rtol=1e-3, atol=1e-4)
    for each in (a, b):
        assert (each.results / "checkpoint_final.pth").exists()
        assert (each.results / "checkpoint_best.pth").exists()
        assert not list(each.results.glob("checkpoint_latest*"))
        assert "Pseudo dice at site 0" in each.log.read_text()
        assert "Pseudo dice at site 1" in each.log.read_text()


def test_killed_sites_continue_from_their_checkpoints_as_if_nothing_had_happened(tmp_path):
    options = {"DADPLUG_OPTIONS": "rank=2 wire=int8 merge=all", "SETTINGS": '{"num_epochs": 3}'}
    a, b = sites(tmp_path / "through")
    launch([a, b], **options)
    for each in (a, b):
        each.end()
    c, d = sites(tmp_path / "killed")
    launch([c, d], **options, LEAVE=9)  # in the third epoch
    for each in (c, d):
        each.end(-9)
    assert sorted(file.name for file in c.results.glob("checkpoint_latest*")) == [
        "checkpoint_latest.dadplug0.pt",
        "checkpoint_latest.pth",
    ]
    launch([c, d], "--c", **options)
    for each in (c, d):
        assert "begins anew" not in each.end()
    through, lines = a.steps(), c.steps()
    assert sorted(lines) == list(range(12))
    assert {step: line["digest"] for step, line in lines.items()} == {
        step: line["digest"] for step, line in through.items()
    }
    assert len({line["digest"] for line in lines.values()}) == 12
    assert d.steps()[11]["digest"] == lines[11]["digest"]
    for what in ("train_losses", "mean_fg_dice"):
        assert a.logged()[what] == c.logged()[what] == d.logged()[what]


def test_sites_with_other_plans_or_epochs_are_named(tmp_path):
    a, b = sites(tmp_path)
    path = b.folder / "preprocessed" / DATASET / "nnUNetPlans.json"
    plans = json.loads(path.read_text())
    plans["foreground_intensity_properties_per_channel"]["0"]["mean"] = 2.0
    path.write_text(json.dumps(plans))
    launch([a, b])
    for each in (a, b):
        text = each.end(1)
        assert "plans, foreground_intensity_properties_per_channel" in text
        assert "site 1" in text
        assert "dadplug nnunet merge" in text
    path.write_text((a.folder / "preprocessed" / DATASET / path.name).read_text())
    launch([a, b], own={1: {"SETTINGS": '{"num_epochs": 5}'}})
    for each in (a, b):
        assert "num_epochs is 2 at site 0" in each.end(1)


@pytest.mark.parametrize("mode", ["rankdad", "localsgd"])
def test_a_site_that_was_killed_returns_in_mid_epoch(tmp_path, mode):
    among = sites(tmp_path, 3)
    lost = among[1]
    options = f"mode={mode} min_sites=1 timeout=300" + " every=2" * (mode == "localsgd")
    settings = {"SETTINGS": '{"num_epochs": 4, "num_iterations_per_epoch": 10}', "PAUSE": 0.3}

    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:

        def start(site: Site, **further: object) -> None:
            kit = hub.kits / site.folder.name
            place = {"SITES": json.dumps([site.number]), "SEED": site.number, "DADPLUG_KIT": kit}
            site.train(**(settings | place | {"DADPLUG_OPTIONS": options} | further))

        ready = {"READY": tmp_path / "ready"}
        for each in among:  # the others wait for the site to be about to connect once more
            start(each, **({"LEAVE": 12} if each is lost else {"WAITS_AT": 15} | ready))
        lost.end(-9)
        start(lost, **ready)
        texts = [each.end() for each in among]
    a, b, c = (each.steps() for each in among)
    assert sorted(a) == sorted(c) == list(range(40))
    returned = [step for step in b if step >= 12]
    assert len(returned) > 5, "the site has come back too late to tell"
    assert returned == list(range(returned[0], 40))
    for step in returned:
        for other in (a, c):
            assert [b[step][what] for what in ("lr", "epoch")] == [other[step][what] for what in ("lr", "epoch")]
    if mode != "localsgd":
        for step in returned:
            for what in ("digest", "present"):
                assert b[step][what] == a[step][what] == c[step][what], (step, what)
        assert a[13]["present"] == [0, 2]
        assert a[39]["present"] == [0, 1, 2]
    weights = [torch.load(each.results / "weights.pt") for each in among]
    for other in weights[1:]:
        assert all(torch.equal(other[name], weight) for name, weight in weights[0].items())
    first, *others = (each.logged() for each in among)
    for other in others:
        for what in ("train_losses", "val_losses", "mean_fg_dice", "lrs"):
            assert other[what] == pytest.approx(first[what])
            assert len(other[what]) == 4
    assert "joined the other sites in epoch" in texts[1]
    assert all((each.results / "checkpoint_final.pth").exists() for each in among)


def test_one_of_two_processes_with_one_folder_writes(tmp_path):
    (a,) = sites(tmp_path, 1)
    b = Site(a.folder, 1)
    b.log = tmp_path / "second.txt"
    launch([a, b], DADPLUG_OPTIONS="mode=dsgd")
    texts = [each.end() for each in (a, b)]
    assert sum("another process writes to" in text for text in texts) == 1
    logs = [path.read_text() for path in a.results.glob("training_log*.txt")]
    assert sum("Training done" in log for log in logs) == 1
    assert (a.results / "checkpoint_final.pth").exists()


def test_sites_with_data_of_their_own_plan_alike_and_train(tmp_path):
    a, b = (Site(tmp_path / name, number) for number, name in enumerate("ab"))
    for each, cases in ((a, 5), (b, 8)):
        write_cases(each.folder, each.number, cases)
        each.call("nnUNetv2_extract_fingerprint", "-d", 101, "-np", 1)
    own = [each.folder / "preprocessed" / DATASET / "dataset_fingerprint.json" for each in (a, b)]
    agreed = tmp_path / "agreed.json"
    assert "13 cases of 2 sites" in a.call("dadplug", "nnunet", "merge", *own, "--out", agreed)
    for each in (a, b):
        each.call("dadplug", "nnunet", "plan", agreed, "-d", 101)
        each.call("nnUNetv2_preprocess", "-d", 101, "-c", "3d_fullres", "-np", 1)
    plans = [path.parent / "nnUNetPlans.json" for path in own]
    assert plans[0].read_text() == plans[1].read_text()
    assert (own[0].parent / "dataset_fingerprint_own.json").exists()
    port = free_port()
    for each in (a, b):
        each.train(RANK=each.number, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    for each in (a, b):
        each.end()
        assert json.loads((each.results / "validation" / "summary.json").read_text())["foreground_mean"]
    assert a.steps()[7]["digest"] == b.steps()[7]["digest"]
    planned = json.loads(plans[0].read_text())["configurations"]["3d_fullres"]["batch_size"]
    assert {line["batch"] for line in [*a.steps().values(), *b.steps().values()]} == {planned}
    summary = b.results / "validation" / "summary.json"
    summary.unlink()  # as if the site had been killed in its validation
    b.train("--c", RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), DADPLUG_OPTIONS="timeout=5")
    b.end()
    assert json.loads(summary.read_text())["foreground_mean"]


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(tmp_path):
    class Full:
        def save_checkpoint(self, filename: str) -> None:
            Path(filename).write_bytes(b"ha")
            if self.full:
                raise RuntimeError("enforce fail at inline_container.cc")

    class Trainer(DadplugTraining, Full):
        wrapped, local_rank, full = None, 0, False

    trainer, latest = Trainer.__new__(Trainer), tmp_path / "checkpoint_latest.pth"
    trainer.save_checkpoint(str(latest))
    assert latest.read_bytes() == b"ha"
    latest.write_bytes(b"whole")
    trainer.full = True
    with pytest.raises(RuntimeError, match="enforce fail"):
        trainer.save_checkpoint(str(latest))
    assert latest.read_bytes() == b"whole"
    assert [*tmp_path.iterdir()] == [latest]


class Prepared(Exception):
    """The data are about to be prepared."""


class Preparing:
    """What an nnU-Net trainer has before it prepares its data."""

    def __init__(self, plans, configuration, fold, dataset_json, device) -> None:
        self.output_folder, self.current_epoch, self.num_epochs = plans["folder"], plans["epoch"], 2

    def on_train_start(self) -> None:
        raise Prepared


class PreparingTrainer(DadplugTraining, Preparing):
    """One that trains with other sites."""


@pytest.mark.parametrize(
    ("name", "options", "error", "match"),
    [
        ("nobody", "", KitError, "is not a folder"),
        ("hub", "", KitError, "is the kit of the hub"),
        ("expired", "", KitError, "is valid from"),
        ("mixed", "", KitError, "is not signed by the authority of this kit"),
        ("a", "start_sites=3", ValueError, "the roster has 2"),
        ("", "start_sites=2", ValueError, "needs a hub"),
        ("a", "", Prepared, None),
    ],
)
def test_a_wrong_kit_is_refused_before_the_data_are_prepared(tmp_path, monkeypatch, name, options, error, match):
    kits = hub_kits.make(tmp_path / "kits", hub="127.0.0.1:9", sites=["a", "expired"])
    provision.renew(kits, "expired", days=1, now=current_time() - timedelta(days=5))
    shutil.copytree(kits / "a", kits / "mixed")
    shutil.copy(hub_kits.make(tmp_path / "others") / "a" / "ca.pem", kits / "mixed")
    monkeypatch.setenv("DADPLUG_KIT", str(kits / name) if name else "")
    monkeypatch.setenv("DADPLUG_OPTIONS", options)

    def start(epoch: int) -> None:
        plans = {"folder": tmp_path, "epoch": epoch}
        PreparingTrainer(plans, "3d_fullres", 0, {}, torch.device("cpu")).on_train_start()

    with pytest.raises(error, match=match):
        start(0)
    with pytest.raises(Prepared):  # a training that has ended, which connects to no site
        start(2)


FOUND = """
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name as find
made = find("nnUNetTrainerDadplug_dsgd_5epochs")
print(made.__module__, made.dadplug_options, made._epochs, find("nnUNetTrainerDadplug").__name__)
"""


def test_nnunet_finds_the_trainers_while_they_are_installed(tmp_path):
    site = Site(tmp_path, 0)
    site.call("dadplug", "nnunet", "install")
    try:
        done = subprocess.run([sys.executable, "-c", FOUND], capture_output=True, text=True)
        assert done.stdout.split("\n")[-2] == "dadplug.nnunet {'mode': 'dsgd'} 5 nnUNetTrainerDadplug", done.stderr
    finally:
        site.call("dadplug", "nnunet", "uninstall")
    assert subprocess.run([sys.executable, "-c", FOUND], capture_output=True).returncode
