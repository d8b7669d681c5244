"""Journal of the hub: who joins, leaves and is refused, with times and reasons."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable

from ...logs import escaped

_REFUSALS, _PERIOD = 10, 10.0  # lines at most in so many seconds
_KEPT = 50  # lines


class Journal:
    """Journal of the hub.

    Args:
        write_line: function that takes a line, without its end.

    Attributes:
        recent: the last lines.
    """

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self.recent: deque[str] = deque(maxlen=_KEPT)
        self._write_line = write_line
        self._refusals = 0  # in this period
        self._period = 0.0  # its beginning

    def write(self, event: str) -> None:
        """Write a line. Characters that cannot be printed, which a site may have sent, are escaped.

        Args:
            event: what has happened.
        """
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC  {escaped(event)}"
        self.recent.append(line)
        self._write_line(line)

    def fault(self, what: str, error: BaseException) -> None:
        """Write that something has failed by a fault of the hub, with the traceback.

        Args:
            what: what has failed.
            error: the error.
        """
        self.write(f"fault of the hub: {what}: {type(error).__name__}: {error}")
        for part in traceback.format_exception(error):
            for line in part.rstrip().splitlines():
                self.write(f"    {line}")

    def refuse(self, address: str, reason: str, now: float) -> None:
        """Write that a connection was refused; after some of them, only their number.

        Args:
            address: address of the other end.
            reason: the reason.
            now: the time, in seconds.
        """
        self.end_period(now)
        if not self._refusals:
            self._period = now
        self._refusals += 1
        if self._refusals <= _REFUSALS:
            self.write(f"refused {address}: {reason}")

    def end_period(self, now: float) -> None:
        """Write the number of refusals that have not been written, once their period is over.

        Args:
            now: the time, in seconds.
        """
        if self._refusals and now >= self._period + _PERIOD:
            if self._refusals > _REFUSALS:
                self.write(f"refused {self._refusals - _REFUSALS} more connections within {_PERIOD:g} s")
            self._refusals = 0
