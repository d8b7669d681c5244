"""Runs of elastic training: processes of sites with a hub, some of which leave, return or are idle."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import elastic_site
import forkserver
import hub_kits
import mortal_hub
import pytest
import support
import torch
from elastic_site import batch, make_model
from json_lines import last_number, read_lines
from running_hub import HubLog, RunningHub, running_hub, until
from support import free_port
from torch import nn

ENDED = 200.0  # seconds for a process, on a busy machine
_ENVIRONMENT = os.environ | support.ONE_THREAD


class MortalHub(HubLog):
    """Process of a hub that can be killed and started again.

    Args:
        folder: folder for its kits and its journal.
        names: names of the sites.
        sealed: whether their messages are sealed.
        entries: further entries of the project.
    """

    def __init__(self, folder: Path, names: str, sealed: bool = False, **entries: object) -> None:
        folder.mkdir(exist_ok=True)
        address, self.kits, self.journal = f"127.0.0.1:{free_port()}", folder / "kits", folder / "journal"
        owner = {"sealed": True, "hub_at": None} if sealed else {"hub_at": names[0]}
        project = {"hub": address, "hub_names": [], "sites": list(names), **owner}
        hub_kits.make(self.kits, **(project | entries))

    def start(self, point: str = "never", count: int = 0) -> forkserver.Program:
        """Start it; arguments are those of `mortal_hub`."""
        command = [mortal_hub.__file__, str(self.kits / "hub"), str(self.journal), point, str(count)]
        self.process = forkserver.start(command, _ENVIRONMENT)
        return self.process

    @property
    def log(self) -> list[str]:
        return self.journal.read_text().splitlines()


class Run:
    """Processes of sites with a hub, one after the other for each site. A site's name is one letter.

    Args:
        folder: folder for what the sites write, each in a folder of its own.
        hub: the hub, or what holds the folder of the kits and the hub's journal.
        program: program of a site, which takes the fields of its `Case` as JSON.
        preload: libraries that it imports.
        stops: whether the sites look for the file that ends their training.
        key: field that numbers the lines of a site.
        settings: fields of `Case` for all of them.
    """

    def __init__(
        self, folder: Path, hub: RunningHub | MortalHub | Any, program: str = elastic_site.__file__,
        preload: Sequence[str] = (), stops: bool = True, key: str = "step", **settings: object,
    ) -> None:  # fmt: skip
        self.folder, self.hub, self._program, self._preload, self._key = folder, hub, program, preload, key
        self._settings = ({"stop": str(folder / "stop")} if stops else {}) | settings
        self.processes: dict[str, forkserver.Program] = {}

    def start(self, names: str, **fields: object) -> None:
        """Start processes of some sites."""
        for name in names:
            own = self.folder / name
            own.mkdir(exist_ok=True)
            case = {"kit": str(self.hub.kits / name), "folder": str(own)} | self._settings | fields
            command = [self._program, json.dumps(case)]
            self.processes[name] = forkserver.start(command, _ENVIRONMENT, preload=self._preload)

    def end(self, names: str, status: int = 0) -> str:
        """Wait for processes of some sites; return what the last one has printed to the standard error stream."""
        for name in names:
            if self.processes[name].wait(ENDED) != status:
                pytest.fail(f"{name} has ended with another status than {status}:\n{self.state()}", pytrace=False)
        return self.processes[name].read()[1]

    def state(self) -> str:
        """Return what the sites have printed, and the hub's journal."""
        printed = [f"{name}: {process.read()[1]}" for name, process in self.processes.items()]
        return "\n".join([*printed, *self.hub.log])

    def written(self, name: str) -> list[dict]:
        """Return what a site has written."""
        return read_lines(self.folder / name / "log.jsonl")

    def lines(self, name: str) -> dict[int, dict]:
        """Return a site's lines of steps, by their number."""
        return {line[self._key]: line for line in self.written(name) if self._key in line}

    def await_step(self, name: str, step: int, key: str = "") -> None:
        """Wait until a site has made a step, or has written another number with some other key."""

        def made() -> bool:
            assert self.processes[name].poll() is None, self.state()
            return last_number(self.folder / name / "log.jsonl", key or self._key) >= step

        until(made, self.state, ENDED)

    def stop(self, more: int = 20, name: str = "a") -> None:
        """Let the sites end some steps after the last one that a site has written."""
        (self.folder / "stop").write_text(str(max(self.lines(name)) + more))

    def lose(self, name: str, **fields: object) -> None:
        """Start a process of a site, which is killed, and then another one."""
        self.start(name, **fields)
        self.end(name, -9)
        self.start(name)

    def finish(self, names: str, more: int = 20) -> tuple[dict[int, dict], dict[int, list[int]]]:
        """Let sites end together some steps later; check that they are present, and have the same bits.

        Returns:
            Lines of the first one, and the slots of the sites that are present, by step.
        """
        self.stop(more, names[0])
        self.end(names)
        lines = self.lines(names[0])
        for name in names[1:]:
            same_bits(lines, self.lines(name))
        assert lines[max(lines)]["present"] == [ord(name) - ord("a") for name in names]
        return lines, presence(lines)


def presence(lines: dict[int, dict]) -> dict[int, list[int]]:
    """Return the slots of the sites that are present, by step."""
    return {step: line["present"] for step, line in lines.items()}


def same_bits(lines: dict[int, dict], others: dict[int, dict]) -> None:
    """Check that a site has the same parameters as another one after each step that it has written."""
    assert others
    assert {step: line["digest"] for step, line in others.items()} == {step: lines[step]["digest"] for step in others}


def is_exact(lines: dict[int, dict]) -> None:
    """Compare the gradients of a site with those of one process that has the rows of all sites which are present."""
    model, criterion = make_model(exact=True), nn.CrossEntropyLoss(reduction="sum")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(max(lines) + 1):
        optimizer.zero_grad()
        batches = [batch(slot, step, exact=True) for slot in lines[step]["present"]]
        count = sum(len(targets) for _, targets in batches)
        for inputs, targets in batches:
            (criterion(model(inputs.double()), targets) / count).backward()
        expected = torch.cat([each.grad.reshape(-1) for each in model.parameters()])
        found = torch.tensor(lines[step]["gradient"], dtype=torch.float64)
        assert (found - expected).norm() < 1e-8 * expected.norm(), step
        optimizer.step()


def idles(
    folder: Path, names: str, present: dict[int, list[int]], resets: bool = True, **settings: object
) -> dict[int, dict]:
    """Train with sites that are idle in the steps in which they are not present; return the lines of the first one.

    Args:
        folder: folder for kits and logs.
        names: names of the sites.
        present: slots of the sites that are present, by step.
        resets: whether compressors begin anew after idle steps, as those of new processes do.
        settings: fields of `Case`.
    """
    folder.mkdir()
    steps = max(present) + 1
    with running_hub(folder / "kits", tuple(names)) as hub:
        run = Run(folder, hub, **(settings | {"min_sites": None, "steps": steps}))
        for slot, name in enumerate(names):
            idle = [step for step in range(steps) if slot not in present[step]]
            cold = [step + 1 for step in idle if resets and step + 1 not in idle]
            run.start(name, idle=idle, cold=cold, aside=[] if resets else idle)
        run.end(names)
        return run.lines("a")
