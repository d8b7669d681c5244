"""Reading of whole messages in one time."""

from __future__ import annotations

import contextlib

import pytest

from dadplug.hub import blocking


class Trickle:
    """Connection of which a byte arrives at each second of a clock of its own."""

    def __init__(self, timeout: float | None) -> None:
        self.now, self.timeout = 0.0, timeout
        self.monotonic = lambda: self.now

    def recv(self, size: int) -> bytes:
        if self.timeout is not None and self.timeout < 1.0:
            raise TimeoutError("timed out")
        self.now += 1.0
        return b"x"

    def gettimeout(self) -> float | None:
        return self.timeout

    def settimeout(self, seconds: float | None) -> None:
        self.timeout = seconds


@pytest.mark.parametrize("timeout", [5.0, 5.5, None])
def test_the_timeout_is_for_the_whole_message(timeout, monkeypatch):
    connected = Trickle(timeout)
    monkeypatch.setattr(blocking, "time", connected)
    assert blocking.read_exactly(connected, 5) == b"xxxxx"
    assert connected.timeout == timeout
    with contextlib.nullcontext() if timeout is None else pytest.raises(TimeoutError):
        blocking.read_exactly(connected, 6)
    assert connected.timeout == timeout
    assert connected.now == (11.0 if timeout is None else 10.0)
