"""Median time of a training step at two sites, by DDP and by each method, in one run.

    sudo python benchmarks/link.py 100mbit python benchmarks/step_time.py
    torchrun --nproc-per-node 2 benchmarks/step_time.py                     unshaped, on loopback

One thread a site. A step is forward, backward, the exchange and the optimizer's step; before each the sites wait for
one another, outside of the measured time. Bytes are those of the network interface's counter where the link has one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from workloads import WORKLOADS, loss

import dadplug


def sent() -> int:
    counter = Path(f"/sys/class/net/{os.environ.get('GLOO_SOCKET_IFNAME', 'lo')}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


def measure(name: str, arguments: argparse.Namespace) -> tuple[float, int]:
    """Returns the median step time in seconds, and bytes a step."""
    torch.manual_seed(0)
    workload = WORKLOADS[arguments.model]
    model = trained = workload.build()
    reduction = None
    method, _, settings = name.partition(":")
    if method.startswith("ddp"):
        # PowerSGD's hook aborts with more than one bucket on gloo, so that it gets a single one.
        trained = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100 if method == "ddp-powersgd" else 25)
        if method == "ddp-fp16":
            trained.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif method == "ddp-powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=arguments.rank, start_powerSGD_iter=2)
            trained.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif method != "alone":
        options = {"rank": arguments.rank} | dict(setting.split("=") for setting in settings.split("+") if setting)
        options = {key: int(value) if str(value).isdigit() else value for key, value in options.items()}
        reduction = dadplug.GradientReduction(model, mode=method, **options)
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[arguments.optimizer]
    optimizer = make(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs, targets = workload.draw(arguments.batch_size or workload.batch_size, generator)
    steps = arguments.steps if method not in ("ddp", "ddp-fp16", "dsgd") else min(arguments.steps, arguments.slow_steps)
    times, before = [], 0
    for step in range(steps + 5):
        dist.barrier()
        if step == 5:
            before = sent()
        start = time.perf_counter()
        loss(trained(inputs), targets).backward()
        if reduction is not None:
            reduction.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    dist.barrier()
    spent = (sent() - before) // steps
    if reduction is not None:
        reduction.detach()
    return statistics.median(times[5:]), spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="alone,ddp,ddp-powersgd,dsgd,dad,rankdad")
    parser.add_argument("--model", choices=list(WORKLOADS), default="mnistnet")
    parser.add_argument("--json", help="file to append the results to, a line a method")
    parser.add_argument("--rate", default="", help="written into that file")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--batch-size", type=int, help="samples a site; by default each model's own")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--slow-steps", type=int, default=15, help="steps of ddp and dsgd, which take long on slow links"
    )
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dadplug.connect()
    results = {}
    for name in arguments.methods.split(","):
        results[name] = measure(name, arguments)
        if dist.get_rank() == 0:
            seconds, spent = results[name]
            ratio = f"{results['ddp'][0] / seconds:6.1f} x faster than ddp" if "ddp" in results else ""
            if arguments.json:
                row = {"model": arguments.model, "rate": arguments.rate, "method": name, "ms": 1e3 * seconds}
                with open(arguments.json, "a") as results_file:
                    results_file.write(json.dumps(row | {"bytes": spent}) + "\n")
            print(f"{name:24} {1e3 * seconds:8.1f} ms   {spent:12,} bytes   {ratio}", flush=True)


if __name__ == "__main__":
    main()
