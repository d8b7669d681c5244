"""Runs of elastic training: processes of sites with a hub, some of which leave, return or are idle."""

from __future__ import annotations

import os
import time
from pathlib import Path

import forkserver
import pytest
import support
from elastic_site import Case
from json_lines import read_lines
from running_hub import RunningHub, running_hub

ENDED = 200.0  # seconds for a process, on a busy machine


class Run:
    """Processes of sites with a hub, one after the other for each site.

    Args:
        folder: folder for kits and logs.
        hub: the hub.
        settings: fields of `Case` for all of them.
    """

    def __init__(self, folder: Path, hub: RunningHub, **settings: object) -> None:
        self.folder, self.hub, self.settings = folder, hub, settings
        self.processes: dict[str, forkserver.Program] = {}

    def start(self, name: str, **fields: object) -> None:
        log = str(self.folder / f"{name}.log")
        case = Case(**({"kit": str(self.hub.kits / name), "log": log} | self.settings | fields))  # type: ignore[arg-type]
        self.processes[name] = forkserver.start(case.start(), os.environ | support.ONE_THREAD)

    def end(self, name: str, status: int = 0) -> str:
        """Wait for a site's process, and return what it has printed to the standard error stream."""
        ended = self.processes[name].wait(ENDED)
        errors = self.processes[name].read()[1]
        if ended != status:
            pytest.fail(f"{name} has ended with {ended}:\n{errors}\n" + "\n".join(self.hub.log), pytrace=False)
        return errors

    def lines(self, name: str) -> dict[int, dict]:
        """Return a site's lines by step."""
        return {line["step"]: line for line in read_lines(self.folder / f"{name}.log")}

    def await_step(self, name: str, step: int) -> None:
        end = time.monotonic() + ENDED
        while max(self.lines(name), default=-1) < step:
            assert self.processes[name].poll() is None, self.processes[name].read()
            assert time.monotonic() < end, f"{name} has not reached step {step}: {self.hub.log}"
            time.sleep(0.02)


def stops(folder: Path, step: int) -> None:
    """Let the sites end after a step."""
    (folder / "stop").write_text(str(step))


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
        for name in names:
            run.end(name)
        return run.lines("a")
