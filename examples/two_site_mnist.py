"""Two sites train MNISTNet on handwritten digits, by rank-dAD, in a Catalyst experiment.

    python examples/two_site_mnist.py                       both sites on this machine
    python examples/two_site_mnist.py --compare             dsgd, dad and rankdad, with a table and a picture

On two machines, site 0 at 10.0.0.1:

    python examples/two_site_mnist.py --rank 0 --dist-url tcp://10.0.0.1:8998
    python examples/two_site_mnist.py --rank 1 --dist-url tcp://10.0.0.1:8998
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from catalyst import dl
from dadplug.runners import DistributedRunner
from torch import nn
from torch.utils.data import DataLoader

from dadplug import connect
from dadplug.cli import add_option_arguments, options_of, plain_errors
from dadplug.comparison import RunRecord, picture, table
from dadplug.data import DATASETS, DataPair, load_dataset, site_indices
from dadplug.data.splits import SPLITS
from dadplug.launch import launch_sites
from dadplug.models import MNISTNet
from dadplug.options import Options

EPOCHS = {"digits": 10, "mnist": 5}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, help="number of this site; without it, all sites start on this machine")
    parser.add_argument("--num-nodes", type=int, default=2, help="number of sites (default: 2)")
    parser.add_argument("--dist-url", default="tcp://127.0.0.1:8998", help="meeting point, an address of site 0")
    parser.add_argument("--dataset", default="digits", help=f"data set: {', '.join(DATASETS)} (default: digits)")
    parser.add_argument("--data-dir", default="data", help="folder of MNIST's files (default: data)")
    parser.add_argument("--split", default="iid", help=f"how samples are dealt to sites: {', '.join(SPLITS)}")
    parser.add_argument("--epochs", type=int, help="number of epochs (default: 10 for digits, 5 for mnist)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a batch of one site (default: 32)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of Adam (default: 0.001)")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    parser.add_argument("--compare", action="store_true", help="run dsgd, dad and rankdad one after the other")
    parser.add_argument("--log-dir", default="logs/two_site_mnist", help="folder of results")
    add_option_arguments(parser)
    parser.set_defaults(option_sync_batchnorm=True)  # MNISTNet has batch normalisation, and a site may lack classes
    return parser.parse_args(argv)


class History(dl.Callback):
    """Remembers loss, bytes and time of every step."""

    def __init__(self) -> None:
        super().__init__(order=dl.CallbackOrder.External)
        self.losses, self.samples, self.bytes_sent, self.seconds = [], [], [], []
        self._set_up = None

    def on_batch_start(self, runner) -> None:
        self._start = time.perf_counter()
        if self._set_up is None:
            self._set_up = runner.reduction.traffic.total_bytes_sent

    def on_batch_end(self, runner) -> None:
        if runner.is_train_loader:
            self.losses.append(float(runner.batch_metrics["loss"]))
            self.samples.append(runner.batch_size)
            self.bytes_sent.append(runner.reduction.traffic.total_bytes_sent - self._set_up)
            self.seconds.append(time.perf_counter() - self._start)


class EpochLine(dl.ConsoleLogger):
    """Prints one line an epoch."""

    def log_metrics(self, metrics, scope, runner) -> None:
        if scope == "epoch":
            train, valid, traffic = metrics["train"], metrics["valid"], runner.reduction.traffic
            print(
                f"  epoch {runner.epoch_step:2d}/{runner.num_epochs}   loss {train['loss']:.4f}   held-out accuracy "
                f"{valid['accuracy01']:.4f}   {traffic.bytes_sent / 1e6:.3f} MB a step, {traffic.ratio:.0f} x fewer "
                "than dense",
                flush=True,
            )


def train(arguments: argparse.Namespace, data: DataPair, rank: int, num_nodes: int, mode: str) -> RunRecord:
    """Trains one model by one method; every site calls it."""
    torch.manual_seed(arguments.seed)
    model = MNISTNet(classes=data.classes)
    mine = site_indices(data.train.labels, rank, num_nodes, arguments.split, arguments.seed)
    loaders = {
        "train": DataLoader(data.train.subset(mine), batch_size=arguments.batch_size, shuffle=True),
        "valid": DataLoader(data.test, batch_size=256),
    }
    epochs = arguments.epochs or EPOCHS.get(arguments.dataset, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    history = History()
    runner = DistributedRunner(model, nn.CrossEntropyLoss(), optimizer, **(options_of(arguments) | {"mode": mode}))
    runner.train(
        loaders=loaders,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
        num_epochs=epochs,
        seed=arguments.seed,
        loggers={"console": EpochLine()},
        callbacks=[dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1,)), history],
    )
    told = runner.reduction.gather_objects((history.losses, history.samples))
    traffic = runner.reduction.traffic
    return RunRecord(
        mode=mode,
        losses=mean_over_sites(told),
        bytes_sent=history.bytes_sent,
        accuracy=runner.epoch_metrics["valid"]["accuracy01"],
        bytes_a_step=traffic.bytes_sent,
        dense_bytes=traffic.dense_bytes,
        step_seconds=statistics.median(history.seconds),
        replicas_equal=runner.reduction.first_difference() is None,
    )


def mean_over_sites(told: list[tuple[list[float], list[int]]]) -> list[float]:
    """Averages the sites' losses step by step, as far as the site with the fewest steps has them."""
    steps = min(len(losses) for losses, _ in told)
    return [
        sum(losses[step] * samples[step] for losses, samples in told) / sum(samples[step] for _, samples in told)
        for step in range(steps)
    ]


def run_site(arguments: argparse.Namespace) -> None:
    if "RANK" in os.environ:
        rank, num_nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = (None, None, None)
    else:
        rank, num_nodes = arguments.rank, arguments.num_nodes
        place = (rank, num_nodes, arguments.dist_url)
    data = load_dataset(arguments.dataset, arguments.data_dir)
    connect(*place, timeout=arguments.option_timeout)
    runs = []
    for mode in ("dsgd", "dad", "rankdad") if arguments.compare else (arguments.option_mode,):
        if rank == 0:
            print(f"{num_nodes} sites train MNISTNet on {arguments.dataset}, split {arguments.split}, by {mode}")
        runs.append(train(arguments, data, rank, num_nodes, mode))
    if rank == 0:
        print("\n" + table(runs))
        if arguments.compare:
            folder = Path(arguments.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            title = f"MNISTNet on {arguments.dataset}, {num_nodes} sites, split {arguments.split}"
            picture(runs, folder / "comparison.png", title)
            print(f"\npicture: {folder / 'comparison.png'}")


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    with plain_errors(ValueError, ImportError):
        Options.create(**options_of(arguments))
        if arguments.num_nodes < 1 or (arguments.rank is not None and not 0 <= arguments.rank < arguments.num_nodes):
            raise ValueError(f"rank must lie in 0 to {arguments.num_nodes - 1}, got {arguments.rank}")
        data = load_dataset(arguments.dataset, arguments.data_dir)  # downloads what is missing, once
        site_indices(data.train.labels, 0, arguments.num_nodes, arguments.split)
    if arguments.rank is None and "RANK" not in os.environ:
        return launch_sites([__file__, *argv], arguments.num_nodes)
    with plain_errors():
        run_site(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
