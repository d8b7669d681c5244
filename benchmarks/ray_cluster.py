"""A Ray cluster of two nodes that a slow link joins: step times and bytes of DDP and dadplug, in one run.

    sudo .venv-trainers/bin/python benchmarks/ray_cluster.py
    sudo .venv-trainers/bin/python benchmarks/ray_cluster.py --rate 10mbit --methods ddp,rankdad --steps 5

Each node is a network namespace with one processor of Ray, started by ``ray start``; the link is that of link.py. A
TorchTrainer trains MNISTNet (batch 16) at both, by one method after the other. Bytes are those of the interface's
counter, beside the payload that dadplug reports. What Ray itself sends meanwhile is measured by a pause without steps.
Linux only; needs root, iproute2, and ray.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from command import parser_of
from link import ADDRESSES, Link, may_make_links, site_environment

PORT = 6379
START_SECONDS = 300.0
WARM_UP = 2  # steps, which make plans and buckets
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "PYTHONPATH": str(Path(__file__).resolve().parent),
}
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # which Ray sets itself


def train(config: dict) -> list[dict]:
    """Time steps of each method at one worker."""
    import ray.train
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = dist.get_rank()
    counter = Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes")
    rows = []
    for name in config["methods"]:
        attached, times, before, began = timed(name, config["steps"], rank, counter)
        sent, seconds = int(counter.read_text()) - before, time.monotonic() - began
        payload = None if attached.reduction is None else attached.reduction.traffic.bytes_sent
        dist.barrier()
        before = int(counter.read_text())
        time.sleep(config["pause"])
        idle = (int(counter.read_text()) - before) / config["pause"]
        rows.append(
            {
                "method": name,
                "ms": 1e3 * statistics.median(times),
                "sent": sent / config["steps"],
                "payload": payload,
                "ray": idle * seconds / config["steps"],
                "node": ray.train.get_context().get_node_rank(),
            }
        )
        attached.detach()
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rows)
    return gathered


def timed(name: str, steps: int, rank: int, counter: Path) -> tuple:
    """Train by a method.

    Returns:
        The method, the seconds of each step, and the bytes that the counter showed before the first, and when.
    """
    import torch
    import torch.distributed as dist
    from attach import Attached
    from workloads import WORKLOADS, loss

    workload = WORKLOADS["mnistnet"]
    torch.manual_seed(0)
    attached = Attached(workload.build(), name, rank=4)
    optimizer = torch.optim.SGD(attached.model.parameters(), lr=0.01)
    inputs, targets = workload.draw(workload.batch_size, torch.Generator().manual_seed(rank))
    times = []
    for step in range(steps + WARM_UP):
        if step == WARM_UP:
            dist.barrier()
            before, began = int(counter.read_text()), time.monotonic()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss(attached.model(inputs), targets).backward()
        attached.step(optimizer)
        times.append(time.perf_counter() - start)
    dist.barrier()
    return attached, times[WARM_UP:], before, began


def drive(arguments: argparse.Namespace) -> None:
    """Run the training from the first node, and print the table."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address=f"{ADDRESSES[0]}:{PORT}", log_to_driver=False)
    deadline = time.monotonic() + START_SECONDS
    while len([node for node in ray.nodes() if node["Alive"]]) < 2:
        if time.monotonic() > deadline:
            raise SystemExit("the second node did not come")
        time.sleep(0.5)
    config = {"methods": arguments.methods.split(","), "steps": arguments.steps, "pause": arguments.pause}
    with tempfile.TemporaryDirectory() as folder:
        found = TorchTrainer(
            train,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()
    first, second = found.return_value
    assert {first[0]["node"], second[0]["node"]} == {0, 1}, "both workers are on one node"
    print(f"MNISTNet, batch 16 at each of two nodes of Ray, {arguments.rate}; of the first node, per step:\n")
    print("| method | ms | times faster than DDP | MB sent, by the interface | MB of payload | MB of Ray itself |")
    print("| --- | --- | --- | --- | --- | --- |")
    ddp = next((row["ms"] for row in first if row["method"] == "ddp"), None)
    for row in first:
        ratio = "" if ddp is None else f"{ddp / row['ms']:.1f}"
        payload = "" if row["payload"] is None else f"{row['payload'] / 1e6:.3f}"
        print(
            f"| {row['method']} | {row['ms']:.0f} | {ratio} | {row['sent'] / 1e6:.3f} | {payload} | "
            f"{row['ray'] / 1e6:.3f} |"
        )


def processes_of(space: str) -> list[int]:
    """Return the processes in a namespace, which are all this program's."""
    found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def end(link: Link) -> None:
    """End all processes in the namespaces."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in (pid for space in link.spaces for pid in processes_of(space)):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        time.sleep(2.0)


def start_node(link: Link, rank: int, folder: str) -> subprocess.Popen:
    """Start a node of the cluster, which ends with its namespace."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1"]
    ray += ["--node-ip-address", ADDRESSES[rank], "--object-store-memory", str(80 << 20), "--disable-usage-stats"]
    if rank == 0:
        ray += ["--head", "--port", str(PORT), "--temp-dir", folder, "--include-dashboard", "false"]
    else:
        ray += ["--address", f"{ADDRESSES[0]}:{PORT}"]
    return start(link, rank, ray, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def start(link: Link, rank: int, program: list[str], **streams) -> subprocess.Popen:
    environment = site_environment(rank, ADDRESSES[0], PORT, link.interfaces[rank]) | SETTINGS
    environment = {name: value for name, value in environment.items() if name not in PLACE}
    return subprocess.Popen(["ip", "netns", "exec", link.spaces[rank], *program], env=environment, **streams)


def main() -> int:
    parser = parser_of(
        __doc__,
        rate="100mbit",
        methods=("ddp,rankdad,dad", "as benchmarks/attach.py names them"),
        steps=10,
        pause=(10.0, "seconds in which Ray's own traffic is measured"),
        drive=(False, argparse.SUPPRESS),
    )
    arguments = parser.parse_args()
    if arguments.drive:
        drive(arguments)
        return 0
    if not may_make_links():
        parser.error("network namespaces need Linux, root and iproute2")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go, too
    # Sockets of Ray are in this folder; their paths have at most 107 characters.
    folder = tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True)
    with folder as place, Link(arguments.rate) as link:
        try:
            wait_for_head(link, start_node(link, 0, place))
            start_node(link, 1, place)
            return start(link, 0, [sys.executable, *sys.argv, "--drive"]).wait()
        finally:
            end(link)


def wait_for_head(link: Link, head: subprocess.Popen) -> None:
    """Wait until the first node listens."""
    probe = f"import socket; socket.create_connection(('{ADDRESSES[0]}', {PORT}), 2).close()"
    deadline = time.monotonic() + START_SECONDS
    while start(link, 0, [sys.executable, "-c", probe], stderr=subprocess.DEVNULL).wait():
        if head.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the first node did not start: python -m ray.scripts.scripts start --head shows why")
        time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main())
