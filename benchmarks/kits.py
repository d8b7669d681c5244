"""Kits and a hub for the benchmarks that train over one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dadplug.hub import Project
from dadplug.hub.pki.provision import provision


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
