"""`python -m dadplug sign`: a kit for a site that has made its key itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..hub.files import CERTIFICATE, read_file
from ..hub.project import Project


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("name", help="the site that has sent the request, or hub")
    parser.add_argument("request", type=Path, help="the request")
    parser.add_argument("--out", type=Path, default=Path("kits"), help="folder of the kits (default: kits)")
    parser.add_argument("--days", type=int, default=Project.days, help=f"validity (default: {Project.days} days)")
    parser.add_argument("--again", action="store_true", help="the site has a valid certificate, and renews it")


def run(arguments: argparse.Namespace) -> int:
    """Sign the request, and print what to send back."""
    from ..hub.provision import sign

    pem = read_file(arguments.request)
    folder, fingerprint = sign(arguments.out, arguments.name, pem, arguments.days, again=arguments.again)
    print(f"fingerprint of the key: {fingerprint}")
    print("If the site does not confirm the fingerprint, revoke the certificate.")
    what = f"{folder / CERTIFICATE}" if arguments.again else f"the files of {folder}"
    print(f"Send {what} back, to be copied into the folder of the key. Nothing of it is secret.")
    return 0
