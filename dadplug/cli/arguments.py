"""Command line arguments of the experiments and examples."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import MismatchError, NonFiniteError, SiteError
from ..exchange.exit_reasons import announce
from ..options import Options

# `--rank` is the number of the site.
_FLAGS = {"rank": "--max-rank", "mode": "--distributed-mode"}


def add_option_arguments(parser: argparse.ArgumentParser, leave_out: tuple[str, ...] = ()) -> None:
    """Add a flag for each option of the reduction.

    Args:
        parser: parser to extend.
        leave_out: names of options that get no flag.
    """
    group = parser.add_argument_group("options of the gradient reduction")
    for option in dataclasses.fields(Options):
        if option.name in leave_out:
            continue
        flag = _FLAGS.get(option.name, "--" + option.name.replace("_", "-"))
        settings: dict[str, Any] = {"dest": f"option_{option.name}", "default": option.default}
        text = option.metadata["help"]
        if isinstance(option.default, bool):
            settings["action"] = argparse.BooleanOptionalAction
        elif option.metadata["choices"]:
            settings["choices"] = option.metadata["choices"]
        else:
            settings["type"] = option.metadata["kind"] or (float if option.default is None else type(option.default))
            settings["metavar"] = option.name.upper()
        group.add_argument(flag, help=f"{text} (default: {option.default})", **settings)


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the flags of `add_option_arguments`, as keyword arguments of the runners."""
    prefix = "option_"
    return {name.removeprefix(prefix): value for name, value in vars(arguments).items() if name.startswith(prefix)}


def place_of(arguments: argparse.Namespace) -> tuple[int, int, str | None]:
    """Return this site's number, the number of sites and the rendezvous, from torchrun's environment or the flags.

    Args:
        arguments: with ``rank``, ``num_nodes``, ``dist_url``, ``master_addr`` and ``master_port``.

    Returns:
        Rank, number of sites, and the rendezvous; None for that of the environment.

    Raises:
        ValueError: if the rank is out of range.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None
    if arguments.num_nodes < 1:
        raise ValueError(f"num-nodes must be at least 1, got {arguments.num_nodes}")
    if not 0 <= arguments.rank < arguments.num_nodes:
        raise ValueError(
            f"rank must lie in 0 to {arguments.num_nodes - 1} for {arguments.num_nodes} sites (num-nodes), "
            f"got {arguments.rank}"
        )
    url = arguments.dist_url or f"tcp://{arguments.master_addr}:{arguments.master_port}"
    return arguments.rank, arguments.num_nodes, url


@contextmanager
def plain_errors(*further: type[Exception]) -> Iterator[None]:
    """Print errors that a user can fix as one line instead of a traceback, and exit with status 1.

    Args:
        further: exception classes in addition to those that dadplug raises about data and sites, such as ValueError
            while arguments are checked.
    """
    from ..data import DataError

    expected: tuple[type[Exception], ...] = (DataError, SiteError, MismatchError, NonFiniteError, *further)
    try:
        yield
    except expected as error:
        announce(f"{type(error).__name__}: {error}")
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
