"""Command lines of the benchmarks, from the defaults of their options, and the start of their sites.

torch loads when a site starts: some programs only start others.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any


def parser_of(text: str | None, **options: Any) -> argparse.ArgumentParser:
    """Make a parser.

    Args:
        text: what the program does, which ``--help`` prints as it is.
        options: by name, the default of an option, a pair of the default and a help text, or a dictionary of what
            `argparse.ArgumentParser.add_argument` takes. Values have the type of the default; with False the option is
            a switch.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, given in options.items():
        settings = given
        if not isinstance(given, dict):
            default, description = given if isinstance(given, tuple) else (given, None)
            settings = {"default": default, "help": description}
        default = settings.get("default")
        if default is False:
            settings = settings | {"action": "store_true"}
        elif isinstance(default, (int, float)):
            settings = {"type": type(default)} | settings
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)
    return parser


def run_at_sites(run: Callable[[argparse.Namespace], object], arguments: argparse.Namespace, sites: int = 2) -> int:
    """Start this program at sites on this machine, or, at one that has been started, run a function.

    Returns:
        The exit status.
    """
    from dadplug.support.processes import launch_sites

    if "RANK" not in os.environ:
        return launch_sites(sys.argv, sites)
    run(arguments)
    return 0


def connect_site() -> None:
    """Connect this site, with one thread."""
    import torch

    import dadplug

    torch.set_num_threads(1)
    dadplug.connect()
