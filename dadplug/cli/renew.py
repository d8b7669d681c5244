"""`python -m dadplug renew`: a new certificate for one kit."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..hub.files import CERTIFICATE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("name", help="name of the site, or hub")
    parser.add_argument("--out", type=Path, default=Path("kits"), help="folder of the kits (default: kits)")
    parser.add_argument("--days", type=int, help="validity (default: that of the certificate before)")
    parser.add_argument("--new-key", action="store_true", help="make a new key, too; the kit is secret again")
    parser.add_argument(
        "--hub-name", action="append", default=[], help="further host name or address of the hub; can be repeated"
    )


def run(arguments: argparse.Namespace) -> int:
    """Renew the kit, and print what to send."""
    from ..hub.provision import renew

    folder = renew(arguments.out, arguments.name, arguments.days, tuple(arguments.hub_name), with_key=arguments.new_key)
    if arguments.new_key:
        print(f"{folder}: renewed with a new key; holds a secret key, copy it by a secure way")
    else:
        print(f"{folder / CERTIFICATE}: renewed; replace the file of this name in the kit that is in use")
    return 0
