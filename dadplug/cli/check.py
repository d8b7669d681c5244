"""`python -m dadplug check`: whether a site's kit is valid and its hub can be reached."""

from __future__ import annotations

import argparse
from pathlib import Path

ENDS_SOON = 3  # exit status


def _days(text: str) -> int:
    """Return the number of days of a text such as 14d."""
    if not (number := text.removesuffix("d")).isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of days, such as 14d, got {text!r}")
    return int(number)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("kit", type=Path, help="folder of the site's kit")
    parser.add_argument("--address", metavar="HOST:PORT", help="address of the hub (default: that of the kit)")
    parser.add_argument(
        "--fail-before",
        type=_days,
        metavar="DAYS",
        help=f"exit with status {ENDS_SOON} if a certificate ends within this time, such as 14d",
    )
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for each step (default: %(default)g)")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings as they are made; return 1 if something has failed, `ENDS_SOON` if a certificate ends soon."""
    from ..hub.check import check_kit
    from ..hub.project import split_address

    address = None if arguments.address is None else split_address(arguments.address)
    failed = 0
    ends: list[str] = []
    for finding in check_kit(arguments.kit, address, arguments.timeout):
        print(f"{finding.item:<12} {finding.state:<7} {finding.text}", flush=True)
        if finding.advice:
            print(f"{'':<20} {finding.advice}", flush=True)
        failed += finding.state == "failed"
        if finding.days is not None and arguments.fail_before is not None and finding.days < arguments.fail_before:
            ends.append(f"{finding.item} ({finding.days} days)")
    print("failed" if failed else "ok: this site can take part")
    if ends:
        print(f"these end within {arguments.fail_before} days: {', '.join(ends)}")
    return 1 if failed else ENDS_SOON if ends else 0
