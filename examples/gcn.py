"""Two sites train a graph convolutional network with an embedding for each node, spread over the sites (AdaPM).

python examples/gcn.py                              # both sites on this machine, all ways one after the other
python examples/gcn.py --ways auto --split by-class # each site has the nodes of its own classes
python examples/gcn.py --rank 0 --dist-url tcp://10.0.0.1:8998    # and --rank 1 on another machine

Ways: auto (intents from a forward pass of shapes), manual (intents from a function of the batch), none (no intents:
rows are pulled when they are used), ddp (PyTorch's DistributedDataParallel, with all embeddings at each site).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from dadplug.examples.zoo.graph import Graph, NeighbourLoader, block_graph
from runs import RunProgress
from torch import nn

from dadplug import connect
from dadplug.adapm import AdaDataLoader, AdaModel, ParameterManager
from dadplug.data import SPLITS, site_indices
from dadplug.models import GCN
from dadplug.support.processes import launch_sites
from dadplug.tools.cli import plain_errors

WAYS = ("auto", "manual", "none", "ddp")


@dataclass
class Result:
    """Results of one way at this site."""

    accuracy: float
    epoch_seconds: float
    local: float
    megabytes: float


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, help="number of this site; without it, all sites start on this machine")
    parser.add_argument("--num-nodes", type=int, default=2, help="number of sites (default: 2)")
    parser.add_argument("--dist-url", default="tcp://127.0.0.1:8998", help="rendezvous address, an address of site 0")
    parser.add_argument(
        "--ways", nargs="+", default=list(WAYS), choices=WAYS, help="one after the other (default: all)"
    )
    parser.add_argument("--split", default="iid", choices=SPLITS, help="how nodes are assigned to sites (default: iid)")
    parser.add_argument("--nodes", type=int, default=10_000, help="nodes of the graph (default: 10000)")
    parser.add_argument("--classes", type=int, default=8, help="blocks of the graph (default: 8)")
    parser.add_argument("--degree", type=float, default=10.0, help="mean number of neighbours (default: 10)")
    parser.add_argument("--width", type=int, default=32, help="width of an embedding (default: 32)")
    parser.add_argument("--fanouts", type=int, nargs="+", default=[5, 5], help="neighbours a hop (default: 5 5)")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs (default: 10)")
    parser.add_argument("--batch-size", type=int, default=128, help="nodes in a batch of one site (default: 128)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of Adagrad (default: 0.1)")
    parser.add_argument("--lookahead", type=int, default=16, help="batches that intents are ahead (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a silent site is lost")
    return parser.parse_args()


class Managed:
    """A model with managed embeddings."""

    def __init__(self, net: GCN, arguments: argparse.Namespace, way: str) -> None:
        self.optimizer = torch.optim.Adagrad(net.parameters(), lr=arguments.lr)
        self.manager = ParameterManager(timeout=arguments.timeout)
        self.model = AdaModel(net, self.optimizer, self.manager, timeout=arguments.timeout)
        self._way, self._lookahead = way, arguments.lookahead

    def read_ahead(self, loader: NeighbourLoader) -> Iterable:
        if self._way == "none":
            return loader
        intent = "auto" if self._way == "auto" else lambda batch: {"nodes.weight": batch[0]}
        return AdaDataLoader(loader, self.model, intent=intent, lookahead=self._lookahead)

    def synchronize(self) -> None:
        self.model.synchronize()

    def see_all(self) -> None:
        """Wait until all sites see what each has pushed."""
        self.manager.wait_sync(everywhere=True)

    def bytes_sent(self) -> int:
        assert self.model.reduction is not None
        return self.manager.traffic.total_bytes_sent + self.model.reduction.traffic.total_bytes_sent

    def lookups(self) -> tuple[int, int]:
        """Return the number of rows that were pulled, and of those that another site has answered."""
        return self.manager.counts["pulled"], self.manager.counts["pulled_remotely"]

    def close(self) -> None:
        self.manager.barrier()
        self.model.close()
        self.manager.close()


class Replicated:
    """The same model in PyTorch's DistributedDataParallel."""

    def __init__(self, net: GCN, arguments: argparse.Namespace, way: str) -> None:
        self.optimizer = torch.optim.Adagrad(net.parameters(), lr=arguments.lr)
        self.model = nn.parallel.DistributedDataParallel(net) if dist.is_initialized() else net
        sites = dist.get_world_size() if dist.is_initialized() else 1
        gradients = sum(parameter.nbytes for parameter in net.parameters())
        self._each = 2 * (sites - 1) * gradients // sites  # bytes of a ring all-reduce
        self._sent = 0

    def read_ahead(self, loader: NeighbourLoader) -> Iterable:
        return loader

    def synchronize(self) -> None:
        """Count the bytes that backward has sent."""
        self._sent += self._each

    def see_all(self) -> None:
        """Do nothing: every site has all rows."""

    def bytes_sent(self) -> int:
        return self._sent

    def lookups(self) -> tuple[int, int]:
        return 1, 0

    def close(self) -> None:
        """Do nothing."""


