"""`python -m dadplug check`: whether a site's kit is valid and its hub can be reached."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("kit", type=Path, help="folder of the site's kit")
    parser.add_argument("--address", metavar="HOST:PORT", help="address of the hub (default: that of the kit)")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for each step (default: %(default)g)")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings as they are made; return 1 if something has failed."""
    from ..hub.check import check_kit
    from ..hub.project import split_address

    address = None if arguments.address is None else split_address(arguments.address)
    failed = 0
    for finding in check_kit(arguments.kit, address, arguments.timeout):
        print(f"{finding.item:<12} {finding.state:<7} {finding.text}", flush=True)
        if finding.advice:
            print(f"{'':<20} {finding.advice}", flush=True)
        failed += finding.state == "failed"
    print("failed" if failed else "ok: this site can take part")
    return 1 if failed else 0
