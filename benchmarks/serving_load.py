"""Load of `serving.py`: requests over HTTP by clients that wait for their answers, and their latencies."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

WIDTH = 64


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Load(NamedTuple):
    """Result of a segment: seconds, and the latencies of requests with status 200 and of others."""

    seconds: float
    latencies: list[float]
    failed: int

    @property
    def answered(self) -> int:
        """Number of answers with status 200."""
        return len(self.latencies)

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.answered / self.seconds

    def quantile(self, share: float) -> float:
        """Return a quantile of the latencies in milliseconds."""
        return 1000 * float(np.quantile(self.latencies, share)) if self.latencies else float("nan")


async def load(port: int, bodies: Sequence[bytes], clients: int, seconds: float) -> Load:
    """Send requests by some clients, each of which waits for its answer before the next."""
    latencies: list[float] = []
    failed = 0
    end = time.perf_counter() + seconds
    order = iter(range(10**9))

    async def client() -> None:
        nonlocal failed
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end:
            body = bodies[next(order) % len(bodies)]
            started = time.perf_counter()
            writer.write(body)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(length)
            if b" 200 " in head[:20]:
                latencies.append(time.perf_counter() - started)
            else:
                failed += 1
        writer.close()

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Load(time.perf_counter() - begun, latencies, failed)


def request_of(x: np.ndarray[Any, Any]) -> bytes:
    """Return a whole HTTP request with an input as JSON."""
    body = json.dumps({"input": np.round(x.astype(float), 4).tolist()}).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def requests_of(count: int) -> list[bytes]:
    """Return requests with different inputs."""
    rng = np.random.default_rng(0)
    return [request_of(rng.standard_normal(WIDTH)) for _ in range(count)]
