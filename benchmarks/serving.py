"""Requests a second and latencies of `dadplug.serve` and of LitServe, in alternating segments on one machine.

    python benchmarks/serving.py             # all parts; about four minutes
    python benchmarks/serving.py throughput  # one of throughput, slow, zipf
    python benchmarks/serving.py throughput --bentoml PYTHON  # with BentoML, an interpreter that has it and torch

The load generator runs on the same cores, so that only ratios mean something. Servers that are not measured are stopped
(SIGSTOP) meanwhile. `throughput` compares with LitServe, unbatched and with a grid of its fixed settings, and with
BentoML's adaptive batching if it is there; the caches are off. `slow` lets the model become four times slower under
load. `zipf` compares with and without a cache. See `serving_models.py` for selection among models and tables.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from command import parser_of
from serving_load import WIDTH, Load, load, request_of, requests_of
from torch import nn

from dadplug.processes import free_port

SLO = 0.05
GRID = [(size, wait) for size in (8, 16, 32) for wait in (0.002, 0.01)]
CLIENTS = (1, 8, 16, 32, 48)


class Served(nn.Module):
    """Network of some milliseconds, most of which a batch shares; four times slower while a file exists."""

    def __init__(self, slow: str = "") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU())
        self.last = nn.Linear(2048, 10)
        self.slow = slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        repeats = 4 if self.slow and Path(self.slow).exists() else 1
        for _ in range(repeats):
            result = self.last(self.layers(x))
        return result


# Servers, each a process that this program starts with `serve KIND PORT ...`


def serve_dadplug(port: int, folder: Path, cache: int) -> None:
    """Serve by dadplug."""
    import dadplug
    from dadplug.serving import Model

    model = Model(folder / "weights.pt", builder=f"{__file__}:Served", arguments={"slow": str(folder / "slow")})
    dadplug.serve({"m": model}, slo=SLO, cache_bytes=cache, input_shape=(WIDTH,), reload=False).run(port=port)


def serve_litserve(port: int, folder: Path, size: int, wait: float) -> None:
    """Serve by LitServe with a fixed setting."""
    import litserve

    api = LitApi(str(folder), max_batch_size=size, batch_timeout=wait)
    server = litserve.LitServer(api, accelerator="cpu", timeout=False)
    server.run(port=port, host="127.0.0.1", generate_client_file=False, log_level="error", access_log=False)


try:
    import litserve as _litserve

    _Base: Any = _litserve.LitAPI
except ImportError:
    _Base = object


class LitApi(_Base):
    """The same model for LitServe."""

    def __init__(self, folder: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.folder = folder

    def setup(self, device: Any) -> None:
        """Load the model."""
        torch.set_num_threads(1)
        self.model = Served(str(Path(self.folder) / "slow")).eval()
        self.model.load_state_dict(torch.load(Path(self.folder) / "weights.pt", weights_only=True))

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # LitServe takes annotations for its schema
        """Return the input as a tensor."""
        return torch.tensor(request["input"], dtype=torch.float32)

    def batch(self, inputs: Any) -> Any:
        """Stack inputs."""
        return torch.stack(inputs)

    def predict(self, x: Any) -> Any:
        """Return logits."""
        with torch.inference_mode():
            return self.model(x if x.dim() == 2 else x[None])

    def unbatch(self, output: Any) -> Any:
        """Split outputs."""
        return list(output)

    def encode_response(self, output):  # type: ignore[no-untyped-def]
        """Return the output as lists."""
        return {"output": output.reshape(-1).tolist()}


class Server:
    """A server's processes, stopped except in its segments."""

    def __init__(self, name: str, arguments: Sequence[Any]) -> None:
        self.name, self.port = name, free_port()
        kind, *rest = map(str, arguments)
        command = [sys.executable, __file__, "serve", kind, str(self.port), *rest]
        self._start(command)

    def _start(self, command: Sequence[str], **environment: str) -> None:
        quiet, settings = subprocess.DEVNULL, os.environ | {"OMP_NUM_THREADS": "1"} | environment
        self._process = psutil.Process(subprocess.Popen(command, stdout=quiet, stderr=quiet, env=settings).pid)

    def wrap(self, bodies: Sequence[bytes]) -> Sequence[bytes]:
        """Return requests in the form that it takes."""
        return bodies

    def tree(self) -> list[psutil.Process]:
        """Return its processes."""
        return [self._process, *self._process.children(recursive=True)]

    def signal(self, number: int) -> None:
        """Send a signal to its processes."""
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def wait(self, body: bytes) -> None:
        """Wait until it answers."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                if load(self.port, [body], 1, 0.05).answered:
                    return
            time.sleep(0.2)
        raise TimeoutError(f"{self.name} does not answer")

    @contextlib.contextmanager
    def running(self) -> Iterator[Server]:
        """Return a context in which it runs."""
        self.signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self.signal(signal.SIGSTOP)

    def processor_time(self) -> float:
        """Return the processor seconds that its processes have used."""
        return sum(sum(process.cpu_times()[:2]) for process in self.tree())

    def end(self) -> None:
        """Kill its processes."""
        for process in reversed(self.tree()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class BentoServer(Server):
    """BentoML's adaptive batching; a request is a batch of one."""

    def __init__(self, python: str, folder: Path) -> None:
        self.name, self.port = "bentoml, adaptive", free_port()
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--working-dir", str(Path(__file__).parent)]
        command = [python, "-m", "bentoml", "serve", "serving_bentoml:Adaptive", *place]
        self._start(command, SERVING_FOLDER=str(folder), BENTOML_DO_NOT_TRACK="True")

    def wrap(self, bodies: Sequence[bytes]) -> Sequence[bytes]:
        """Return requests whose inputs have one row."""
        inputs = (json.loads(body.split(b"\r\n\r\n", 1)[1])["input"] for body in bodies)
        return [request_of(np.array([each])) for each in inputs]


