"""Fleets: a hub and processes of its sites, some of which leave, return, are late or are idle."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
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
from json_lines import LineLog, unpacked
from running_hub import HubLog, running_hub, until
from support import free_port
from torch import nn

ENDED = 200.0  # seconds for a process, on a busy machine
ENVIRONMENT = os.environ | support.ONE_THREAD


class MortalHub(HubLog):
    """Process of a hub that can be killed and started again; a context manager that starts and ends it.

    Args:
        folder: folder for its kits and its journal.
        names: names of the sites.
        dies: point and count at which it kills itself, see `mortal_hub`; or the arguments of its command in place of
            ``mortal_hub.py``.
        sealed: whether their messages are sealed.
        rate: Mbit/s that these sites may send, by name.
        entries: further entries of the project.
    """

    def __init__(
        self,
        folder: Path,
        names: str,
        dies: tuple[str, int] = ("never", 0),
        sealed: bool = False,
        rate: dict[str, int] | None = None,
        **entries: object,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        address, self.kits, self.journal = f"127.0.0.1:{free_port()}", folder / "kits", folder / "journal"
        owner = {"sealed": True, "hub_at": None} if sealed else {"hub_at": names[0]}
        project = {"hub": address, "hub_names": [], "sites": list(names), **owner}
        hub_kits.make(self.kits, **(project | entries))
        for name, limit in (rate or {}).items():
            (self.kits / name / "policy.toml").write_text(f"rate_limit = {limit}\nencrypt_local = true\n")
        self._dies = dies

    def __enter__(self) -> MortalHub:
        self.start(*self._dies)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, point: str = "never", count: int = 0) -> None:
        """Start it; arguments are those of `mortal_hub`."""
        command = [mortal_hub.__file__, str(self.kits / "hub"), str(self.journal), point, str(count)]
        self.process = forkserver.start(command, ENVIRONMENT)

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self.process.kill()
        self.process.wait(ENDED)

    def restart(self) -> None:
        """Kill it, and start it again."""
        self.kill()
        self.start()

    @property
    def log(self) -> list[str]:
        return self.journal.read_text().splitlines()


class Fleet:
    """A hub and processes of its sites, one after the other for each site; a context manager that ends all of them.

        with Fleet(tmp_path, "abc", mode="dad", pause=0.01) as fleet:
            fleet.start("ab")
            fleet.lose("c", leave=3)
            fleet.hub.await_line("c joins", ENDED)
            lines, present = fleet.finish("abc")

    Args:
        folder: folder for what the sites write, each in a folder of its own; it is made if it is missing.
        hub: names of the sites, for a hub in a thread; else a context manager of the hub, which has its kits and log,
            or of None for sites that connect directly. A site's name is one letter.
        program: program of a site, which takes the fields of its case as JSON.
        preload: libraries that it imports.
        stops: whether the sites look for the file that ends their training.
        key: field that numbers the lines of a site.
        settings: fields of the cases of all sites.
    """

    def __init__(
        self, folder: Path, hub: Any, program: str = elastic_site.__file__,
        preload: Sequence[str] = (), stops: bool = True, key: str = "step", **settings: object,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._program, self._preload, self._key = folder, program, preload, key
        self._settings = ({"stop": str(folder / "stop")} if stops else {}) | settings
        self._opening = running_hub(folder / "kits", tuple(hub)) if isinstance(hub, str) else hub
        self._opened = ExitStack()
        self.processes: dict[str, forkserver.Program] = {}
        self._logs: dict[str, LineLog] = {}

    def __enter__(self) -> Fleet:
        self.hub = self._opened.enter_context(self._opening)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        self._opened.close()

    def start(self, names: str, **fields: object) -> None:
        """Start processes of some sites; where a site has several, those but the first are named as "a1"."""
        for name in names:
            own = self.folder / name
            own.mkdir(exist_ok=True)
            kit = {"kit": str(self.hub.kits / name)} if self.hub is not None else {}
            case: dict[str, Any] = {**kit, "folder": str(own), **self._settings, **fields}
            count = case.get("processes", 1)
            case |= {"port": free_port()} if count > 1 else {}
            for process in range(count):
                command = [self._program, json.dumps(case | ({"process": process} if process else {}))]
                started = forkserver.start(command, ENVIRONMENT, preload=self._preload)
                self.processes[f"{name}{process or ''}"] = started

    def end(self, names: Sequence[str], status: int = 0) -> str:
        """Wait for processes of some sites; return what the last one has printed to the standard error stream."""
        for name in names:
            if self.processes[name].wait(ENDED) != status:
                pytest.fail(f"{name} has ended with another status than {status}:\n{self.state()}", pytrace=False)
        return self.printed(name)

    def train(self, names: str, **others: dict[str, object]) -> tuple[dict[int, dict], dict[int, list[int]]]:
        """Train to the end at some sites, and others with fields of their own, by name; check bits, see `equal`."""
        self.start(names)
        for name, fields in others.items():
            self.start(name, **fields)
        every = "".join([names, *others])
        self.end(every)
        return self.equal(every)

    def printed(self, name: str) -> str:
        """Return what a site has printed to the standard error stream."""
        return self.processes[name].read()[1]

    def state(self) -> str:
        """Return what the sites have printed, and the hub's journal."""
        log = [] if self.hub is None else self.hub.log
        return "\n".join([*(f"{name}: {self.printed(name)}" for name in self.processes), *log])

    def freeze(self, name: str) -> None:
        """Stop the process of a site (SIGSTOP)."""
        self.processes[name].send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Let a process that was stopped go on."""
        self.processes[name].send_signal(signal.SIGCONT)

    def written(self, name: str, key: str = "") -> list[dict]:
        """Return what a site, or one of its processes, has written: all, or the lines with a key."""
        return [line for line in self._log(name).read() if not key or key in line]

    def _log(self, name: str) -> LineLog:
        return self._logs.setdefault(name, LineLog(self.folder / name[0] / f"log{name[1:]}.jsonl"))

    def lines(self, name: str) -> dict[int, dict]:
        """Return a site's lines of steps, by their number."""
        return {line[self._key]: line for line in self.written(name, self._key)}

    def results(self, names: str) -> list[dict]:
        """Return what sites have written at their end."""
        return [json.loads((self.folder / name / "result.json").read_text()) for name in names]

    def await_step(self, name: str, step: int, key: str = "") -> None:
        """Wait until a site has made a step, or has written another number with some other key."""

        def made() -> bool:
            assert self.processes[name].poll() is None, self.state()
            return self._log(name).last_number(key or self._key) >= step

        until(made, self.state, ENDED)

    def await_more(self, name: str, steps: int, of: str = "") -> None:
        """Wait until a site has made so many steps more than it, or another site, has by now."""
        self.await_step(name, max(self.lines(of or name)) + steps)

    def restart(self, name: str, lines: int, **fields: object) -> None:
        """Start a process of a site again, and wait until it has written so many lines of steps."""
        before = len(self.lines(name))
        self.start(name, **fields)

        def written() -> bool:
            assert self.processes[name].poll() is None, self.state()
            return len(self.lines(name)) >= before + lines

        until(written, self.state, ENDED)

    def await_joins(self, name: str, count: int) -> None:
        """Wait until a site has joined so many times."""
        until(lambda: sum(f"{name} joins" in line for line in self.hub.log) >= count, self.state, ENDED)

    def stop(self, more: int = 20, name: str = "a") -> None:
        """Let the sites end some steps after that of the last line that a site has written."""
        number, line = max(self.lines(name).items())
        (self.folder / "stop").write_text(str(line.get("step", number) + more))

    def lose(self, name: str, **fields: object) -> None:
        """Start a process of a site, which is killed, and then another one."""
        self.start(name, **fields)
        self.end(name, -9)
        self.start(name)

    def equal(self, names: str) -> tuple[dict[int, dict], dict[int, list[int]]]:
        """Check that sites have the same bits.

        Returns:
            Lines of the first one, and the slots of the sites that are present, by step.
        """
        lines = self.lines(names[0])
        for name in names[1:]:
            same_bits(lines, self.lines(name))
        return lines, presence(lines)

    def finish(self, names: str, more: int = 20) -> tuple[dict[int, dict], dict[int, list[int]]]:
        """Let sites end together some steps later; check that they are present, and have the same bits, see `equal`."""
        self.stop(more, names[0])
        self.end(names)
        lines, present = self.equal(names)
        assert present[max(present)] == sorted(ord(name) - ord("a") for name in names)
        return lines, present


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
        found = unpacked(lines[step]["gradient"])
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
    steps = max(present) + 1
    with Fleet(folder, names, **(settings | {"min_sites": None, "steps": steps})) as fleet:
        for slot, name in enumerate(names):
            idle = [step for step in range(steps) if slot not in present[step]]
            cold = [step + 1 for step in idle if resets and step + 1 not in idle]
            fleet.start(name, idle=idle, cold=cold, aside=[] if resets else idle)
        fleet.end(names)
        return fleet.lines("a")


def no_step_is_lost(fleet: Fleet, folder: Path, names: str, **settings: object) -> None:
    """Check that all sites took part in all steps, with the bits of a training over a hub that stays.

    Args:
        fleet: the sites, which have ended.
        folder: folder for kits and logs of that training, where all sites have to stay.
        names: names of the sites.
        settings: fields of `Case`.
    """
    lines = [fleet.lines(name) for name in names]
    assert all(present == [*range(len(names))] for each in lines for present in presence(each).values()), fleet.state()
    with Fleet(folder, names, **(settings | {"min_sites": None, "steps": len(lines[0])})) as other:
        reference, _ = other.train(names)
    for each in lines:
        assert len(each) == len(reference)
        same_bits(reference, each)
