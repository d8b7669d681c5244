"""Command lines: the commands of `python -m dadplug`, and what the experiments and examples share with them.

Shared are arguments, the place of a process among the sites, and errors as one line; torch loads later.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from typing import Any, NamedTuple

from ...errors import DataError, KitError, MismatchError, NonFiniteError, SiteError
from ...support.refusals import refuse

__all__ = ["add_kit_argument", "add_option_arguments", "options_of", "place_of", "plain_errors"]

Declaration = Callable[[Any], object]
"""Function that adds an argument, or a group of arguments, to a parser."""

# `--rank` is the number of the site.
_FLAGS = {"rank": "--max-rank", "mode": "--distributed-mode"}


def add_option_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each option of the reduction to a parser."""
    from ...options import Options

    group = parser.add_argument_group("options of the gradient reduction")
    for option in dataclasses.fields(Options):
        flag = _FLAGS.get(option.name, "--" + option.name.replace("_", "-"))
        settings: dict[str, Any] = {"dest": f"option_{option.name}", "default": option.default}
        text = option.metadata["help"]
        if isinstance(option.default, bool):
            settings["action"] = argparse.BooleanOptionalAction
        elif option.metadata["choices"]:
            settings["choices"] = option.metadata["choices"]
        else:
            kind = option.metadata["kind"] or (float if option.default is None else type(option.default))
            settings["type"] = kind if isinstance(kind, type) else with_reason(kind)
            settings["metavar"] = option.name.upper()
        group.add_argument(flag, help=f"{text} (default: {option.default})", **settings)


def with_reason(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that parses a value, and whose error argparse shows."""

    def parse_or_explain(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_or_explain


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the flags of `add_option_arguments`, as keyword arguments of the runners."""
    prefix = "option_"
    return {name.removeprefix(prefix): value for name, value in vars(arguments).items() if name.startswith(prefix)}


def argument(*names: str, **settings: Any) -> Declaration:
    """Declare an argument, as `argparse.ArgumentParser.add_argument` takes it."""
    return methodcaller("add_argument", *names, **settings)


def group(title: str, *arguments: Declaration) -> Declaration:
    """Declare arguments with a title of their own in the help."""

    def add_to(parser: Any) -> None:
        own = parser.add_argument_group(title)
        for declare in arguments:
            declare(own)

    return add_to


add_kit_argument = argument(
    "--kit", metavar="FOLDER", help="folder of this site's kit, in place of its number and addresses, for a hub"
)
"""Function that adds the flag ``--kit`` to a parser."""


class Place(NamedTuple):
    """Place of this process among the sites.

    Attributes:
        rank: number of this site.
        num_nodes: number of sites.
        url: the rendezvous; None for that of the environment, or of a kit.
        kit: folder of this site's kit; None without one.
        process: number of this process among those of a site with a kit.
        processes: number of these.
    """

    rank: int
    num_nodes: int
    url: str | None = None
    kit: str | None = None
    process: int = 0
    processes: int = 1

    def connect(self, timeout: float, backend: str | None = None, **start: Any) -> None:
        """Join the other sites; arguments and errors are those of `dadplug.connect`."""
        from ...hub.connect import connect

        if self.url is None:
            connect(kit=self.kit, backend=backend, timeout=timeout, **start)
        else:
            connect(self.rank, self.num_nodes, self.url, backend=backend, timeout=timeout, **start)


def place_of(arguments: argparse.Namespace) -> Place:
    """Return the place of this site, from its kit, from torchrun's environment or from the flags.

    Args:
        arguments: with ``rank``, ``num_nodes``, ``dist_url``, and where this is None ``master_addr`` and
            ``master_port``; may have ``kit``.

    Raises:
        ValueError: if the rank is out of range, or is given together with a kit.
        KitError: if the kit is incomplete or damaged.
    """
    if (folder := getattr(arguments, "kit", None)) is not None:
        from ...hub.site.processes import LocalPlace
        from ...hub.site.runtime import load_site_kit

        given = {name.replace("_", "-"): getattr(arguments, name) for name in ("rank", "num_nodes", "dist_url")}
        kit = load_site_kit(folder, **given)
        local = LocalPlace.find(os.environ)
        own = (0, 1) if local is None else (local.local_rank, local.processes)
        return Place(kit.slot, len(kit.roster.sites), None, folder, *own)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    rank = 0 if arguments.rank is None else arguments.rank
    num_nodes = 1 if arguments.num_nodes is None else arguments.num_nodes
    refuse(
        (num_nodes < 1, f"num-nodes must be at least 1, got {num_nodes}"),
        (
            not 0 <= rank < num_nodes,
            f"rank must lie in 0 to {num_nodes - 1} for {num_nodes} sites (num-nodes), got {rank}",
        ),
    )
    return Place(rank, num_nodes, arguments.dist_url or f"tcp://{arguments.master_addr}:{arguments.master_port}")


@contextmanager
def plain_errors(*further: type[Exception]) -> Iterator[None]:
    """Print errors that a user can fix as one line instead of a traceback, and exit with status 1.

    Args:
        further: exception classes in addition to those that dadplug raises about data and sites, such as ValueError
            while arguments are checked.
    """
    from ...exchange.status import announce

    expected: tuple[type[Exception], ...] = (DataError, KitError, SiteError, MismatchError, NonFiniteError, *further)
    try:
        yield
    except expected as error:
        announce(f"{type(error).__name__}: {error}")
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
