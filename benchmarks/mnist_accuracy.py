"""Accuracy and bytes of the methods on MNIST between two sites: the same seeds, the same batches, method by method.

    python benchmarks/mnist_accuracy.py --data-dir DIR                      both sites on this machine
    sudo python benchmarks/link.py none python benchmarks/mnist_accuracy.py --data-dir DIR

The second command gives each site a network interface of its own, whose counter then says what was really sent;
otherwise bytes are the payload that dadplug counts. Prints one line a run and a summary: best epoch, mean over seeds.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import torch
from catalyst import dl
from command import connect_site, parser_of, run_at_sites
from dadplug.runners import DistributedRunner
from torch import nn
from torch.utils.data import DataLoader

from dadplug.data import load_dataset, site_indices
from dadplug.models import MNISTNet


class Curve(dl.Callback):
    """Keeps the training loss of every step, and the accuracy of every epoch."""

    def __init__(self) -> None:
        super().__init__(order=dl.CallbackOrder.External)
        self.losses, self.accuracies = [], []

    def on_batch_end(self, runner) -> None:
        if runner.is_train_loader:
            self.losses.append(float(runner.batch_metrics["loss"]))

    def on_epoch_end(self, runner) -> None:
        self.accuracies.append(runner.epoch_metrics["valid"]["accuracy01"])


def sent_by_interface() -> int | None:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    return int(counter.read_text()) if interface and interface != "lo" and counter.exists() else None


def train(arguments, data, mode: str, split: str, seed: int, rank: int):
    torch.manual_seed(seed)
    model = MNISTNet()
    mine = site_indices(data.train.labels, rank, 2, split, seed)
    curve = Curve()
    runner = DistributedRunner(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.Adam(model.parameters(), lr=arguments.lr),
        mode=mode,
        rank=arguments.max_rank,
        sync_batchnorm=not arguments.local_batchnorm,
    )
    before = sent_by_interface()
    runner.train(
        loaders={
            "train": DataLoader(data.train.subset(mine), batch_size=32, shuffle=True),
            "valid": DataLoader(data.test, batch_size=500),
        },
        num_epochs=arguments.epochs,
        seed=seed,
        loggers={"console": Silent()},
        callbacks=[dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1,)), curve],
    )
    after = sent_by_interface()
    sent = runner.reduction.traffic.total_bytes_sent if before is None or after is None else after - before
    equal = runner.reduction.first_difference() is None
    reported = runner.reduction.gather_objects(curve.losses)
    losses = [statistics.fmean(step) for step in zip(*reported)]
    return losses, curve.accuracies, sent, equal


class Silent(dl.ConsoleLogger):
    """Prints nothing."""

    def log_metrics(self, *args, **kwargs) -> None:
        pass


def run_site(arguments) -> None:
    connect_site()
    rank = int(os.environ["RANK"])
    data = load_dataset("mnist", arguments.data_dir)
    best, spent, curves = defaultdict(list), defaultdict(list), {}
    for split in arguments.splits.split(","):
        for seed in range(arguments.seeds):
            for mode in arguments.modes.split(","):
                losses, accuracies, sent, equal = train(arguments, data, mode, split, seed, rank)
                curves[split, seed, mode] = losses
                best[split, mode].append(max(accuracies))
                spent[split, mode].append(sent)
                if rank == 0:
                    shown = " ".join(f"{accuracy:.4f}" for accuracy in accuracies)
                    same = "replicas equal" if equal else "REPLICAS DIFFER"
                    print(f"{split:9} seed {seed} {mode:8} {shown}  {sent / 1e6:9.1f} MB  {same}", flush=True)
    if rank == 0:
        print(
            f"\nbest epoch, mean of {arguments.seeds} seeds; bytes {'on the wire' if sent_by_interface() else 'sent'}"
        )
        for (split, mode), values in best.items():
            dense = statistics.fmean(spent[split, "dsgd"]) if (split, "dsgd") in spent else float("nan")
            fewer = dense / statistics.fmean(spent[split, mode])
            print(f"{split:9} {mode:8} {statistics.fmean(values):.4f}   {fewer:6.1f} times fewer bytes than dsgd")
        for (split, seed, mode), losses in curves.items():
            if mode == "dad" and (split, seed, "dsgd") in curves:
                pairs = list(zip(losses, curves[split, seed, "dsgd"]))[:50]
                apart = max(abs(a - b) / b for a, b in pairs)
                print(f"{split:9} seed {seed}: losses of dad and dsgd differ by at most {apart:.1e} in 50 steps")


def main() -> int:
    parser = parser_of(
        __doc__,
        data_dir=None,
        epochs=5,
        seeds=3,
        max_rank=8,
        lr=1e-3,
        modes="dsgd,dad,rankdad",
        local_batchnorm=(False, "do not normalise over all sites' rows"),
        splits="iid,by-class",
    )
    arguments = parser.parse_args()
    return run_at_sites(run_site, arguments)


if __name__ == "__main__":
    sys.exit(main())
