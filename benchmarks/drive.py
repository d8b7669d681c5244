"""Shared parts of the benchmarks over rates and methods: starting two sites, results in lines, names, colours."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import torch
import torch.distributed as dist
from attach import PEERS
from link import KEEP_MEMORY

from dadplug.processes import free_port

HERE = Path(__file__).resolve().parent
TITLES = {
    "alone": "one process alone",
    "alone:library=onednn": "one process alone, oneDNN",
    "ddp": "DDP",
    "ddp:library=onednn": "DDP, oneDNN",
    "ddp-fp16": "DDP, fp16 hook",
    "ddp-bf16": "DDP, bf16 hook",
    "ddp-powersgd": "DDP, PowerSGD hook",
    "mnistnet": "MNISTNet",
    "vit": "ViT",
    "gpt": "small GPT",
    "resnet": "ResNet-18's shape",
    "lstm": "LSTM",
    "bert": "BERT-base",
    "vit-base": "ViT-Base",
    "gpt2": "GPT-2 small",
    "none": "unshaped",
}


def title(name: str) -> str:
    """Return the label of a model, method or rate in tables and pictures."""
    if rate := re.fullmatch(r"([\d.]+)([kmg])bit", name):
        return f"{rate[1]} {rate[2].replace('m', 'M').replace('g', 'G')}bit/s"
    short = name.replace("wire=", "").replace("library=onednn", "oneDNN")
    return TITLES.get(name) or re.sub("[:+]", ", ", short).replace("=", " ")


def processor() -> str:
    """Name the processor, and the vector instructions that torch uses on it (an imitated processor has fewer)."""
    cpus = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpus.read_text()) if cpus.exists() else []
    return f"{names[0] if names else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"


def processors(rows: list[dict]) -> list[str]:
    """Return a line that names the processors on which rows were measured; none for rows that do not say."""
    found = dict.fromkeys(row["processor"] for row in rows if "processor" in row)
    return [f"Processor: {'; '.join(found)}."] if found else []


def check_rates(parser: argparse.ArgumentParser, rates: str, loopback: bool) -> None:
    """End the program where a rate is none, or cannot be had."""
    for rate in rates.split(","):
        if rate != "none" and not re.fullmatch(r"[\d.]+[kmg]bit", rate):
            parser.error(f"a rate reads like 100mbit, or none, got {rate!r}")
    if loopback and rates != "none":
        parser.error("rates need Linux, root and iproute2; without them only --rates none runs, on loopback")


def read(file: Path) -> list[dict]:
    """Read results, a line each."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def append(file: Path | str, row: dict) -> None:
    """Append a result to a file."""
    with Path(file).open("a") as results:
        results.write(json.dumps(row) + "\n")


PIECES = {
    "keep": (False, "measure only what OUT.json does not have"),
    "stop_after": {
        "type": float,
        "metavar": "SECONDS",
        "help": "begin no further run then, and exit with 2; the same command with --keep goes on",
    },
    "deadline": (math.inf, argparse.SUPPRESS),
}
"""Options by which a long measurement is made in several calls of one command."""


def begin(results: Path, keep: bool) -> None:
    """Make the file of results empty; with `keep` take only the errors out."""
    results.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in read(results) if "error" not in row] if keep else []
    results.write_text("".join(f"{line}\n" for line in lines))


def may_begin(deadline: float) -> bool:
    """Return at both sites whether site 0 may begin a run."""
    before = torch.tensor([time.time() < deadline])
    dist.broadcast(before, 0)
    return bool(before)


def run_sites(
    program: list[str], loopback: bool, results: Path, limit: float, round_trip: float = 0.0, sites: int = 2
) -> str:
    """Run a program of this folder on two sites, joined by benchmarks/link.py, or on some sites on loopback.

    Args:
        program: the program and its arguments.
        loopback: whether they meet on loopback.
        results: file that grows as the program gets on.
        limit: seconds in which it must have grown; else the program is ended.
        round_trip: milliseconds of the link's round trip; 0 for that of the kernel.
        sites: number of sites; two unless they meet on loopback.

    Returns:
        Why the program has failed; an empty string if it has not.
    """
    link = ["--round-trip", str(round_trip), "none"]
    command = [sys.executable, str(HERE / "link.py"), *link, sys.executable]
    if loopback:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(sites)]
        command = [sys.executable, *launch, "--master-port", str(free_port())]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [*command, str(HERE / program[0]), *program[1:]], env=KEEP_MEMORY | os.environ, stderr=said
        )
        try:
            hung = not _wait(process, results, limit)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()
        said.seek(0)
        lines = [line.strip() for line in said.read().splitlines() if line.strip()]
    if hung:
        return f"no result within {limit:g} s"
    if not process.returncode:
        return ""
    errors = [line for line in lines if re.match(r"(\[rank\d\]: ?)?[\w.]*(Error|Exception)\b|what\(\)", line)]
    reason = re.sub(r"^\[rank\d\]: ?", "", (errors or lines or ["ended without a word"])[-1])
    return textwrap.shorten(reason, 300, placeholder=" …")


def _wait(process: subprocess.Popen, results: Path, limit: float) -> bool:
    """Wait for a process; False if it has had no further result for too long."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        now = results.stat().st_size if results.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > limit:
            return False
        time.sleep(0.2)
    return True


def colours_of(methods: list[str]) -> dict[str, object]:
    """Greys for the peers and dsgd, which sends what they send; colours for the rest."""
    from matplotlib import colormaps

    peers = [name for name in methods if name in (*PEERS, "dsgd")]
    others = [name for name in methods if name not in peers]
    greys = {name: str(0.2 + 0.6 * place / max(1, len(peers) - 1)) for place, name in enumerate(peers)}
    coloured = (0, 1, 2, 3, 4, 5, 6, 8, 9)  # of ten, but for the grey
    return greys | {name: colormaps["tab10"](coloured[place % 9]) for place, name in enumerate(others)}
