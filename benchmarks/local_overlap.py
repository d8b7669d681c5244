"""Utilisation of the processor by local steps whose deltas travel over a slow link, and the time that coding takes.

    sudo python benchmarks/link.py --round-trip 40 50mbit python benchmarks/local_overlap.py
    python benchmarks/local_overlap.py --code-only          the codec alone, without sites

A transformer of 30.8 million parameters, Adam, one thread. First the same steps are taken at both sites without any
exchange, then by LocalSGD. Utilisation is the seconds of the first, divided by those of the second, whose rounds
include selection, coding, agreements and waiting. The bytes of a round are those of the interface's counter.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from attach import parse
from command import parser_of
from workloads import SmallGPT, loss

import dadplug
from dadplug.local_steps.sparse_codec import SparseCode

OURS = "localsgd:every=32+density=0.02+wire=int2+delay=8"
WIDTH, DEPTH, VOCABULARY = 512, 6, 11600
DENSITIES = (0.02, 1 / 64)
REPEATS = 5
SETTLED = 2.0  # seconds in which a round has arrived


def model_and_batch(length: int, rows: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return the transformer and words to predict."""
    torch.manual_seed(0)
    model = SmallGPT(width=WIDTH, depth=DEPTH, vocabulary=VOCABULARY, length=length)
    return model, torch.randint(0, VOCABULARY, (rows, length + 1))


def take(model: torch.nn.Module, words: torch.Tensor, steps: int, optimizer: torch.optim.Optimizer, step) -> float:
    """Take steps; return the seconds."""
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(words[:, :-1]), words[:, 1:]).backward()
        step()
    return time.perf_counter() - start


def sent_by_interface() -> int:
    """Return the bytes that this site's interface has sent; 0 where the sites are on one machine's loopback."""
    counter = Path(f"/sys/class/net/{os.environ.get('GLOO_SOCKET_IFNAME', '')}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


def time_code(numel: int) -> None:
    """Print the time of the codec, beside that of two passes of torch over the same memory."""
    delta, memory = torch.randn(numel), torch.zeros(numel)
    for density in DENSITIES:
        code, total = SparseCode(numel, density), torch.zeros(numel)
        out, times = torch.empty(code.nbytes, dtype=torch.uint8), []
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            code.encode(delta, memory, 0.95, out)
            encoded = time.perf_counter()
            code.decode(out, total, 0.5)
            decoded = time.perf_counter()
            total.mul_(0.95).add_(delta)
            times.append((encoded - start, decoded - encoded, time.perf_counter() - decoded))
        encode, decode, passes = (1e3 * statistics.median(each) for each in zip(*times[1:], strict=True))
        print(
            f"density {density:.4g}: {4 * numel / code.nbytes:.1f} times less than fp32; ms to encode {encode:.1f}, "
            f"to decode {decode:.1f} a site, torch's mul_ and add_ {passes:.1f}"
        )


def main() -> None:
    parser = parser_of(
        __doc__,
        method=OURS,
        rounds=2,
        rows=1,
        length=64,
        code_only=False,
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, words = model_and_batch(arguments.length, arguments.rows)
    numel = sum(parameter.numel() for parameter in model.parameters())
    if arguments.code_only:
        print(f"{numel / 1e6:.1f} million parameters")
        time_code(numel)
        return
    dadplug.connect()
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    _, options = parse(arguments.method)
    steps = options["every"] * arguments.rounds
    take(model, words, 3, optimizer, optimizer.step)
    local = dadplug.LocalSGD(model, optimizer, **options)
    take(model, words, options["every"], optimizer, local.step)  # compiles kernels, and brings overlap into its stride
    bare, shared = [], []
    sent = 0
    for _ in range(2):  # in turns
        with local.stepping():  # so that the bare steps are not refused; it counts as one step of this round
            dist.barrier()
            bare.append(take(model, words, steps, optimizer, optimizer.step))
        take(model, words, options["every"] - 1, optimizer, local.step)
        dist.barrier()
        time.sleep(SETTLED)
        before, waited = sent_by_interface(), local.traffic.wait_in_steps
        shared.append(take(model, words, steps, optimizer, local.step))
        waited = local.traffic.wait_in_steps - waited
        dist.barrier()
        time.sleep(SETTLED)
        sent = sent_by_interface() - before
    if dist.get_rank() == 0:
        print(f"{numel / 1e6:.1f} million parameters, {arguments.method}")
        print(f"ms a step: {1e3 * min(bare) / steps:.1f} alone, {1e3 * min(shared) / steps:.1f} with rounds")
        print(f"utilisation: {min(bare) / min(shared):.3f}; waiting for the other site {waited / shared[-1]:.3f}")
        print(f"a round by the interface's counter: {sent / arguments.rounds / 1e6:.3f} MB", end="")
        print(f", {4 * numel * arguments.rounds / sent:.0f} times less than the parameters in fp32" if sent else "")
        time_code(numel)
    local.detach()


if __name__ == "__main__":
    main()
