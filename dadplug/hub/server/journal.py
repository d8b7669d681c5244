"""Journal of the hub: which sites join, leave and are refused, with times and reasons."""

from __future__ import annotations

import json
import logging
import logging.handlers
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ...errors import escaped

_REFUSALS, _PERIOD = 10, 10.0  # lines at most in so many seconds
_KEPT = 50  # lines
LEVELS = ("info", "warning", "error")


class Journal:
    """Journal of the hub.

    Args:
        write_line: function that takes a line, without its end.
        as_json: whether a line is an object of JSON, with the keys time, level and event, in place of text.
        level: least level of the events that are written: "info", "warning" or "error".

    Attributes:
        recent: the last lines of any level, as text.

    Raises:
        ValueError: if there is no such level.
    """

    def __init__(self, write_line: Callable[[str], None], as_json: bool = False, level: str = "info") -> None:
        if level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
        self.recent: deque[str] = deque(maxlen=_KEPT)
        self._write_line, self._as_json, self._least = write_line, as_json, LEVELS.index(level)
        self._refusals = 0  # in this period
        self._period = 0.0  # its beginning

    def write(self, event: str, level: str = "info") -> None:
        """Write a line. Characters that cannot be printed, which a site may have sent, are escaped.

        Args:
            event: what has happened.
            level: its level.
        """
        now, event = time.gmtime(), escaped(event)
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S', now)} UTC  {event}"
        self.recent.append(line)
        if LEVELS.index(level) < self._least:
            return
        if self._as_json:
            line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", now), "level": level, "event": event})
        self._write_line(line)

    def fault(self, what: str, error: BaseException) -> None:
        """Write that something has failed by a fault of the hub, with the traceback.

        Args:
            what: what has failed.
            error: the error.
        """
        self.write(f"fault of the hub: {what}: {type(error).__name__}: {error}", "error")
        for part in traceback.format_exception(error):
            for line in part.rstrip().splitlines():
                self.write(f"    {line}", "error")

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
            self.write(f"refused {address}: {reason}", "warning")

    def end_period(self, now: float) -> None:
        """Write the number of refusals that have not been written, once their period is over.

        Args:
            now: the time, in seconds.
        """
        if self._refusals and now >= self._period + _PERIOD:
            if self._refusals > _REFUSALS:
                self.write(f"refused {self._refusals - _REFUSALS} more connections within {_PERIOD:g} s", "warning")
            self._refusals = 0


class JournalFile(logging.handlers.WatchedFileHandler):
    """File that lines are appended to. It may be moved away, as log rotation does: then a new one is begun.

    Where it cannot be written, as on a full disk, its lines are lost, and the hub goes on.

    Args:
        path: its path.
        complain: takes the reason if it cannot be written; called once until it can again.

    Raises:
        OSError: if it cannot be opened.
    """

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        super().__init__(path, encoding="utf-8")
        self._complain, self._failed = complain, False

    def handleError(self, record: logging.LogRecord) -> None:
        """Record that a line could not be written."""
        self._failed = True

    def write_line(self, line: str) -> None:
        """Append a line."""
        before, self._failed = self._failed, False
        try:
            self.emit(logging.LogRecord("dadplug", logging.INFO, "", 0, line, None, None))
        except OSError:  # it was moved, and a new one cannot be opened
            self._failed = True
        if self._failed and not before:
            self._complain(f"lines of the journal are lost, since {self.baseFilename} cannot be written")
