"""The flag --kit of the experiments and of both two-site examples."""

from __future__ import annotations

import json
import re
from pathlib import Path

import hub_kits
import pytest
import support
from data_files import photo_files
from running_hub import running_hub

from dadplug.cli import place_of
from dadplug.cli.arguments import Place
from dadplug.data import load_dataset
from dadplug.errors import KitError
from dadplug.experiment import _loaders as experiment_loaders
from dadplug.experiment import build_parser

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("bavaria", "saxony")


def parsed(*flags: str):
    return build_parser().parse_args(list(flags))


def test_a_kit_determines_the_place(tmp_path):
    kits = hub_kits.make(tmp_path / "kits", sites=["a", "b", "c"])
    assert place_of(parsed("--kit", str(kits / "c"))) == Place(2, 3, kit=str(kits / "c"))
    for flags, name in (
        (["--rank", "0"], "rank"),
        (["--num-nodes", "3"], "num-nodes"),
        (["--dist-url", "x"], "dist-url"),
    ):
        with pytest.raises(ValueError, match=f"leave out {name}"):
            place_of(parsed("--kit", str(kits / "c"), *flags))
    with pytest.raises(KitError, match="is not a folder"):
        place_of(parsed("--kit", str(kits / "d")))


def test_without_a_kit_the_place_is_that_of_the_flags():
    assert place_of(parsed()) == Place(0, 1, "tcp://127.0.0.1:8998")
    assert place_of(parsed("--rank", "1", "--num-nodes", "2", "--dist-url", "tcp://h:1")) == Place(1, 2, "tcp://h:1")


def test_under_torchrun_the_place_is_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert place_of(parsed()) == Place(1, 2)


def test_processes_of_a_site_have_parts_of_its_data(tmp_path, monkeypatch):
    kits = hub_kits.make(tmp_path / "kits")
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    samples = load_dataset("digits").train
    for site, name in enumerate("ab"):
        seen: list[int] = []
        for process in range(2):
            monkeypatch.setenv("LOCAL_RANK", str(process))
            place = place_of(parsed("--kit", str(kits / name)))
            assert place == Place(site, 2, kit=str(kits / name), process=process, processes=2)
            loader = experiment_loaders(parsed(), samples, place)["train"]
            seen += [len(loader.dataset)]
        whole = experiment_loaders(parsed(), samples, Place(site, 2))["train"]
        assert sum(seen) == len(whole.dataset)
        assert abs(seen[0] - seen[1]) <= 1


@pytest.mark.slow
def test_an_experiment_trains_by_kits(tmp_path):
    support.need("catalyst")
    flags = ["--epochs", "1", "--N", "400", "--log-dir", str(tmp_path / "logs")]
    with running_hub(tmp_path / "kits", sites=NAMES) as hub:
        commands = [["-m", "dadplug.experiment", "--kit", str(hub.kits / name), *flags] for name in NAMES]
        for each in support.run_programs(commands, timeout=200, folder=ROOT, preload=["catalyst"]):
            assert each.status == 0, each.errors
    for rank in range(2):
        folder = tmp_path / "logs" / "experiment" / f"site_{rank}"
        parameters = json.loads((folder / "parameters.json").read_text())
        assert (parameters["rank"], parameters["num_nodes"]) == (rank, 2)
        assert json.loads((folder / "results.json").read_text())["replicas_equal"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "trainer", "accuracy"), [("two_site_mnist", "catalyst", 0.6), ("two_site_vit", "lightning", 0.9)]
)
def test_both_examples_train_by_kits(tmp_path, example, trainer, accuracy):
    package = {"catalyst": "catalyst", "lightning": "pytorch_lightning"}[trainer]
    support.need(package)
    if example == "two_site_vit":
        support.need("linformer")
        support.need("PIL")
    flags = ["--trainer", trainer, "--epochs", "1", "--log-dir", str(tmp_path)]
    if example == "two_site_vit":
        (tmp_path / "photos").mkdir()
        for name, content in photo_files(60).items():
            (tmp_path / "photos" / name).write_bytes(content)
        flags += ["--dataset", "dogsvscats", "--data-dir", str(tmp_path / "photos"), "--batch-size", "8"]
    with running_hub(tmp_path / "kits", sites=NAMES) as hub:
        commands = [[str(ROOT / "examples" / f"{example}.py"), "--kit", str(hub.kits / name), *flags] for name in NAMES]
        finished = support.run_programs(commands, timeout=200, preload=[package])
        for each in finished:
            assert each.status == 0, each.errors
    line = next(line for line in finished[0].output.splitlines() if re.match(r"rankdad +[01]\.", line))
    assert line.endswith("equal")
    assert float(line.split()[1]) > accuracy
    assert finished[1].output == ""


def test_an_unusable_kit_ends_a_program_with_one_line(tmp_path):
    kits = hub_kits.make(tmp_path / "kits")
    commands = [
        [str(ROOT / "examples" / "two_site_mnist.py"), "--kit", str(kits / "hub")],
        ["-m", "dadplug.experiment", "--kit", str(kits / "a"), "--rank", "1"],
    ]
    hub, place = support.run_programs(commands, folder=ROOT)
    assert (hub.status, place.status) == (1, 1)
    assert hub.errors.strip() == f"error: {kits / 'hub'} is the kit of the hub: a site needs its own"
    assert "leave out rank" in place.errors
    assert "Traceback" not in hub.errors + place.errors
