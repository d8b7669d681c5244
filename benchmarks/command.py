"""Command lines of the benchmarks, from the defaults of their options."""

from __future__ import annotations

import argparse
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
