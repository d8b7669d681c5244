"""Load of `serving.py`: requests over HTTP by clients that wait for their answers, and their latencies."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

WIDTH = 64


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


class _Client:
    """One client: a connection, the request that is under way, and the answer so far."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.started, self.answer = 0.0, b""

    def send(self, body: bytes) -> None:
        """Send a request."""
        self.answer = b""
        self.started = time.perf_counter()
        self.socket.sendall(body)

    def complete(self) -> bool:
        """Receive what is there; return whether the answer is complete."""
        part = self.socket.recv(1 << 16)
        if not part:
            raise ConnectionResetError("the server has closed the connection")
        self.answer = answer = self.answer + part
        end = answer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = answer[:end].lower()
        begin = head.find(b"content-length:") + len(b"content-length:")
        return len(answer) >= end + 4 + int(head[begin:].split(b"\r", 1)[0])


def load(port: int, bodies: Sequence[bytes], clients: int, seconds: float) -> Load:
    """Send requests by some clients, each of which waits for its answer before the next.

    Requests are prepared and sockets are polled by hand: on cores that the server shares, what the generator costs
    would count for all servers alike, and hide their differences.

    Raises:
        OSError: if the server cannot be reached, or closes a connection.
    """
    latencies: list[float] = []
    failed = 0
    order, clock = iter(range(10**9)), time.perf_counter
    with select.epoll() as poll, contextlib.ExitStack() as stack:
        waiting: dict[int, _Client] = {}
        for each in [_Client(port) for _ in range(clients)]:
            stack.enter_context(each.socket)
            waiting[each.socket.fileno()] = each
        begun = clock()
        end = begun + seconds
        for number, each in waiting.items():
            poll.register(number, select.EPOLLIN)
            each.send(bodies[next(order) % len(bodies)])
        while waiting:
            ready = poll.poll(60.0)
            if not ready:
                raise TimeoutError("no answer in a minute")
            for number, _ in ready:
                each = waiting[number]
                if not each.complete():
                    continue
                now = clock()
                if each.answer[9:12] == b"200":
                    latencies.append(now - each.started)
                else:
                    failed += 1
                if now < end:
                    each.send(bodies[next(order) % len(bodies)])
                else:
                    poll.unregister(number)
                    del waiting[number]
    return Load(clock() - begun, latencies, failed)


def request_of(x: np.ndarray[Any, Any]) -> bytes:
    """Return a whole HTTP request with an input as JSON."""
    body = json.dumps({"input": np.round(x.astype(float), 4).tolist()}).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def requests_of(count: int) -> list[bytes]:
    """Return requests with different inputs."""
    rng = np.random.default_rng(0)
    return [request_of(rng.standard_normal(WIDTH)) for _ in range(count)]
