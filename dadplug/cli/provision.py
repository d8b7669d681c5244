"""`python -m dadplug provision`: kits of a project."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..hub.project import AUTHORITY, HUB, Project


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("project", type=Path, help="project file: name, hub, sites, and further entries")
    parser.add_argument("--out", type=Path, default=Path("kits"), help="folder of the kits (default: kits)")


def run(arguments: argparse.Namespace) -> int:
    """Make the kits, and print what is to be done with them."""
    from ..hub.provision import provision

    project = Project.load(arguments.project)
    made = provision(project, arguments.out)
    print(f"{arguments.out / AUTHORITY}: the authority of {project.roster.project}; its key stays on this machine")
    for name in made:
        purpose = f"of the hub at {project.roster.hub}" if name == HUB else f"of slot {project.roster.slot(name)}"
        print(f"{arguments.out / name}: the kit {purpose}; holds a secret key, copy it by a secure way")
    for name in project.own_keys:
        print(f"{name}: makes its key itself, with `python -m dadplug request {name} --project ...`")
    return 0
