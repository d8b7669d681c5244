"""Two sites predict clicks by Wide & Deep, whose tables AdaPM spreads over them, and draw the placement of keys.

    python examples/ctr.py                                          generated clicks, both sites on this machine
    python examples/ctr.py --data DIR/train.txt --limit 1000000     Criteo's, as text or as a sample in .npz
    python examples/ctr.py --method adapm-manual                    with the ids that a batch looks up given by hand
    python examples/ctr.py --method alone,ddp,no-intent,adapm       one after the other, with a table
    python examples/ctr.py --trainer lightning

On two machines, site 0 at 10.0.0.1:

    python examples/ctr.py --rank 0 --dist-url tcp://10.0.0.1:8998
    python examples/ctr.py --rank 1 --dist-url tcp://10.0.0.1:8998
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

from ctr_lightning import LIGHTNING
from ctr_methods import METHODS, Batches, Outcome, Run
from dadplug.examples.zoo.clicks import split_by_time
from runs import RunProgress

from dadplug import connect
from dadplug.data import Clicks, DataPair, load_dataset, read_criteo
from dadplug.options import Options
from dadplug.support.processes import launch_sites
from dadplug.tools.cli import add_option_arguments, options_of, plain_errors


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, help="number of this site; without it, all sites start on this machine")
    parser.add_argument("--num-nodes", type=int, default=2, help="number of sites (default: 2)")
    parser.add_argument("--dist-url", default="tcp://127.0.0.1:8998", help="rendezvous address, an address of site 0")
    parser.add_argument("--trainer", default="plain", choices=("plain", "lightning"), help="what trains")
    parser.add_argument("--method", default="adapm", help=f"one or more, by commas, of {', '.join(METHODS)}")
    parser.add_argument("--data", help="Criteo's train.txt or a sample in .npz (default: generated clicks)")
    parser.add_argument("--limit", type=int, help="rows to read (default: all)")
    parser.add_argument("--epochs", type=int, default=2, help="number of epochs (default: 2)")
    parser.add_argument("--batch-size", type=int, default=128, help="rows in a batch of one site (default: 128)")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate of Adagrad (default: 0.003)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first values (default: 0)")
    parser.add_argument("--lookahead", type=int, default=Run.lookahead, help="batches that intents are ahead")
    parser.add_argument("--interval", type=float, default=Run.interval, help="least seconds between rounds of AdaPM")
    parser.add_argument("--renumber", action="store_true", help="a table's row for each id that occurs, not for any")
    parser.add_argument("--log-dir", default="logs/ctr", help="folder of the pictures (default: logs/ctr)")
    add_option_arguments(parser)
    parser.set_defaults(option_mode="rankdad", option_rank=4)
    return parser.parse_args(argv)


def load(arguments: argparse.Namespace) -> DataPair:
    """Load the clicks."""
    if arguments.data is not None:
        return split_by_time(read_criteo(arguments.data, limit=arguments.limit))
    data = load_dataset("clicks")
    if arguments.limit is None:
        return data
    if not 0 < arguments.limit <= len(data.train):
        raise ValueError(f"limit must lie in 1 to {len(data.train)} for generated clicks, got {arguments.limit}")
    assert isinstance(data.train, Clicks)
    return split_by_time(Clicks(*data.train.batch(0, arguments.limit), data.train.rows))


def check(arguments: argparse.Namespace) -> list[str]:
    """Check the arguments before any site starts; return the methods."""
    methods = arguments.method.split(",")
    table = LIGHTNING if arguments.trainer == "lightning" else METHODS
    for name in methods:
        if name not in table:
            raise ValueError(f"unknown method {name!r} with {arguments.trainer}; valid ones are {', '.join(table)}")
    for name in ("epochs", "batch_size", "lookahead", "num_nodes"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    if arguments.rank is not None and not 0 <= arguments.rank < arguments.num_nodes:
        raise ValueError(f"rank must lie in 0 to {arguments.num_nodes - 1}, got {arguments.rank}")
    Options.create(**options_of(arguments))
    return methods


def row_of(name: str, outcome: Outcome) -> str:
    """Format the results of a method as a row of the table."""
    losses = "  ".join(f"{loss:.4f}" for loss in outcome.log_losses)
    sent, local = outcome.bytes_sent[-1], outcome.local_share[-1]
    return (
        f"{name:16}  {losses}  {outcome.seconds[0]:9.2f}  {outcome.seconds[-1]:9.2f}  "
        f"{'-' if sent is None else f'{sent / 1e6:.2f}':>8}  {'-' if local is None else f'{100 * local:.1f} %':>8}  "
        f"{outcome.table_bytes / 1e6:9.1f}"
    )


def head(epochs: int) -> str:
    """Format the head of the table."""
    losses = "  ".join(f"{f'loss {number}':>6}" for number in range(1, epochs + 1))
    line = f"{'method':16}  {losses}  {'s epoch 1':>9}  {'s last':>9}  {'MB sent':>8}  {'local':>8}  {'MB tables':>9}"
    return f"{line}\n{'-' * len(line)}"


def run_site(arguments: argparse.Namespace, methods: list[str]) -> None:
    if "RANK" in os.environ:
        rank, sites = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        connect(timeout=arguments.option_timeout)
    else:
        rank, sites = arguments.rank, arguments.num_nodes
        connect(rank, sites, arguments.dist_url, timeout=arguments.option_timeout)
    data = load(arguments)
    own = ("epochs", "batch_size", "lr", "seed", "lookahead", "interval", "renumber")
    run = Run(data, rank, sites, **{name: getattr(arguments, name) for name in own}, options=options_of(arguments))
    if rank == 0:
        print(
            f"Wide & Deep on {len(data.train):,} clicks, tested on {len(data.test):,}, {sites} sites, "
            f"{arguments.trainer}",
            flush=True,
        )
    rows, pictures = [], []
    steps = Batches(data.train, run.batch_size, rank, sites).in_epoch
    for name in methods:
        run.progress = RunProgress(name, run.epochs, steps, shown=rank == 0)
        try:
            outcome = (LIGHTNING if arguments.trainer == "lightning" else METHODS)[name](run)
        finally:
            run.progress.close()
        rows.append(row_of(name, outcome))
        if rank == 0 and outcome.histories and all(len(site.clocks) > 1 for site in outcome.histories):
            pictures.append(draw(Path(arguments.log_dir), name, outcome))
    if rank == 0:
        print("", head(run.epochs), *rows, sep="\n")
        print(
            "\nlog loss on the test rows after each epoch; of the last epoch: megabytes sent by site 0, its share of "
            "lookups answered locally, megabytes of its tables"
        )
    if pictures:
        print("\npictures:", *pictures)


def draw(folder: Path, name: str, outcome: Outcome) -> Path:
    """Draw the placement of the keys."""
    from dadplug.adapm import Timeline

    folder.mkdir(parents=True, exist_ok=True)
    Timeline.draw(folder / f"{name}.png", outcome.histories, f"Where the keys of the embeddings were, {name}")
    return folder / f"{name}.png"


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    with plain_errors(ValueError, ImportError):
        methods = check(arguments)
        if arguments.rank is None and "RANK" not in os.environ:
            load(arguments)  # reports errors in the data once
    if arguments.rank is None and "RANK" not in os.environ:
        return launch_sites([sys.argv[0], *argv], arguments.num_nodes)
    warnings.filterwarnings("ignore", "Sparse invariant checks")
    with plain_errors(ValueError, ImportError):
        run_site(arguments, methods)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
