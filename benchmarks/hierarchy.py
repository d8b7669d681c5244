"""Step times of two nodes with several processes each: all alike, and in hierarchical groups.

    sudo python benchmarks/link.py 100mbit python benchmarks/hierarchy.py --local-size 2
    python benchmarks/hierarchy.py --methods rankdad

Started once on each node with torchrun's RANK, WORLD_SIZE and MASTER_ADDR of the nodes, as benchmarks/link.py
does; alone it is both nodes itself, with no slow link between. Each starts --local-size processes. Bytes are a
node's: those that really left its interface in a step where GLOO_SOCKET_IFNAME names one, else those that the meters
of its processes have counted, under "all alike" for processes of the same node too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from command import connect_site, parser_of

NODES = 2


def start(arguments: argparse.Namespace) -> int:
    """Start the processes of this node, or of both, and wait for them."""
    own = [int(os.environ["RANK"])] if "RANK" in os.environ else range(NODES)
    size = arguments.local_size
    common = {"WORLD_SIZE": str(NODES * size), "LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}
    processes = []
    for node in own:
        for index in range(size):
            place = {"RANK": str(node * size + index), "LOCAL_RANK": str(index), "GROUP_RANK": str(node)}
            environment = meeting | dict(os.environ) | common | place
            processes.append(subprocess.Popen([sys.executable, __file__, "--worker", *sys.argv[1:]], env=environment))
    return max(abs(process.wait()) for process in processes)


def measure(method: str, hierarchy: str | None, arguments: argparse.Namespace) -> tuple[float, int]:
    """Return the median step in seconds, and bytes that this node sent to the other one in a step."""
    import torch
    import torch.distributed as dist
    from workloads import WORKLOADS, loss

    import dadplug

    torch.manual_seed(0)
    workload = WORKLOADS[arguments.model]
    model = workload.build()
    options = {"hierarchy": hierarchy, "rank": arguments.rank}
    reduction = dadplug.GradientReduction(model, mode=method, **options)
    inputs, targets = workload.draw(workload.batch_size, torch.Generator().manual_seed(dist.get_rank()))
    interface = Path("/sys/class/net") / os.environ.get("GLOO_SOCKET_IFNAME", "lo") / "statistics/tx_bytes"
    shaped = "GLOO_SOCKET_IFNAME" in os.environ
    times, before = [], 0
    for step in range(arguments.steps + 5):
        dist.barrier()
        if step == 5:
            before = int(interface.read_text()) if shaped else reduction.traffic.total_bytes_sent
        begin = time.perf_counter()
        loss(model(inputs), targets).backward()
        reduction.synchronize()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=1e-3)
                parameter.grad = None
        times.append(time.perf_counter() - begin)
    dist.barrier()
    sent = (int(interface.read_text()) if shaped else reduction.traffic.total_bytes_sent) - before
    if not shaped:
        sent = sum(reduction.gather_objects(sent)[: arguments.local_size])
    reduction.detach()
    return statistics.median(times[5:]), sent // arguments.steps


def work(arguments: argparse.Namespace) -> None:
    """Measure each method both ways, in each process; the first one prints."""
    import torch.distributed as dist

    connect_site()
    first = dist.get_rank() == 0
    if first:
        print(f"{arguments.model}, {NODES} nodes x {arguments.local_size} processes")
        print(f"{'':12} {'all alike':>26} {'hierarchical':>26}")
    for method in arguments.methods.split(","):
        flat, nested = (measure(method, hierarchy, arguments) for hierarchy in (None, "auto"))
        if first:
            cells = " ".join(f"{1e3 * seconds:9.1f} ms {nbytes:11,} B" for seconds, nbytes in (flat, nested))
            ratios = f"{flat[0] / nested[0]:5.2f} x the speed, {flat[1] / max(1, nested[1]):4.1f} x fewer bytes"
            print(f"{method:12} {cells}   {ratios}", flush=True)


def main() -> int:
    parser = parser_of(
        __doc__,
        local_size=(2, "processes on each node"),
        methods="dsgd,dad,rankdad,powersgd,topk",
        model=("mnistnet", "a name of benchmarks/workloads.py"),
        rank=4,
        steps=20,
        worker=(False, argparse.SUPPRESS),
    )
    arguments = parser.parse_args()
    if not arguments.worker:
        return start(arguments)
    work(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
