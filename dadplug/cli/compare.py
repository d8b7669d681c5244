"""`python -m dadplug compare`: which way of training is fastest for a model and its data."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from ..data import DATASETS, load_dataset
from .arguments import add_kit_argument, picture_file, place_of, plain_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "build",
        metavar="BUILD",
        help="FILE.py:NAME or MODULE:NAME of a function that returns (model, optimizer, criterion)",
    )
    parser.add_argument(
        "dataset",
        metavar="DATASET",
        help=f"the same of a data set, or of a function that returns one; or one of {', '.join(DATASETS)}",
    )
    parser.add_argument("--data-dir", help="folder of the files of a data set that is given by its name")
    parser.add_argument("--seconds", type=float, default=60.0, help="training time of all runs (default: %(default)g)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples a process (default: %(default)d)")
    parser.add_argument("--processes", type=int, help="processes of this machine (default: one a core, at most 4)")
    parser.add_argument("--ways", help="names of ways, separated by commas (default: all that apply)")
    parser.add_argument(
        "--picture", type=picture_file, metavar="FILE.png", help="plot the loss against seconds and megabytes"
    )
    site = parser.add_argument_group("between sites: the same command at each, as in dadplug.experiment")
    site.add_argument("--rank", type=int, help="number of this site, from 0")
    site.add_argument("--num-nodes", type=int, help="number of sites")
    site.add_argument("--dist-url", help="rendezvous, tcp://HOST:PORT, an address of site 0")
    add_kit_argument(site)


def run(arguments: argparse.Namespace) -> int:
    """Race, and print the table; return 1 if no way could be raced."""
    from ..racing import compare

    with plain_errors(ValueError, TypeError):
        build = _load(arguments.build)
        if arguments.dataset in DATASETS:
            dataset: Any = load_dataset(arguments.dataset, arguments.data_dir).train
        else:
            if arguments.data_dir is not None:
                raise ValueError(f"--data-dir is for a data set of {', '.join(DATASETS)}: leave it out")
            dataset = _load(arguments.dataset)
            if not hasattr(dataset, "__getitem__"):
                dataset = dataset()
        if arguments.kit or arguments.dist_url or "RANK" in os.environ:
            place_of(arguments).connect(timeout=60.0)
        result = compare(
            build,
            dataset,
            arguments.seconds,
            ways=arguments.ways.split(",") if arguments.ways else None,
            batch_size=arguments.batch_size,
            processes=arguments.processes,
        )
    print(result.table())
    if arguments.picture:
        result.picture(arguments.picture)
        print(f"picture: {arguments.picture}")
    return 0 if result.finalists else 1


def _load(name: str) -> Any:
    """Return the object that FILE.py:NAME or MODULE:NAME names.

    Raises:
        ValueError: if there is none.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"{name!r} does not read like FILE.py:NAME or MODULE:NAME")
    path = Path(place)
    if path.suffix == ".py":
        if not path.is_file():
            raise ValueError(f"there is no file {place}")
        sys.path.insert(0, str(path.resolve().parent))  # other processes import it by its name, too
        place = path.stem
    module = importlib.import_module(place)
    if not hasattr(module, attribute):
        raise ValueError(f"{module.__name__} has no {attribute}")
    return getattr(module, attribute)
