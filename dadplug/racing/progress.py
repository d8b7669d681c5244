"""Progress of a race: a bar in a terminal, a line for each run elsewhere."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_INTERVAL = 0.25  # seconds between two drawings of the bar
_WIDTH = 24  # characters
_CLEAR = "\r\033[K"


class Progress:
    """Progress of a race.

    In a terminal the last line is a bar that moves by the training time of the runs, below the results so far.
    Elsewhere, as in a file, there is a line for each run.

    Args:
        seconds: training time of all runs.
        runs: number of runs; fewer take place if ways fail.
        stream: where to print; standard error if None.
        shown: whether to print at all.
    """

    def __init__(self, seconds: float, runs: int, *, stream: TextIO | None = None, shown: bool = True) -> None:
        self._seconds, self._runs, self._shown = seconds, runs, shown
        self._stream = sys.stderr if stream is None else stream
        self._has_bar = shown and self._stream.isatty()
        self._number = 0
        self._done = 0.0  # seconds

    @contextmanager
    def run(self, label: str, seconds: float) -> Iterator[None]:
        """Show a run as long as the block lasts; a context manager.

        Args:
            label: name of the way.
            seconds: training time of the run.
        """
        self._number += 1
        over = threading.Event()
        drawing = threading.Thread(target=self._draw_until, args=(over, label, seconds), daemon=True)
        if self._has_bar:
            drawing.start()
        try:
            yield
        finally:
            self._done += seconds
            over.set()
            if self._has_bar:
                drawing.join()
                self._write(_CLEAR)

    def report(self, result: str) -> None:
        """Print the result of the last run."""
        if self._shown:
            self._write(f"run {self._number} of {self._runs}: {result}\n")

    def _draw_until(self, over: threading.Event, label: str, seconds: float) -> None:
        start = time.monotonic()
        while True:
            self._write(_CLEAR + self._bar(label, min(time.monotonic() - start, seconds)))
            if over.wait(_INTERVAL):
                return

    def _bar(self, label: str, seconds: float) -> str:
        """Return the line with the bar, some seconds after the beginning of a run."""
        share = min(1.0, (self._done + seconds) / self._seconds)
        full = round(_WIDTH * share)
        line = f"[{'#' * full}{'-' * (_WIDTH - full)}] {share:4.0%}  run {self._number} of {self._runs}: {label}"
        return line[: shutil.get_terminal_size().columns - 1]

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
