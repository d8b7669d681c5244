"""The commands of `python -m dadplug`, each in a module of its own that loads when the command is used.

To add a command, write a module with two functions and a line in `COMMANDS`:

- `add_arguments(parser)` adds the arguments of the command to an `argparse.ArgumentParser`;
- `run(arguments)` carries it out and returns the exit status, or raises one of `ERRORS`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ..errors import KitError, SiteError

# Module and help text by command.
COMMANDS = {
    "provision": ("provision", "make a certificate authority, and kits for the hub and the sites of a project"),
    "request": ("request", "make a key at a site, and a request for its certificate"),
    "sign": ("sign", "sign the request of a site"),
    "renew": ("renew", "renew the certificate of the hub or one site"),
    "check": ("check", "check the kit of this site, and the way to the hub"),
    "hub": ("hub", "run the hub, which all sites dial, until it gets SIGTERM"),
    "compare": ("compare", "train a model in several ways, and say which is fastest"),
    "serve": ("serve", "serve models over HTTP until SIGTERM"),
    "tune": ("tune", "measure which constants are fastest on this machine, and keep them"),
    "revoke": ("revoke", "revoke the certificates of the hub or one site"),
}
ERRORS = (KitError, SiteError, ImportError, OSError)  # errors that a user can fix: no traceback


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the command and its arguments; None for those of this process.

    Returns:
        The exit status: 0, or 1 after an error of `ERRORS`, or 2 without a command.
    """
    parser = argparse.ArgumentParser(prog="python -m dadplug", description="Distributed training between sites.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    given = sys.argv[1:] if arguments is None else list(arguments)
    chosen = next((each for each in given if not each.startswith("-")), None)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == chosen:
            loaded = importlib.import_module(f".{module}", __package__)
            loaded.add_arguments(command)
            command.set_defaults(run=loaded.run)
    if not given:
        parser.print_help(sys.stderr)
        return 2
    parsed = parser.parse_args(given)
    try:
        status: int = parsed.run(parsed)
    except ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return status