def bentoml_server(python: str | None, folder: Path) -> list[Server]:
    """Return BentoML's server, or none with a message where the interpreter has no BentoML."""
    if python is None:
        print("without BentoML: pass --bentoml PYTHON, an interpreter that has bentoml, torch and psutil")
        return []
    found = subprocess.run([python, "-c", "import bentoml, psutil, torch"], capture_output=True, text=True)
    if found.returncode:
        print(f"without BentoML: {python}: {found.stderr.strip().splitlines()[-1]}")
        return []
    return [BentoServer(python, folder)]


# Parts


def throughput(folder: Path, options: argparse.Namespace) -> None:
    """Print rates and latencies by number of clients, the best rate within the goal, and idle processor time."""
    bodies = requests_of(500)
    servers = [Server("dadplug", ("dadplug", folder, 0)), Server("litserve, unbatched", ("litserve", folder, 1, 0.0))]
    servers += [Server(f"litserve, {n}, {t} s", ("litserve", folder, n, t)) for n, t in GRID[: options.grid]]
    servers += bentoml_server(options.bentoml, folder)
    wrapped = {server.name: server.wrap(bodies) for server in servers}
    found: dict[tuple[str, int], list[Load]] = {}
    try:
        for server in servers:
            server.wait(wrapped[server.name][0])
            server.signal(signal.SIGSTOP)
        for _ in range(options.rounds):
            for clients in CLIENTS:
                for server in servers:
                    with server.running():
                        own = wrapped[server.name]
                        load(server.port, own, clients, options.seconds / 2)  # warm up
                        measured = load(server.port, own, clients, options.seconds)
                        found.setdefault((server.name, clients), []).append(measured)
        with servers[0].running() as server:
            before = server.processor_time()
            time.sleep(5.0)
            print(f"dadplug, idle: {(server.processor_time() - before) / 5:.1%} of a core")
    finally:
        for server in servers:
            server.end()
    report(found)


def report(found: dict[tuple[str, int], list[Load]]) -> None:
    """Print the segments of `throughput`, the best rates, and latencies of one client relative to no batches."""
    print(f"{'server':24}{'clients':>8}{'1/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'failed':>8}")
    best: dict[str, float] = {}
    alone: dict[str, float] = {}
    for (name, clients), loads in found.items():
        rate, p50, p99 = (
            float(np.median(each))
            for each in zip(*((x.rate, x.quantile(0.5), x.quantile(0.99)) for x in loads), strict=True)
        )
        print(f"{name:24}{clients:8}{rate:9.0f}{p50:9.2f}{p99:9.2f}{sum(x.failed for x in loads):8}")
        if clients == 1:
            alone[name] = p50
        if p99 <= 1000 * SLO:
            best[name] = max(best.get(name, 0.0), rate)
    print(f"\nbest rate with p99 <= {1000 * SLO:g} ms:")
    for name, rate in best.items():
        print(f"{name:24}{rate:9.0f}   dadplug has {best.get('dadplug', 0.0) / rate:.2f} times as many")
    print("\np50 of one client:")
    for name, p50 in alone.items():
        print(f"{name:24}{p50:9.2f} ms   dadplug takes {alone['dadplug'] / p50:.2f} times as long")


