"""Counts what a site hands to the transport, and how long it waits for the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Traffic:
    """The meter of one site's traffic.

    Attributes:
        bytes_sent: payload bytes that this site handed to the transport in the last step, to all other sites together.
        total_bytes_sent: the same since the start, set-up included.
        dense_bytes: what one step would have sent had every gradient been all-reduced, in bytes.
        wait_seconds: time in the last step that this site spent waiting for others, in seconds.
        steps: number of steps counted.
        bytes_in_steps: the sum of `bytes_sent` over all steps.
        wait_in_steps: the sum of `wait_seconds` over all steps.
    """

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.total_bytes_sent = 0
        self.dense_bytes = 0
        self.wait_seconds = 0.0
        self.steps = 0
        self.bytes_in_steps = 0
        self.wait_in_steps = 0.0
        self._bytes = 0
        self._wait = 0.0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than all-reducing every gradient the last step sent; 1.0 before any were."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    def add(self, nbytes: int) -> None:
        """Counts bytes handed to the transport."""
        self._bytes += nbytes
        self.total_bytes_sent += nbytes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as time spent waiting for other sites."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._wait += time.perf_counter() - start

    def end_step(self) -> None:
        """Closes a step: what was counted since the last close is the last step's."""
        self.bytes_sent, self._bytes = self._bytes, 0
        self.wait_seconds, self._wait = self._wait, 0.0
        self.steps += 1
        self.bytes_in_steps += self.bytes_sent
        self.wait_in_steps += self.wait_seconds

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keeps what is counted inside out of the steps."""
        before = self._bytes, self._wait
        try:
            yield
        finally:
            self._bytes, self._wait = before

    def start(self) -> None:
        """Leaves what the set-up sent out of the first step's count."""
        self._bytes, self._wait = 0, 0.0

    def __repr__(self) -> str:
        return (
            f"Traffic({self.bytes_sent:,} bytes in the last step, {self.ratio:.1f} times fewer than dense; "
            f"{self.total_bytes_sent:,} bytes in all)"
        )
