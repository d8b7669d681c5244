"""Progress of the tuner: a bar in a terminal, a line for each task elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 24  # characters
_INTERVAL = 0.1  # seconds between two drawings
_CLEAR = "\r\033[K"


class Progress:
    """Progress of the tuner.

    Args:
        seconds: time that all tasks may take.
        clock: returns the time in seconds.
        stream: where to print; standard error if None.
        shown: whether to print at all.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        stream: TextIO | None = None,
        shown: bool = True,
    ) -> None:
        self._seconds, self._clock, self._shown = seconds, clock, shown
        self._stream = sys.stderr if stream is None else stream
        self._has_bar = shown and self._stream.isatty()
        self._start = clock()
        self._drawn = -_INTERVAL

    def show(self, text: str) -> None:
        """Draw the bar with a text behind it."""
        now = self._clock() - self._start
        if not self._has_bar or now - self._drawn < _INTERVAL:
            return
        self._drawn = now
        share = min(1.0, now / self._seconds)
        full = round(_WIDTH * share)
        line = f"[{'#' * full}{'-' * (_WIDTH - full)}] {share:4.0%}  {text}"
        self._write(_CLEAR + line[: shutil.get_terminal_size().columns - 1])

    def report(self, text: str) -> None:
        """Print a line that stays."""
        if self._shown:
            self._write(f"{_CLEAR if self._has_bar else ''}{text}\n")

    def close(self) -> None:
        """Remove the bar."""
        if self._has_bar:
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
