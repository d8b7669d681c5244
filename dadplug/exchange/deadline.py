"""Deadlines, and timeouts for calls that have none: torch's store waits forever for a server that is stopped."""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ..signature import number

_AT_EXIT = 1.0  # seconds
_CHECK_SECONDS = 2.0  # between two checks of a call that takes long

Result = TypeVar("Result")
_given_up: list[threading.Thread] = []


class Deadline:
    """End of a wait.

    Args:
        seconds: time from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._end


check_seconds = number("a positive number of seconds", lambda seconds: 0 < seconds < math.inf)
"""Raises ValueError, for the name of an option and its value, if the value is no number of seconds to wait."""

check_hub_timeout = number(
    "a positive number of seconds or None", lambda seconds: 0 < seconds < math.inf, optional=True
)
"""The same where None is valid, too."""


def within(seconds: float, call: Callable[[], Result], check: Callable[[], None] = lambda: None) -> Result:
    """Run a call in a thread of its own, and abandon it after the timeout; the thread may continue.

    Args:
        seconds: the timeout.
        call: the call.
        check: called now and then meanwhile; the call is abandoned if it raises an exception.

    Raises:
        TimeoutError: if it has not ended in time.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="dadplug-deadline", daemon=True)
    thread.start()
    deadline = Deadline(seconds)
    thread.join(min(deadline.left, _CHECK_SECONDS))
    while thread.is_alive() and not deadline.over:
        try:
            check()
        except BaseException:
            _given_up.append(thread)
            raise
        thread.join(min(deadline.left, _CHECK_SECONDS))
    if errors:
        raise errors[0]
    if not results:
        _given_up.append(thread)
        raise TimeoutError("timed out")
    return results[0]


@atexit.register
def _wait_at_exit() -> None:
    """Wait briefly for abandoned threads: one that returns from torch while the interpreter ends aborts it."""
    deadline = Deadline(_AT_EXIT)
    for thread in _given_up:
        thread.join(deadline.left)
