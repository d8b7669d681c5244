"""Trainers over a hub that is killed and started again, with a late site, and one that the hub gives up."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import forkserver
import hub_kits
import mortal_hub
import pytest
import support
from json_lines import read_lines
from running_hub import free_port, until

HELPERS = Path(mortal_hub.__file__).parent
ENDED = 200.0  # seconds for a process, on a busy machine
KNOWN = 8  # steps after which the hub knows how long one takes
TRAINERS = {
    "lightning": ("pytorch_lightning", "elastic_lightning.py", {}),
    "catalyst": ("catalyst", "elastic_catalyst.py", {"returns": True}),
}


class Sites:
    """A hub and two sites whose trainer is interrupted in several ways.

    Args:
        folder: folder for kits and logs.
        trainer: name of the trainer.
    """

    def __init__(self, folder: Path, trainer: str) -> None:
        self.folder = folder
        self.package, self.program, self.fields = TRAINERS[trainer]
        self.processes: dict[str, forkserver.Program] = {}
        hub = f"127.0.0.1:{free_port()}"
        hub_kits.make(folder / "kits", hub=hub, hub_names=[], sites=["a", "b"], hub_at="a")
        self.start_hub()

    def start_hub(self) -> None:
        command = [mortal_hub.__file__, str(self.folder / "kits" / "hub"), str(self.folder / "journal"), "never", "0"]
        self.hub = forkserver.start(command, os.environ | support.ONE_THREAD)

    def start(self, name: str, **fields: object) -> None:
        own = self.folder / name
        own.mkdir(exist_ok=True)
        case = {"kit": str(self.folder / "kits" / name), "folder": str(own), "stop": str(self.folder / "stop")}
        case |= {"mode": "dad", "epochs": 10000, "late": "skip", "site_timeout": 3.0, **self.fields, **fields}
        arguments = [str(HELPERS / self.program), json.dumps(case)]
        self.processes[name] = forkserver.start(arguments, os.environ | support.ONE_THREAD, preload=[self.package])

    def lines(self, name: str) -> dict[int, dict]:
        """Return the lines of a site's steps, by number."""
        return {line["number"]: line for line in read_lines(self.folder / name / "log.jsonl") if "number" in line}

    def state(self) -> str:
        printed = {name: process.read()[1] for name, process in self.processes.items()}
        return f"{printed}\n{(self.folder / 'journal').read_text()}"

    def await_step(self, name: str, step: int) -> None:
        until(lambda: max(self.lines(name), default=-1) >= step, self.state, ENDED)

    def await_line(self, text: str) -> None:
        until(lambda: text in (self.folder / "journal").read_text(), self.state, ENDED)


@pytest.mark.parametrize("trainer", [*TRAINERS])
def test_a_trainer_goes_on_after_each_interruption(tmp_path, trainer):
    support.need(TRAINERS[trainer][0])
    sites = Sites(tmp_path, trainer)
    sites.start("a")
    sites.start("b", hold=str(tmp_path / "hold"))
    sites.await_step("a", 4)
    sites.hub.kill()
    sites.hub.wait(ENDED)
    sites.start_hub()
    sites.await_line("the run that began before the restart goes on")
    sites.await_step("a", max(sites.lines("a")) + KNOWN)
    (tmp_path / "hold").touch()
    sites.await_line("b is late: training goes on without it")
    (tmp_path / "hold").unlink()
    sites.await_line("b takes part again")
    sites.await_step("b", max(sites.lines("b")) + 4)
    sites.processes["b"].send_signal(signal.SIGSTOP)
    sites.await_line("b has left: silent for 3 s")
    sites.processes["b"].send_signal(signal.SIGCONT)
    assert sites.processes["b"].wait(ENDED) == 1
    errors = sites.processes["b"].read()[1]
    assert "SiteError" in errors
    assert "has given this site up" in errors
    assert "start its program again, and it joins the others" in errors
    before = max(sites.lines("b"))
    sites.start("b")
    sites.await_step("b", before + 1)
    sites.await_step(
        "b", max(sites.lines("b")) + 10
    )  # the other has gone on meanwhile, and b's first steps may be late
    (tmp_path / "stop").touch()
    for name in "ab":
        assert sites.processes[name].wait(ENDED) == 0, sites.state()
    sites.hub.kill()
    first, other = sites.lines("a"), sites.lines("b")
    common = first.keys() & other.keys()
    assert max(first) == max(other)
    assert all(first[number]["digest"] == other[number]["digest"] for number in common)
    assert [0] in [first[number]["present"] for number in common]  # missed by b
    assert [0, 1] in [
        first[number]["present"] for number in common if number > before
    ]  # in the last step it may be late
