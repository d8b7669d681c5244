"""`python -m dadplug revoke`: certificates that are no longer accepted."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..hub.files import REVOKED
from ..hub.project import AUTHORITY, HUB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("name", help="name of the site, or hub")
    parser.add_argument("--out", type=Path, default=Path("kits"), help="folder of the kits (default: kits)")
    parser.add_argument(
        "--serial", type=lambda text: int(text, 16), help="serial number of one certificate (default: all of the name)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Revoke, and print where the list has to go."""
    from ..hub.provision import revoke

    revoked = revoke(arguments.out, arguments.name, arguments.serial)
    for serial in revoked:
        print(f"revoked the certificate {serial:x} of {arguments.name}")
    if not revoked:
        print(f"the certificates of {arguments.name} were revoked already")
    path, where = arguments.out / AUTHORITY / REVOKED, "all sites" if arguments.name == HUB else "the hub"
    print(f"Copy {path} into the kit of {where}. Until then the certificate is accepted there.")
    return 0