def slow(folder: Path, options: argparse.Namespace) -> None:
    """Print the share of requests above the goal before and after the model becomes four times slower."""
    bodies, server = requests_of(500), Server("dadplug", ("dadplug", folder, 0))
    try:
        server.wait(bodies[0])
        for label, seconds, change in (
            ("warm up", 3.0, False),
            ("before", 5.0, False),
            ("the first 5 s", 5.0, True),
            ("then", 8.0, False),
        ):
            if change:
                (folder / "slow").touch()
            measured = load(server.port, bodies, options.clients, seconds)
            above = sum(each > SLO for each in measured.latencies) + measured.failed
            share = above / max(1, measured.answered + measured.failed)
            print(
                f"{label:16}{measured.rate:8.0f}/s  p99 {measured.quantile(0.99):6.1f} ms  above the goal {share:.2%}"
            )
    finally:
        (folder / "slow").unlink(missing_ok=True)
        server.end()


def zipf(folder: Path, options: argparse.Namespace) -> None:
    """Print the rates with a cache of a tenth of the keys and without a cache, and the share of hits."""
    keys, rng = 2000, np.random.default_rng(1)
    every = requests_of(keys)
    drawn = rng.zipf(1.1, 200_000) - 1
    bodies = [every[each] for each in drawn[drawn < keys]]
    entry = 400 + 40 + 360  # bytes of an output of 10 numbers in the cache, with its text and request if it was hit
    servers = [Server(name, ("dadplug", folder, size)) for name, size in (("cache", keys // 10 * entry), ("none", 0))]
    rates: dict[str, list[float]] = {}
    try:
        for server in servers:
            server.wait(bodies[0])
            server.signal(signal.SIGSTOP)
        for _ in range(options.rounds + 1):
            for server in servers:
                with server.running():
                    measured = load(server.port, bodies, options.clients, options.seconds)
                    rates.setdefault(server.name, []).append(measured.rate)
        with servers[0].running() as server, urllib.request.urlopen(f"http://127.0.0.1:{server.port}/status.json") as x:
            counts = json.load(x)["cache"]
    finally:
        for server in servers:
            server.end()
    cache, none = (float(np.median(each[1:])) for each in rates.values())
    print(f"Zipf requests: {cache:.0f}/s with a cache of a tenth of the keys, {none:.0f}/s without: {cache / none:.2f}")
    answered = counts["hits"] + counts["joined"]
    share, best = answered / (answered + counts["misses"]), float((drawn[drawn < keys] < keys // 10).mean())
    print(f"answered without a call of the model: {share:.1%}, of {best:.1%} if the most frequent tenth was known")
    print(f"entries at the end: {counts['entries']}, for {keys} keys")


PARTS = {"throughput": throughput, "slow": slow, "zipf": zipf}


def main() -> None:
    """Measure, or serve for a measurement."""
    if sys.argv[1:2] == ["serve"]:
        kind, port, folder, *rest = sys.argv[2:]
        if kind == "dadplug":
            serve_dadplug(int(port), Path(folder), int(rest[0]))
        else:
            serve_litserve(int(port), Path(folder), int(rest[0]), float(rest[1]))
        return
    parser = parser_of(
        __doc__.splitlines()[0],
        seconds=(1.5, "of a segment (default: %(default)g)"),
        rounds=(2, "segments of each kind (default: %(default)d)"),
        grid={"type": int, "default": len(GRID), "help": "settings of LitServe (default: all)"},
        bentoml={"metavar": "PYTHON", "help": "interpreter with bentoml, torch and psutil"},
        clients=(16, "clients of slow and zipf (default: %(default)d)"),
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        torch.save(Served().state_dict(), folder / "weights.pt")
        for part in options.parts or PARTS:
            PARTS[part](folder, options)


if __name__ == "__main__":
    main()
