"""Progress of a long measurement, its report, and figures for pictures.

The progress, on standard error, is a bar that moves by the time, and lines that stay. The report is one HTML file that
needs no other file and no network: a heading, a table and notes, light or dark.
"""

from __future__ import annotations

import html
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

_INTERVAL = 0.25  # seconds between two drawings
_WIDTH = 24  # characters
_CLEAR = "\r\033[K"


class ProgressBar:
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


def new_figure(width: float, height: float) -> Any:
    """Return a figure of matplotlib, which needs no display.

    Args:
        width: its width in inches.
        height: its height in inches.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'dadplug[examples]'") from error
    return Figure(figsize=(width, height), layout="constrained")


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --text: #1b1f24; --back: #fff; --line: #d0d7de; --faint: #57606a; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: #e6edf3; --back: #0d1117; --line: #30363d; --faint: #9198a1; }}
}}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; }}
.plots {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
img {{ max-width: 100%; background: #fff; }}
svg {{ flex: 1 1 20rem; min-width: 0; max-width: 100%; height: auto; }}
svg text {{ fill: var(--faint); font-size: 12px; }}
svg path {{ fill: none; stroke-width: 2; }}
svg line {{ stroke: var(--line); }}
.key {{ color: var(--faint); }}
.key span {{ margin-right: 1rem; white-space: nowrap; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
p {{ color: var(--faint); }}
</style>
<h1>{title}</h1>
{above}
<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<p>{note}</p>
{below}
</html>
"""


def report_page(
    title: str, cells: Sequence[Sequence[str]], notes: Sequence[str], *, above: str = "", below: str = ""
) -> str:
    """Format a report.

    Args:
        title: heading.
        cells: the table, its head first, as text.
        notes: sentences below the table, as text.
        above: HTML between heading and table.
        below: HTML below the notes.
    """
    head, *body = cells
    return _PAGE.format(
        title=html.escape(title),
        above=above,
        head="".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head),
        body="".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in body),
        note="<br>".join(map(html.escape, notes)),
        below=below,
    )
