"""Calls with a timeout, which a check may abandon."""

from __future__ import annotations

import threading

import pytest

from dadplug.exchange import deadline


def test_a_call_returns_its_result_or_raises_its_error():
    assert deadline.within(60.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        deadline.within(60.0, lambda: 1 // 0)


def test_a_call_that_takes_too_long_or_whose_check_fails_is_abandoned(monkeypatch):
    monkeypatch.setattr(deadline, "_CHECK_SECONDS", 0.01)
    never = threading.Event()
    with pytest.raises(TimeoutError):
        deadline.within(0.05, never.wait)
    checks = iter(range(3))

    def check() -> None:
        if next(checks) == 2:
            raise ConnectionError("it has ended")

    with pytest.raises(ConnectionError, match="it has ended"):
        deadline.within(60.0, never.wait, check)
    never.set()
