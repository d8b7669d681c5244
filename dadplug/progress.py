"""Progress of a long measurement on standard error: a bar that moves by the time, and lines that stay."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_INTERVAL = 0.25  # seconds between two drawings
_WIDTH = 24  # characters
_CLEAR = "\r\033[K"


class Progress:
    """Progress of a measurement whose time is known.

    In a terminal the last line is a bar below the lines so far. Elsewhere, as in a file, there are only the lines.
    tqdm counts steps, and is not installed with dadplug; this bar follows a clock.

    Args:
        seconds: time that all takes.
        clock: returns the time in seconds.
        stream: where to print; standard error if None.
        shown: whether to print at all.
    """

    def __init__(
        self,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        stream: TextIO | None = None,
        shown: bool = True,
    ) -> None:
        self._seconds, self._clock, self._shown = seconds, clock, shown
        self._stream = sys.stderr if stream is None else stream
        self._has_bar = shown and self._stream.isatty()
        self._start = clock()
        self._drawn = -_INTERVAL

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._start

    def show(self, text: str) -> None:
        """Draw the bar for the time since the beginning, with a text behind it."""
        now = self.elapsed
        if now - self._drawn >= _INTERVAL:
            self._drawn = now
            self._draw(now, text)

    @contextmanager
    def span(self, begin: float, seconds: float, text: str) -> Iterator[None]:
        """Move the bar while the block runs, whatever time passed between blocks; a context manager.

        Args:
            begin: place of the bar at the beginning, in seconds.
            seconds: time that the block takes, up to which the bar moves.
            text: text behind the bar.
        """
        if not self._has_bar:
            yield
            return
        over = threading.Event()
        start = self._clock()

        def draw() -> None:
            while True:
                self._draw(begin + min(self._clock() - start, seconds), text)
                if over.wait(_INTERVAL):
                    return

        drawing = threading.Thread(target=draw, daemon=True)
        drawing.start()
        try:
            yield
        finally:
            over.set()
            drawing.join()
            self.close()

    def report(self, text: str) -> None:
        """Print a line that stays."""
        if self._shown:
            self.close()
            self._write(f"{text}\n")

    def close(self) -> None:
        """Remove the bar."""
        if self._has_bar:
            self._write(_CLEAR)

    def _draw(self, seconds: float, text: str) -> None:
        if self._has_bar:
            share = min(1.0, seconds / self._seconds)
            full = round(_WIDTH * share)
            line = f"[{'#' * full}{'-' * (_WIDTH - full)}] {share:4.0%}  {text}"
            self._write(_CLEAR + line[: shutil.get_terminal_size().columns - 1])

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
