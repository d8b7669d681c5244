"""Training that goes on over a hub that is killed and started again: the same bits as with one hub."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forkserver
import hub_kits
import mortal_hub
import pytest
import support
from elastic_site import Case
from json_lines import read_lines
from running_hub import free_port, running_hub, until

ENDED = 60.0  # seconds for a process, on a busy machine


class Training:
    """Processes of a hub and of its sites.

    Args:
        folder: folder for kits and logs.
        names: names of the sites.
        settings: fields of `Case` for all of them.
    """

    def __init__(self, folder: Path, names: str, **settings: object) -> None:
        folder.mkdir()
        self.folder, self.names = folder, names
        self.settings = {"stop": str(folder / "stop")} | settings
        hub_kits.make(folder / "kits", hub=f"127.0.0.1:{free_port()}", hub_names=[], sites=list(names), hub_at=names[0])
        self.sites: dict[str, forkserver.Program] = {}
        self.hub: forkserver.Program | None = None

    def start_hub(self, point: str = "never", count: int = 0) -> forkserver.Program:
        kit, journal = self.folder / "kits" / "hub", self.folder / "journal"
        command = [mortal_hub.__file__, str(kit), str(journal), point, str(count)]
        self.hub = forkserver.start(command, os.environ | support.ONE_THREAD)
        return self.hub

    def start(self, name: str, **fields: object) -> None:
        case = {"kit": str(self.folder / "kits" / name), "log": str(self.folder / f"{name}.log")}
        self.sites[name] = forkserver.start(
            Case(**(case | self.settings | fields)).start(),  # type: ignore[arg-type]
            os.environ | support.ONE_THREAD,
        )

    def lines(self, name: str) -> dict[int, dict]:
        return {line["step"]: line for line in read_lines(self.folder / f"{name}.log")}

    def await_step(self, name: str, step: int) -> None:
        until(lambda: max(self.lines(name), default=-1) >= step, self.state, ENDED)

    def state(self) -> str:
        printed = {name: site.read()[1] for name, site in self.sites.items()}
        return f"{printed}\n{(self.folder / 'journal').read_text()}"

    def end(self, steps: int = 5) -> list[dict[int, dict]]:
        """Let the sites end some steps from now, and return their lines."""
        last = max(max(self.lines(name), default=0) for name in self.names) + steps
        (self.folder / "stop").write_text(str(last))
        for name, site in self.sites.items():
            assert site.wait(ENDED) == 0, (name, self.state())
        assert self.hub is not None
        self.hub.kill()
        return [self.lines(name) for name in self.names]


def reference(folder: Path, names: str, steps: int, mode: str) -> list[str]:
    """Return the digests of a run with one hub."""
    folder.mkdir()
    with running_hub(folder / "kits", tuple(names)) as hub:
        sites = []
        for name in names:
            case = Case(str(hub.kits / name), str(folder / name), mode, steps, min_sites=None)
            sites.append(forkserver.start(case.start(), os.environ | support.ONE_THREAD))
        for site in sites:
            assert site.wait(ENDED) == 0, site.read()
    return [json.loads(line)["digest"] for line in (folder / names[0]).read_text().splitlines()]


@pytest.mark.parametrize(
    ("mode", "names", "min_sites", "points"),
    [
        ("rankdad", "abc", 3, [("frame", 61), ("close", 5), ("frame", 1)]),
        ("dad", "ab", 1, [("close", 4), ("frame", 22)]),
        ("dsgd", "abc", None, [("frame", 40), ("close", 2)]),
    ],
)
def test_a_hub_that_is_killed_anywhere_costs_no_step(tmp_path, mode, names, min_sites, points):
    training = Training(tmp_path / "run", names, mode=mode, min_sites=min_sites)
    for number, (point, count) in enumerate(points):
        hub = training.start_hub(point, count)
        if not number:
            for name in names:
                training.start(name)
        assert hub.wait(ENDED) == -9, training.state()
    training.start_hub()
    lines = training.end()
    assert all(line["present"] == [*range(len(names))] for each in lines for line in each.values())
    expected = reference(tmp_path / "reference", names, len(lines[0]), mode)
    for each in lines:
        assert [line["digest"] for line in each.values()] == expected
