"""Kits in commands: kits that change while the hub runs, and the flag --kit."""

import json
import re
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path

import forkserver
import hub_kits
import pytest
import support
from data_files import photo_files
from fleet import ENDED, Fleet
from running_hub import HubLog, TestSite, free_port, running_hub, until

from dadplug.data import load_dataset
from dadplug.errors import KitError, RefusedError
from dadplug.experiment import _loaders as experiment_loaders
from dadplug.experiment import build_parser
from dadplug.hub.pki.kits import Kit
from dadplug.hub.wire.messages import Drop, Pause, Start
from dadplug.tools.cli import Place, place_of

ROOT = Path(__file__).parents[2]


def command(folder: Path, *arguments: str) -> support.Finished:
    return support.run_programs([["-m", "dadplug", *arguments]], ENDED, folder=folder)[0]


class Project(HubLog):
    """A project with a hub that runs by its command, from a copy of its kit.

    Args:
        folder: folder for all of it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.kits, self.address = folder, folder / "kits", f"127.0.0.1:{free_port()}"
        self.provision("a", "b")
        shutil.copytree(folder / "kits" / "hub", folder / "copy")
        files = ["--status", "status.json", "--journal", "journal"]
        self.process = forkserver.start(["-m", "dadplug", "hub", "copy", *files], folder=folder)
        until(lambda: (folder / "status.json").exists() or self.process.poll() is not None)

    def provision(self, *sites: str) -> None:
        lines = ['name = "study"', f'hub = "{self.address}"', f"sites = {list(sites)}", 'hub_at = "a"']
        (self.folder / "project.toml").write_text("\n".join(lines))
        made = command(self.folder, "provision", "project.toml")
        assert made.status == 0, made.errors

    def copy(self, name: str, kit: str = "copy") -> None:
        shutil.copy(self.folder / "kits" / "hub" / name, self.folder / kit / name)

    def kit(self, name: str) -> Kit:
        return Kit.load(self.folder / "kits" / name)

    def dial(self, name: str) -> TestSite:
        kit = self.kit(name)
        return TestSite(kit, kit.roster.address(), sites=len(kit.roster.sites))

    def check(self, name: str) -> support.Finished:
        return command(self.folder, "check", f"kits/{name}")

    @property
    def log(self) -> list[str]:
        return (self.folder / "journal").read_text().splitlines()

    def status(self) -> dict:
        return json.loads((self.folder / "status.json").read_text())


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path)
    yield project
    project.process.kill()
    project.process.wait(ENDED)


def test_a_site_is_revoked_after_another_one_was_added(project):
    sites = [project.dial(name) for name in "ab"]
    for site in sites:
        site.action(Start)
    project.provision("a", "b", "c")
    project.copy("roster.json")
    project.await_line("the roster has new sites: c")
    until(lambda: [site["name"] for site in project.status()["sites"]] == ["a", "b", "c"], project.status)
    assert "ok: this site can take part" in project.check("c").output
    assert command(project.folder, "revoke", "b").status == 0
    project.copy("revoked.pem")
    for site in sites:
        assert site.action(Drop) == Drop(1, 1, "its certificate has been revoked")
    found = project.check("b")
    assert found.status == 1
    assert "revoked" in found.output


def test_a_revocation_is_applied_though_other_parts_of_the_kit_are_of_no_use(project):
    sites = [project.dial(name) for name in "ab"]
    for site in sites:
        site.action(Start)
    roster = json.loads((project.folder / "copy" / "roster.json").read_text())
    roster["sites"].reverse()
    for slot, site in enumerate(roster["sites"]):
        site["slot"] = slot
    (project.folder / "copy" / "roster.json").write_text(json.dumps(roster))
    shutil.copy(project.folder / "kits" / "a" / "certificate.pem", project.folder / "copy" / "certificate.pem")
    assert command(project.folder, "revoke", "a").status == 0
    project.copy("revoked.pem")
    for site in sites:
        assert site.action(Drop) == Drop(0, 1, "its certificate has been revoked")
    with pytest.raises((RefusedError, AssertionError)):
        project.dial("a")
    parts = ("copy/certificate.pem is that of a, not of hub", "copy/roster.json: sites have been removed, renamed")
    until(lambda: all(part in str(project.status()["kit_problems"]) for part in parts))
    project.process.send_signal(signal.SIGTERM)
    project.process.wait(ENDED)
    errors = project.process.read()[1]
    for part in parts:
        assert any(part in line for line in project.log)
        assert part in errors


@pytest.mark.parametrize("reviews", [False, True])
def test_a_site_that_is_added_in_the_middle_of_a_run_trains_in_it(project, tmp_path, reviews):
    """In its first step the others do not have room for it yet, also where they review the choice of the rank."""
    with Fleet(tmp_path, nullcontext(project), min_sites=1, pause=0.02, mode="rankdad", reviews=reviews) as fleet:
        fleet.start("ab")
        fleet.await_step("a", 3)
        project.provision("a", "b", "c")
        project.copy("roster.json")
        project.await_line("the roster has new sites: c")
        fleet.start("c")
        project.await_line("the run grows: it is one of 3 sites now, with c")
        fleet.await_more("c", 5, "b")
        _, present = fleet.finish("abc", 1)
    for name in "ab":
        assert "the project has new sites: c; 3 in all" in fleet.printed(name)
    assert present[0] == [0, 1]


def test_a_site_with_an_older_roster_is_told_the_remedy(project):
    project.provision("a", "b", "c")
    project.copy("roster.json")
    project.await_line("the roster has new sites: c")
    a = project.dial("a")
    assert a.action(Pause).reason == "waiting for b"
    c = project.dial("c")
    assert "the project has new sites, c: copy the newest roster.json into this site's kit" in a.action(Drop).reason
    assert c.action(Pause).reason == "waiting for a, b"
    assert "lacks c: copy the newest roster.json into this site's kit" in project.dial("b").answer.reason


# The flag --kit of the experiments and of both two-site examples


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
