"""Profile of a step's time: forward and backward, encoding, decoding, waiting; by layer, and as a trace.

    torchrun --nproc-per-node 2 benchmarks/step_profile.py --mode rankdad --rank 4
    torchrun --nproc-per-node 2 benchmarks/step_profile.py --trace trace.json    (for Perfetto)
    python benchmarks/step_profile.py                                            one site, without a network

One thread a site. Times are medians over steps by the meter, `reduction.traffic`; "one process" is forward and backward
of the same model and batch without dadplug, its weight gradients formed, measured in turns with the others.
"""

from __future__ import annotations

import copy
import os
import statistics
import time

import torch
import torch.distributed as dist
from command import parser_of
from torch import nn

import dadplug
from dadplug.models import build_model


def meet() -> None:
    """Have the sites wait for one another, where there are several."""
    if dist.is_initialized():
        dist.barrier()


def main() -> None:
    parser = parser_of(
        __doc__,
        mode="rankdad",
        rank=4,
        batch_size=16,
        steps=60,
        trace=(None, "file for a Chrome trace of five steps at site 0"),
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dadplug.connect()
    model = build_model("MNISTNet")
    alone = copy.deepcopy(model)
    reduction = dadplug.GradientReduction(model, mode=arguments.mode, rank=arguments.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(arguments.batch_size, 1, 28, 28, generator=torch.Generator().manual_seed(reduction.site_rank))
    targets = torch.arange(arguments.batch_size) % 10

    def train() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        reduction.synchronize()
        optimizer.step()

    times: dict[str, list[float]] = {"one process": [], "encode": [], "decode": [], "wait": [], "step": []}
    for step in range(arguments.steps + 10):
        meet()
        start = time.perf_counter()
        alone.zero_grad()
        nn.functional.cross_entropy(alone(inputs), targets).backward()
        own = time.perf_counter() - start
        meet()
        start = time.perf_counter()
        train()
        whole, layers = time.perf_counter() - start, reduction.traffic.layers.values()
        if step >= 10:
            times["one process"].append(own)
            times["step"].append(whole)
            for kind in ("encode", "decode", "wait"):
                times[kind].append(sum(getattr(layer, f"{kind}_seconds") for layer in layers))
    if arguments.trace and reduction.site_rank == 0:
        with torch.profiler.profile() as profiler:
            for _ in range(5):
                train()
        profiler.export_chrome_trace(arguments.trace)
    elif arguments.trace:
        for _ in range(5):
            train()
    if reduction.site_rank == 0:
        print(reduction.traffic)
        medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
        print("medians in ms:", ", ".join(f"{name} {value:.2f}" for name, value in medians.items()))
        share = (medians["encode"] + medians["decode"]) / medians["one process"]
        print(f"encoding and decoding take {100 * share:.0f} % of one process's forward and backward")
    meet()


if __name__ == "__main__":
    main()
