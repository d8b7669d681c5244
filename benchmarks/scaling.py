"""Cost of a step with more sites: measured with 2, 4 and 8 processes on loopback, predicted for more.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --methods dad,rankdad --sites 2,4

MNISTNet, batch 16 a site, rank 4. Bytes are those that a site hands to the transport, the mean over sites. Decoding is
the time that it spends on the agreed gradient, both by the meter; with more processes than cores times are those of
processes that take turns, and so only decoding, which is counted in processor time of the one, is held against the
model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from command import connect_site, parser_of
from drive import append

LAYERS = [(2048, 784), (1024, 2048), (512, 1024), (256, 512), (10, 256)]
SMALL = 2 * (1024 + 512 + 256)  # numbers of the batch norms, which every method all-reduces
BATCH, RANK, BYTES = 16, 4, 4


def predict(method: str, sites: int) -> tuple[float, float, int]:
    """Predicts bytes a step and site, multiplications that decoding takes, and messages that wait for one another."""
    ring = 2 * (sites - 1) / sites
    dense = sum(m * n for m, n in LAYERS)
    sides = sum(m + n for m, n in LAYERS)
    small = ring * SMALL * BYTES
    if method == "dsgd":
        return small + ring * dense * BYTES, 0.0, 2 * (sites - 1)
    if method == "dad":
        return small + (sites - 1) * BATCH * sides * BYTES, sites * BATCH * dense, 2 * (sites - 1)
    if method == "rankdad:merge=all":
        return small + (sites - 1) * RANK * sides * BYTES, sites * RANK * dense, 2 * (sites - 1)
    if method.startswith("rankdad"):  # by default owners merge from three sites on; with two the bytes are the same
        from dadplug.step.reducer.owners import OwnedLayer, assign_owners, busiest_numbers, numbers_sent

        layers = [OwnedLayer(str(shape), *shape, 0, RANK) for shape in LAYERS]
        owners = assign_owners(layers, sites)
        sent = statistics.mean(numbers_sent(layers, owners, sites))
        return small + sent * BYTES, RANK * dense, len(busiest_numbers(layers, owners, sites))
    return small + ring * RANK * sides * BYTES, RANK * dense, 4 * (sites - 1)


def site(methods: str, steps: int, file: str) -> None:
    """Train by each method, at each site, and write the traffic."""
    import torch
    import torch.distributed as dist
    from attach import parse
    from torch import nn

    import dadplug
    from dadplug.models import MNISTNet

    connect_site()
    rank = int(os.environ["RANK"])
    for method in methods.split(","):
        torch.manual_seed(0)
        model = MNISTNet()
        mode, options = parse(method)
        reduction = dadplug.GradientReduction(model, mode=mode, rank=RANK, **options)
        inputs = torch.randn(BATCH, 1, 28, 28, generator=torch.Generator().manual_seed(rank))
        decoding = []
        for step in range(steps):
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs), torch.arange(BATCH) % 10).backward()
            reduction.synchronize()
            if step >= 3:
                decoding.append(sum(layer.decode_seconds for layer in reduction.traffic.layers.values()))
        sent: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(sent, reduction.traffic.bytes_sent)
        if rank == 0:
            row = {"method": method, "bytes": statistics.mean(sent), "ms": 1e3 * min(decoding)}
            append(Path(file), row | {"median": 1e3 * statistics.median(decoding)})
        reduction.detach()


def main() -> None:
    parser = parser_of(
        __doc__,
        methods="dsgd,dad,rankdad,rankdad:merge=all,powersgd",
        sites="2,4,8",
        predict="64,1024",
        steps=15,
        file=(None, argparse.SUPPRESS),
    )
    arguments = parser.parse_args()
    if arguments.file:
        return site(arguments.methods, arguments.steps, arguments.file)
    print("| method | sites | MB a step, measured | predicted | decoding ms | multiplications | rounds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for sites in map(int, arguments.sites.split(",")):
        with tempfile.NamedTemporaryFile(suffix=".json") as results:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(sites)]
            own = [__file__, "--methods", arguments.methods, "--steps", str(arguments.steps), "--file", results.name]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run([*command, *own], check=True, env=environment, stderr=subprocess.DEVNULL)
            for line in Path(results.name).read_text().splitlines():
                row = json.loads(line)
                nbytes, work, rounds = predict(row["method"], sites)
                print(
                    f"| {row['method']} | {sites} | {row['bytes'] / 1e6:.3f} | {nbytes / 1e6:.3f} | {row['ms']:.2f} | "
                    f"{work / 1e6:,.0f} M | {rounds} |",
                    flush=True,
                )
    for sites in map(int, arguments.predict.split(",")):
        for method in arguments.methods.split(","):
            nbytes, work, rounds = predict(method, sites)
            print(f"| {method} | {sites} | - | {nbytes / 1e6:.3f} | - | {work / 1e6:,.0f} M | {rounds} |")
    return None


if __name__ == "__main__":
    main()
