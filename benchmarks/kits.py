"""Kits, a hub, and processes of sites for the benchmarks that train over one."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dadplug.hub import Project
from dadplug.hub.pki.provision import provision
from dadplug.processes import free_port


def make_kits(folder: Path, host: str, port: int, sites: Sequence[str]) -> None:
    """Make the kits of a hub and its sites in a folder.

    Args:
        folder: the folder, which is made.
        host: address at which the sites connect to the hub.
        port: port of the hub.
        sites: names of the sites, by rank.
    """
    project = {"name": "benchmark", "hub": f"{host}:{port}", "sites": list(sites), "hub_at": sites[0]}
    provision(Project.parse(project), folder)


def hub_command(kits: Path, *options: str) -> list[str]:
    """Return the command that runs the hub of a folder of kits."""
    return [sys.executable, "-m", "dadplug", "hub", str(kits / "hub"), *options]


def end(*processes: subprocess.Popen) -> None:
    """End processes, and wait for them."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Programs:
    """Processes of a hub and its sites, whose logs have a line for each step; they end with the block.

    Args:
        folder: folder for all files: kits in ``kits``, and ``NAME.log`` and ``NAME.out`` of each process.
        star: namespaces in which they run, see `many_sites.Star`; None for loopback.
        limit: seconds that a part of a run may take.
    """

    def __init__(self, folder: Path, star: Any, limit: float) -> None:
        self.folder, self._star, self._limit = folder, star, limit
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        end(*self.processes.values())

    def provision(self, project: str) -> None:
        """Make the kits of a project that have not been made."""
        file = self.folder / "project.toml"
        file.write_text(project)
        command = [sys.executable, "-m", "dadplug", "provision", str(file), "--out", str(self.folder / "kits")]
        subprocess.run(command, check=True, capture_output=True)

    def run(self, name: str, place: int | None, command: list[str]) -> None:
        """Start a process at a site; None for the place of the hub."""
        if self._star is not None:
            space = self._star.middle if place is None else self._star.spaces[place]
            command = ["ip", "netns", "exec", space, *command]
        with (self.folder / f"{name}.out").open("ab") as out:
            self.processes[name] = subprocess.Popen(command, stdout=out, stderr=out)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the steps that a site has logged."""
        path = self.folder / f"{name}.log"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self, what: str, over: Callable[[], bool]) -> None:
        """Wait until a condition holds, while no program ends with an error."""
        until = time.monotonic() + self._limit
        while not over():
            ended = [name for name, each in self.processes.items() if each.poll() not in (None, 0)]
            if ended or time.monotonic() > until:
                outs = [f"-- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.out"))]
                reason = f"{', '.join(ended)} ended with an error" if ended else f"not within {self._limit:g} s"
                raise SystemExit("\n".join([f"{what}: {reason}", *outs]))
            time.sleep(0.05)

    def end_at(self, step: int) -> None:
        """Let the sites end at a step, which the file ``last`` names."""
        new = self.folder / "new"
        new.write_text(str(step))
        new.rename(self.folder / "last")

    def kill(self, name: str) -> None:
        """Kill a process."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()


class ForkedSites:
    """A hub, and processes of sites that a forkserver starts, so that a killed one returns fast.

    Args:
        folder: folder for kits and logs.
        sites: number of sites.
        program: module of the sites' function, which the forkserver imports.
    """

    def __init__(self, folder: Path, sites: int, program: str) -> None:
        self.folder, self.names = folder, [chr(ord("a") + rank) for rank in range(sites)]
        self.processes: dict[int, Any] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([program])

    def start_hub(self, host: str = "127.0.0.1", before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Make the kits, and start the hub.

        Args:
            host: address of the hub.
            before: start of the command, which runs the rest.
        """
        kits = self.folder / "kits"
        make_kits(kits, host, free_port(), self.names)
        command = [*before, *hub_command(kits, "--journal", str(self.folder / "journal"))]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def fork(self, rank: int, function: Callable[[Any], None], case: Any) -> None:
        """Start the process of a site."""
        self.processes[rank] = self._context.Process(target=function, args=(case,))
        self.processes[rank].start()

    def end(self) -> None:
        """Kill the processes of the sites."""
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join()
