"""`python -m dadplug request`: a key at a site, and a request for its certificate."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("name", help="name of this site as in the project file, or hub")
    parser.add_argument("--project", required=True, help="name of the project")
    parser.add_argument(
        "--kit", type=Path, help="folder of the kit: a new one, or a kit to renew with a new key (default: NAME)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Make key and request, and print what to do with the request."""
    from ..hub.provision import request

    path, fingerprint = request(arguments.kit or Path(arguments.name), arguments.name, arguments.project)
    print(f"{path}: send this file to the operator of the project, and nothing else of the folder")
    print(f"fingerprint of the key, for the operator to compare: {fingerprint}")
    return 0
