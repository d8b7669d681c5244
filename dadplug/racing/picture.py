"""Picture of a race: held-out loss against seconds and against megabytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .row import Row


def draw(rows: Sequence[Row], title: str, path: str | Path) -> None:
    """Plot the runs of several ways as a PNG file, each run a line.

    Args:
        rows: rows with at least one run.
        title: title of the picture.
        path: path of the PNG file.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'dadplug[examples]'") from error
    figure: Any = Figure(figsize=(10, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    for place, row in enumerate(rows):
        for number, run in enumerate(row.runs):
            style = {"color": f"C{place % 10}", "linewidth": 1.6, "label": row.label if number == 0 else None}
            losses = [point.loss for point in run]
            by_time.plot([point.seconds for point in run], losses, **style)
            if run[-1].megabytes > 0:  # the axis is logarithmic, and has no place for the start
                by_bytes.plot([point.megabytes for point in run[1:]], losses[1:], **style)
    by_time.set(xlabel="seconds of training", ylabel="held-out loss", yscale="log")
    by_bytes.set(xlabel="megabytes sent by a process")
    if any(row.megabytes_a_step > 0 for row in rows):
        by_bytes.set(xscale="log")
        by_bytes.xaxis.set_major_formatter("{x:g}")
    by_time.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))  # losses often stay within a decade
    by_time.yaxis.set_major_formatter("{x:g}")
    by_time.yaxis.set_minor_formatter(NullFormatter())
    for panel in (by_time, by_bytes):
        panel.grid(alpha=0.3)
    figure.legend(*by_time.get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=4)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