def train(way: str, graph: Graph, arguments: argparse.Namespace, rank: int, sites: int) -> Result:
    """Train one way; every site calls it."""
    torch.manual_seed(arguments.seed)
    net = GCN(graph.nodes, arguments.classes, arguments.width, arguments.width, arguments.fanouts)
    site = (Replicated if way == "ddp" else Managed)(net, arguments, way)
    order = torch.randperm(graph.nodes, generator=torch.Generator().manual_seed(arguments.seed))
    known, held_out = order[: graph.nodes // 2], order[graph.nodes // 2 :]
    mine, test = (
        some[site_indices(graph.labels[some], rank, sites, arguments.split, arguments.seed)]
        for some in (known, held_out)
    )
    options = {"fanouts": arguments.fanouts, "batch_size": arguments.batch_size, "seed": arguments.seed + rank}
    loader = site.read_ahead(NeighbourLoader(graph, mine, **options))
    steps = int(over_sites(len(loader), dist.ReduceOp.MIN))  # so that no site waits for another
    progress = RunProgress(way, arguments.epochs, steps, shown=rank == 0)
    seconds, megabytes, lookups = [], [], []
    for _ in range(arguments.epochs):
        losses = []
        before, start = (site.bytes_sent(), site.lookups()), time.perf_counter()
        for _, (trees, labels) in zip(range(steps), loader):
            site.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(site.model(trees), labels)
            loss.backward()
            site.synchronize()
            site.optimizer.step()
            losses.append(float(loss.detach()))
            progress.step(loss=f"{losses[-1]:.4f}")
        site.see_all()
        seconds.append(time.perf_counter() - start)
        megabytes.append((site.bytes_sent() - before[0]) / 1e6)
        lookups.append([now - then for now, then in zip(site.lookups(), before[1])])
        site.model.eval()
        with torch.no_grad():
            right = sum(
                int((site.model(trees).argmax(1) == labels).sum())
                for trees, labels in NeighbourLoader(graph, test, shuffle=False, **options)
            )
        site.model.train()
        accuracy = over_sites(right) / len(held_out)
        pulled, remotely = map(sum, zip(*lookups))
        local = 1 - remotely / max(pulled, 1)
        values = {
            "loss": f"{sum(losses) / max(len(losses), 1):.4f}",
            "accuracy": f"{accuracy:.4f}",
            "MB/epoch": f"{megabytes[-1]:.2f}",
            "s/epoch": f"{seconds[-1]:.2f}",
            "local": f"{1 - lookups[-1][1] / max(lookups[-1][0], 1):.3f}",
        }
        progress.end_epoch(**values)
    progress.close()
    site.close()
    return Result(accuracy, sorted(seconds)[len(seconds) // 2], local, sum(megabytes) / len(megabytes))


def over_sites(number: float, how: dist.ReduceOp = dist.ReduceOp.SUM) -> float:
    """Return the sum of a number over all sites, or its minimum."""
    value = torch.tensor(float(number))
    if dist.is_initialized():
        dist.all_reduce(value, how)
    return float(value)


def run_site(arguments: argparse.Namespace) -> None:
    by_launcher = "RANK" in os.environ
    place = (None, None, None) if by_launcher else (arguments.rank, arguments.num_nodes, arguments.dist_url)
    connect(*place, timeout=arguments.timeout)
    rank = dist.get_rank() if dist.is_initialized() else 0
    sites = dist.get_world_size() if dist.is_initialized() else 1
    graph = block_graph(arguments.nodes, arguments.classes, arguments.degree, seed=arguments.seed)
    if rank == 0:
        print(
            f"GCN on {graph.nodes:,} nodes with {len(graph.neighbours):,} neighbours, embeddings of width "
            f"{arguments.width}, {sites} sites, split {arguments.split}",
            flush=True,
        )
    results = {way: train(way, graph, arguments, rank, sites) for way in arguments.ways}
    if rank == 0:
        print("\nway      accuracy   epoch (median)   rows local   MB an epoch, site 0")
        for way, result in results.items():
            print(
                f"{way:8} {result.accuracy:.4f}     {result.epoch_seconds:6.2f} s         "
                f"{100 * result.local:5.1f} %      {result.megabytes:8.2f}"
            )


def main() -> int:
    arguments = parse()
    with plain_errors(ValueError, ImportError):
        if arguments.num_nodes < 1 or (arguments.rank is not None and not 0 <= arguments.rank < arguments.num_nodes):
            raise ValueError(f"rank must lie in 0 to {arguments.num_nodes - 1}, got {arguments.rank}")
        if min(arguments.epochs, arguments.batch_size, arguments.lookahead) < 1:
            raise ValueError("epochs, batch-size and lookahead must be at least 1")
        GCN(1, arguments.classes, arguments.width, arguments.width, arguments.fanouts)
        graph = block_graph(arguments.nodes, arguments.classes, arguments.degree, seed=arguments.seed)
        site_indices(graph.labels, 0, arguments.num_nodes, arguments.split)
    if arguments.rank is None and "RANK" not in os.environ:
        return launch_sites(sys.argv, arguments.num_nodes)
    with plain_errors():
        run_site(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
