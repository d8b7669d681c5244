"""Peak memory of training by method, against DDP's, at two sites: processes of their own for each model and method.

    python benchmarks/memory.py                                         all five models, some ten minutes
    python benchmarks/memory.py --models mnistnet --methods ddp,dad
    python benchmarks/memory.py --models mnistnet --optimizer adam --methods alone,dad:fused=true,rankdad:fused=true

Resident memory beyond that of a process that has trained the same before and has thrown it away: libraries, compiled
kernels and caches do not count; parameters, gradients, activations, payloads and a method's state do. Peaks are the
kernel's (VmHWM, reset by /proc/self/clear_refs; Linux), of the first three steps, in which methods learn, and of the
steps after that. One thread, SGD without momentum or Adam. All methods run with the same settings of malloc, by which
what is freed goes back to the system at once.

What is promised: no more than DDP's peak and the payloads of all sites, and with fused steps less than the peak of
training alone by plain PyTorch, where that has been measured before them. Exits with an error where that does not hold;
DDP's is compared with a tolerance. A method with error feedback keeps as many numbers as the model has, by its nature;
where it needs them beyond that, the table says so.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from attach import Attached
from command import connect_site, parser_of, run_at_sites
from workloads import WORKLOADS, loss

from dadplug.exchange import gather_objects
from dadplug.lowrank.dispatch import scratch

METHODS = "alone,ddp,ddp-powersgd,dsgd,dad,auto,rankdad,rankdad:wire=bf16,rankdad:wire=int8,powersgd,topk"
MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}
FIRST_STEPS, STEPS = 3, 8


def resident(what: str) -> float:
    """A line of /proc/self/status, such as VmRSS, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) / 1e3


def reset_peak() -> None:
    """Reset VmHWM, the peak of resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def settle() -> None:
    """Return free memory to the system."""
    gc.collect()
    scratch.clear()
    ctypes.CDLL(None).malloc_trim(0)


def train(arguments: argparse.Namespace, steps: int) -> tuple[float, float, int]:
    """Train from nothing; return the peaks of the first steps and of the others, in MB, and payload bytes a step."""
    workload = WORKLOADS[arguments.model]
    torch.manual_seed(0)
    model = workload.build()
    attached = Attached(model, arguments.method, arguments.rank)
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[arguments.optimizer](model.parameters(), lr=1e-3)
    first = 0.0
    reset_peak()
    for step in range(steps):
        if step == FIRST_STEPS:
            first = resident("VmHWM")
            reset_peak()
        inputs, targets = workload.draw(workload.batch_size, torch.Generator().manual_seed(step))
        loss(attached.model(inputs), targets).backward()
        attached.step(optimizer)
        optimizer.zero_grad()
    payload = attached.reduction.traffic.bytes_sent if attached.reduction is not None else 0
    attached.detach()
    return first, resident("VmHWM"), payload


def run_site(arguments: argparse.Namespace) -> None:
    connect_site()
    train(arguments, FIRST_STEPS + 1)
    settle()
    before = resident("VmRSS")
    first, later, payload = train(arguments, STEPS)
    every = gather_objects((first - before, later - before, payload))
    if dist.get_rank() == 0:
        firsts, laters, payloads = zip(*every, strict=True)
        row = {"first": max(firsts), "later": max(laters), "payloads": sum(payloads) / 1e6}
        Path(arguments.result).write_text(json.dumps(row))


def measure(model: str, method: str, arguments: argparse.Namespace) -> dict:
    """Measure a method in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result, errors = Path(folder) / "result.json", Path(folder) / "errors"
        command = [sys.executable, __file__, "--model", model, "--method", method]
        command += ["--rank", str(arguments.rank), "--optimizer", arguments.optimizer, "--result", str(result)]
        with errors.open("w") as stream:
            subprocess.run(command, env=os.environ | MALLOC, stderr=stream, check=False)
        if not result.exists():
            return {"error": (errors.read_text().strip().splitlines() or ["ended without a word"])[-1]}
        return json.loads(result.read_text())


def state(model: str, method: str) -> float:
    """Return the MB that a method keeps beside payloads: an error for each number that it may not have sent."""
    keeps = method.startswith(("powersgd", "topk")) or "error_feedback=true" in method or "int8" in method
    parameters = WORKLOADS[model].build().parameters()
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters) / 1e6 if keeps else 0.0


def compare(arguments: argparse.Namespace) -> int:
    """Measure all, and print a table."""
    print("| model | method | peak MB, first steps | later | beyond alone | beyond DDP | payloads | state | within |")
    print("| --- " * 9 + "|", flush=True)
    failed = 0
    for model in arguments.models.split(","):
        ddp: dict | None = None
        alone: dict | None = None
        for method in arguments.methods.split(","):
            row = measure(model, method, arguments)
            if "error" in row:
                print(f"| {model} | {method} | failed: {row['error']} |" + " |" * 6, flush=True)
                failed += 1
                continue
            kept = state(model, method)
            ddp = row if method == "ddp" else ddp
            alone = row if method == "alone" else alone
            beyond, beyond_alone = _beyond(row, ddp), _beyond(row, alone)
            within = verdict(method, row["payloads"] + arguments.tolerance, kept, beyond, beyond_alone)
            failed += within == "NO"
            print(
                f"| {model} | {method} | {row['first']:.1f} | {row['later']:.1f} | {beyond_alone:+.1f} | "
                f"{beyond:+.1f} | {row['payloads']:.2f} | {kept:.1f} | {within} |",
                flush=True,
            )
    return int(failed > 0)


def verdict(method: str, allowed: float, kept: float, beyond: float, beyond_alone: float) -> str:
    """Return whether a method needs no more memory than promised; empty where nothing is, or without a comparison.

    Args:
        method: the method.
        allowed: MB by which its peaks may be above DDP's.
        kept: MB that it keeps beside payloads.
        beyond: MB by which its peaks are above DDP's; NaN where DDP's have not been measured.
        beyond_alone: the same for training alone.
    """
    if method == "alone" or method.startswith("ddp"):
        return ""
    fused = "fused=true" in method
    if fused and beyond_alone >= 0:
        return "NO"
    if math.isnan(beyond):
        return "yes" if fused and beyond_alone < 0 else ""
    if beyond <= allowed:
        return "yes"
    return "with its state" if beyond <= allowed + kept else "NO"


def _beyond(row: dict, other: dict | None) -> float:
    """Return the MB by which a method's peaks are above those of another one; NaN where that has not been measured."""
    return max(row[when] - other[when] for when in ("first", "later")) if other else float("nan")


def main() -> int:
    parser = parser_of(
        __doc__,
        models=",".join(WORKLOADS),
        methods=(METHODS, "as benchmarks/attach.py names them; alone and ddp first"),
        rank=4,
        optimizer={"choices": ("sgd", "adam"), "default": "sgd"},
        tolerance=(1.0, "MB by which two runs of the same may differ"),
        model=(None, argparse.SUPPRESS),
        method=(None, argparse.SUPPRESS),
        result=(None, argparse.SUPPRESS),
    )
    arguments = parser.parse_args()
    if arguments.model is None:
        return compare(arguments)
    return run_at_sites(run_site, arguments)


if __name__ == "__main__":
    sys.exit(main())
