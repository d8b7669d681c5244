"""Pulls and pushes per second of the parameter manager, with and without intent, over the skew of the keys.

python benchmarks/adapm.py                                   # one site
torchrun --nproc-per-node 2 benchmarks/adapm.py              # half the keys remote
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import dadplug
from dadplug.adapm import Normal, ParameterManager
from dadplug.adapm.table import Table

BATCH, WIDTH, ROWS = 4096, 64, 200_000


def zipf_keys(batches: int, exponent: float, generator: torch.Generator) -> list[torch.Tensor]:
    """Draws batches of keys, key k as often as 1 / (k + 1)^exponent; 0 is uniform."""
    weights = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -exponent
    bounds = weights.cumsum(0)
    return [
        torch.searchsorted(bounds, torch.rand(BATCH, generator=generator, dtype=torch.float64) * bounds[-1])
        for _ in range(batches)
    ]


def median(times: list[float]) -> float:
    """Returns the median."""
    return sorted(times)[len(times) // 2]


def timed(action: Callable[[torch.Tensor], object], batches: list[torch.Tensor]) -> list[float]:
    """Times an action on each batch, in seconds."""
    times = []
    for keys in batches:
        start = time.perf_counter()
        action(keys)
        times.append(time.perf_counter() - start)
    return times


def throughput(manager: ParameterManager, table: Table, batches: list[torch.Tensor]) -> None:
    """Prints keys per second and site for pulls and pushes, each alone."""
    deltas = torch.full((BATCH, WIDTH), 1e-3)
    out = torch.empty(BATCH, WIDTH)
    for name, action in (
        ("pull", lambda keys: table.pull(keys, out=out)),
        ("push", lambda keys: table.push(keys, deltas)),
        ("push_async", lambda keys: table.push_async(keys, deltas)),
    ):
        timed(action, batches[:5])
        manager.wait_sync(everywhere=True)
        start = time.perf_counter()
        times = timed(action, batches)
        whole = BATCH * len(batches) / (time.perf_counter() - start)
        manager.wait_sync(everywhere=True)
        print(
            f"site {manager.rank}: {name:10} {BATCH / median(times) / 1e6:6.2f} M keys/s (median batch), "
            f"{whole / 1e6:6.2f} M over all",
            flush=True,
        )


def loop(manager: ParameterManager, table: Table, batches: list[torch.Tensor], lookahead: int, work: float) -> None:
    """Prints the rate and the local share of a training loop that pulls, works and pushes.

    Args:
        manager: the manager.
        table: its table.
        batches: the keys of each batch.
        lookahead: batches ahead at which intent is said; 0 for none.
        work: seconds of work in a batch.
    """
    deltas = torch.full((BATCH, WIDTH), 1e-3)
    first = manager.current_clock
    for step, keys in enumerate(batches[:lookahead]):
        table.intent(keys, first + step)
    for _ in range(3):  # the keys of the first batches arrive; from then on intent is ahead
        manager.wait_sync()
    manager.barrier()
    before, sent = manager.counts, manager.traffic.total_bytes_sent
    start = time.perf_counter()
    for step, keys in enumerate(batches):
        if lookahead and step + lookahead < len(batches):
            table.intent(batches[step + lookahead], first + step + lookahead)
        values = table.pull(keys)
        end = time.perf_counter() + work
        while time.perf_counter() < end:
            values.sum()
        table.push_async(keys, deltas)
        manager.advance_clock()
    seconds = time.perf_counter() - start
    counts = {name: value - before[name] for name, value in manager.counts.items()}
    local = 100 * (1 - counts["pulled_remotely"] / counts["pulled"])
    megabytes = (manager.traffic.total_bytes_sent - sent) / 1e6 / len(batches)
    print(
        f"site {manager.rank}: {'intent' if lookahead else 'none  '}, {1e3 * seconds / len(batches):6.2f} ms a batch "
        f"({1e3 * work:g} ms of it work), {local:6.2f} % of pulls local, {megabytes:.3f} MB a batch, "
        f"{counts['moved']:,} moved, {counts['replicated']:,} replicated from here",
        flush=True,
    )
    manager.wait_sync(everywhere=True)


def main() -> None:
    """Runs the benchmark at this site."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--technique", default="all")
    parser.add_argument("--exponents", type=float, nargs="*", default=[0.0, 0.8, 1.1], help="skews of the loops")
    parser.add_argument("--work", type=float, default=5.0, help="ms of work in a batch of the loops")
    parser.add_argument("--lookahead", type=int, default=50, help="batches")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dadplug.connect()
    with ParameterManager(technique=args.technique) as manager:
        generator = torch.Generator().manual_seed(manager.rank)
        table = manager.table("uniform", WIDTH, rows=ROWS, initialiser=Normal())
        table.pull(torch.arange(manager.rank, ROWS, manager.world_size))  # makes the values
        throughput(manager, table, zipf_keys(args.batches, 0.0, generator))
        for exponent in args.exponents if manager.world_size > 1 else []:
            for lookahead in (0, args.lookahead):
                table = manager.table(f"{exponent} {lookahead}", WIDTH, rows=ROWS, initialiser=Normal())
                table.pull(torch.arange(manager.rank, ROWS, manager.world_size))
                if manager.rank == 0:
                    print(f"Zipf {exponent}:", flush=True)
                loop(manager, table, zipf_keys(args.batches, exponent, generator), lookahead, args.work / 1e3)


if __name__ == "__main__":
    main()
