"""Cost of estimating the gradient's noise: how much longer a step takes, on average.

    python benchmarks/noise_cost.py                                     two sites on this machine
    python benchmarks/noise_cost.py --models mnistnet --modes dsgd,dad

Times steps of which one in so many is measured, as by default, and compares the medians of both kinds.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
from command import connect_site, parser_of
from workloads import WORKLOADS, loss

import dadplug
from dadplug.support.processes import launch_sites


def measure(model_name: str, mode: str, measured_steps: int) -> None:
    """Print the times of plain and of measured steps."""
    workload = WORKLOADS[model_name]
    torch.manual_seed(0)
    model = workload.build()
    reduction = dadplug.GradientReduction(model, mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(reduction.site_rank)
    noise, plain, measured = reduction.noise, [], []
    before = None
    while len(measured) < measured_steps:
        inputs, targets = workload.draw(workload.batch_size, generator)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        reduction.synchronize()
        optimizer.step()
        seconds = time.perf_counter() - start
        after = noise.state_dict()["next"]
        if before is not None and reduction.step > 10:
            (plain if after == before else measured).append(seconds)
        before = after
    one, other = statistics.median(plain), statistics.median(measured)
    if reduction.site_rank == 0:
        share = (other - one) / (noise.every * one)
        print(
            f"{model_name:10} {mode:9} plain step {1e3 * one:8.2f} ms, measured step {1e3 * other:8.2f} ms, "
            f"one in {noise.every}: {100 * share:5.2f} % more",
            flush=True,
        )
    reduction.detach()


def main() -> int:
    parser = parser_of(
        __doc__,
        models="mnistnet,vit,resnet,gpt,lstm",
        modes="dsgd,dad,rankdad",
        measured=(8, "steps to measure"),
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        return launch_sites([__file__, *sys.argv[1:]], 2)
    connect_site()
    for model in arguments.models.split(","):
        for mode in arguments.modes.split(","):
            measure(model, mode, arguments.measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
