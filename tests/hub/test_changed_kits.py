"""Kits that change while the hub runs, by the real commands: revocations, renewals, new sites."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import forkserver
import pytest
import support
from elastic_runs import ENDED, Run, same_bits
from running_hub import TestSite, free_port, until

from dadplug.errors import RefusedError
from dadplug.hub.pki.kits import Kit
from dadplug.hub.wire.messages import Drop, Pause, Start

ROOT = Path(__file__).parents[2]


def command(folder: Path, *arguments: str) -> support.Finished:
    return support.run_programs([["-m", "dadplug", *arguments]], ENDED, folder=folder)[0]


class Project:
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

    def await_line(self, text: str) -> None:
        until(lambda: any(text in line for line in self.log), lambda: str(self.log), ENDED)

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


def test_a_site_that_is_added_in_the_middle_of_a_run_trains_in_it(project, tmp_path):
    run = Run(tmp_path, project, min_sites=1, pause=0.02, mode="rankdad")
    run.start("ab")
    run.await_step("a", 3)
    project.provision("a", "b", "c")
    project.copy("roster.json")
    project.await_line("the roster has new sites: c")
    run.start("c")
    project.await_line("the run grows: it is one of 3 sites now, with c")
    until(lambda: len(run.lines("c")) > 5, run.state, ENDED)
    run.stop(1)
    run.end("abc")
    for name in "ab":
        assert "the project has new sites: c; 3 in all" in run.processes[name].read()[1]
    first, new = run.lines("a"), run.lines("c")
    assert first[min(first)]["present"] == [0, 1]
    assert first[max(first)]["present"] == new[max(new)]["present"] == [0, 1, 2]
    same_bits(first, new)


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
